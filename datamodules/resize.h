/* Resizing: PIL's ImagingResample, bicubic.

Processors multiply pairs of 16-bit numbers and add them up in one step. So pixels that follow one another along the
axis of the sum are kept as pairs, and a weight w of 22 bits and more as high * 2^LOW_BITS + low: two exact sums. */

#pragma once

#include <math.h>

#include "lanes.h"

#define BITS 22 /* of a resampling weight's fraction: PIL's PRECISION_BITS */
#define LOW_BITS 11

typedef struct {
    int room;       /* pairs for one output pixel */
    int32_t *first; /* (size): the pair its window starts with */
    int32_t *count; /* (size): pairs in its window */
    int32_t *low, *high; /* (size, room): a pair of weights in one integer */
} filter;

static int pairs_of(int from, int to) {
    const double scale = (double)from / to;
    return ((int)ceil(2.0 * (scale < 1.0 ? 1.0 : scale)) * 2 + 1) / 2 + 2;
}

static filter filter_at(int32_t *memory, int size, int room) {
    return (filter){room, memory, memory + size, memory + 2 * size, memory + (2 + room) * size};
}

/* precompute_coeffs and normalize_coeffs_8bpc, for PIL's bicubic kernel (a = -0.5). */
static void bicubic(const filter *f, int from, int to) {
    const double scale = (double)from / to, stretch = scale < 1.0 ? 1.0 : scale, support = 2.0 * stretch;
    const double ss = 1.0 / stretch;
    double w[2 * f->room + 8];
    int32_t weight[2 * f->room + 9];
    for (int i = 0; i < to; i++) {
        const double center = (i + 0.5) * scale;
        int first = (int)(center - support + 0.5), end = (int)(center + support + 0.5);
        first = first < 0 ? 0 : first;
        end = end > from ? from : end;
        const int n = end - first, odd = first & 1, pairs = (n + odd + 1) / 2;
        const int whole = (n + 7) / 8 * 8; /* vectors of them: what is computed beyond n is not used */
        double sum = 0.0;
        for (int k = 0; k < whole; k++) {
            const double x = fabs((k + first - center + 0.5) * ss);
            const double near = ((-0.5 + 2.0) * x - (-0.5 + 3.0)) * x * x + 1;
            const double far = (((x - 5) * x + 8) * x - 4) * -0.5;
            w[k] = x < 1.0 ? near : x < 2.0 ? far : 0.0;
        }
        for (int k = 0; k < n; k++) sum += w[k];
        sum = sum != 0.0 ? sum : 1.0;
        for (int k = 0; k < whole; k++) {
            const double share = w[k] / sum;
            weight[k + odd] = (int)((share < 0 ? -0.5 : 0.5) + share * (1 << BITS));
        }
        weight[0] = odd ? 0 : weight[0];
        weight[2 * pairs - 1] = n + odd < 2 * pairs ? 0 : weight[2 * pairs - 1];
        for (int k = 0; k < pairs; k++) {
            const uint32_t a = weight[2 * k], b = weight[2 * k + 1], low = (1 << LOW_BITS) - 1;
            f->low[i * f->room + k] = (b & low) << 16 | (a & low);
            f->high[i * f->room + k] = (uint32_t)((int32_t)b >> LOW_BITS) << 16 | (((int32_t)a >> LOW_BITS) & 0xffff);
        }
        f->first[i] = first / 2;
        f->count[i] = pairs;
    }
}

/* The pixels of both sums: PIL's (sum + half) >> BITS, clipped. */
static inline void finish(ints low, ints high, uint8_t *to) {
    for (int i = 0; i < PARTS; i++)
        low.part[i] = ((high.part[i] << LOW_BITS) + low.part[i] + (1 << (BITS - 1))) >> BITS;
    narrow(to, low);
}

/* ImagingResampleHorizontal_8bpc: the box's rows to three planes of paired rows: a0 b0 a1 b1 ... of rows a and b.

`turned` has room for LANES bytes of each byte of a row, `paired` for twice as many; both and some to spare. */
static void along_rows(
    const uint8_t *pixels, ptrdiff_t stride, int width, int height, int size, const filter *f, uint8_t *turned,
    uint8_t *paired, uint8_t *planes, ptrdiff_t row, ptrdiff_t plane
) {
    const int used = 3 * width;
    for (int y = 0; y < height; y += LANES) {
        /* LANES rows, turned: byte j of all of them beside each other */
        const int rows = height - y < LANES ? height - y : LANES;
        for (int j = 0; j < used; j += LANES) {
            const int there = used - j < LANES ? used - j : LANES;
            if (rows == LANES && there == LANES) {
                turn(pixels + y * stride + j, stride, turned + j * LANES, LANES);
            } else { /* never a byte beyond the box */
                block piece = {{0}};
                for (int i = 0; i < rows; i++) memcpy(piece[i], pixels + (y + i) * stride + j, there);
                turn(piece[0], LANES, turned + j * LANES, LANES);
            }
        }
        for (int x = 0; x < width; x += 2) /* beyond an odd width the weight is 0 */
            for (int c = 0; c < 3; c++) {
                const uint8_t *from = turned + (3 * x + c) * LANES;
                interleave(from, from + 3 * LANES, paired + (3 * x + 2 * c) * LANES);
            }
        for (int x = 0; x < size; x += LANES) {
            block colours[3] = {0};
            for (int i = 0; i < LANES && x + i < size; i++) {
                const int32_t *low = f->low + (x + i) * f->room, *high = f->high + (x + i) * f->room;
                const uint8_t *p = paired + 6 * LANES * f->first[x + i];
                ints lows[3] = {0}, highs[3] = {0};
                for (int k = 0, n = f->count[x + i]; k < n; k++)
                    for (int c = 0; c < 3; c++, p += 2 * LANES) {
                        lows[c] = multiply_pairs(lows[c], p, low[k]);
                        highs[c] = multiply_pairs(highs[c], p, high[k]);
                    }
                for (int c = 0; c < 3; c++) finish(lows[c], highs[c], colours[c][i]);
            }
            for (int c = 0; c < 3; c++) {
                block piece;
                turn(colours[c][0], LANES, piece[0], LANES);
                for (int i = 0; i < LANES; i += 2)
                    interleave(piece[i], piece[i + 1], planes + c * plane + (y + i) * row + 2 * x);
            }
        }
    }
}

/* ImagingResampleVertical_8bpc of one plane. A row's last store runs over into the next row, which is written later. */
static void along_columns(const uint8_t *from, ptrdiff_t row, int size, const filter *f, uint8_t *to) {
    for (int y = 0; y < size; y++) {
        const int32_t *low = f->low + y * f->room, *high = f->high + y * f->room;
        const int n = f->count[y];
        for (int x = 0; x < size; x += 2 * LANES) { /* two at once hide the time that a sum takes */
            const uint8_t *p = from + 2 * (f->first[y] * row + x);
            ints lows[2] = {0}, highs[2] = {0};
            for (int k = 0; k < n; k++, p += 2 * row)
                for (int i = 0; i < 2; i++) {
                    lows[i] = multiply_pairs(lows[i], p + 2 * i * LANES, low[k]);
                    highs[i] = multiply_pairs(highs[i], p + 2 * i * LANES, high[k]);
                }
            for (int i = 0; i < 2; i++) finish(lows[i], highs[i], to + y * size + x + i * LANES);
        }
    }
}
