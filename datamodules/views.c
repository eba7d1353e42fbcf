/* An image's views in one call: cut, resized, coloured, blurred and written, with the bits that PIL gives.

Each operation follows PIL's integer or float arithmetic step by step (named beside it), so its results are equal and
not near; tests/datamodules/test_views.py holds them together. Widths are resized before heights, as Pillow did for all
images up to version 12; it now takes the other order where heights shrink far more. Pixels are uint8. A view lives in
three planes, one a channel, of size rows of size pixels each. LANES pixels are worked on at once: along a row, or, where a
row's pixels depend on one another, in LANES rows that have been turned so that they stand beside each other.

Compiled and loaded by native.py. No function here checks its arguments: datamodules/views.py does. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define LANES 16
#define BITS 22 /* of a resampling weight's fraction: PIL's PRECISION_BITS */

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define WIDTH 16 /* integers in a vector of the machine */
#else
#define WIDTH 8
#endif
#define PARTS (LANES / WIDTH)

typedef int32_t vector __attribute__((vector_size(4 * WIDTH)));
typedef float floats __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t positive __attribute__((vector_size(4 * WIDTH)));
typedef struct { vector part[PARTS]; } ints; /* LANES of them */
typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef uint8_t block[LANES][LANES];

typedef struct {
    int32_t left, top, width, height; /* of the box in the image */
    int32_t size;                     /* of the view */
    int32_t jitters;                  /* how many of the four follow */
    int32_t jitter[4];                /* 0 brightness, 1 contrast, 2 saturation, 3 hue */
    float factor[4];
    int32_t gray, solarize, flip;
    float sigma;                      /* of the blur; negative: none */
    uint8_t *out;                     /* three planes */
    int64_t plane;                    /* bytes from one to the next */
} view;

/* The next three are in words of the machine where there are any: compilers take such steps apart, byte by byte. */

/* LANES pixels. */
static inline ints widen(const uint8_t *p) {
    ints v;
    for (int i = 0; i < PARTS; i++) {
#if WIDTH == 16
        v.part[i] = (vector)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
        v.part[i] = (vector)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + i * WIDTH)));
#else
        for (int j = 0; j < WIDTH; j++) v.part[i][j] = p[i * WIDTH + j];
#endif
    }
    return v;
}

/* Back to pixels; what is below 0 or above 255 is clipped to these. */
static inline void narrow(uint8_t *p, ints v) {
#if WIDTH == 16
    const __m512i above = _mm512_max_epi32((__m512i)v.part[0], _mm512_setzero_si512());
    _mm_storeu_si128((__m128i *)p, _mm512_cvtusepi32_epi8(above));
#elif defined(__AVX2__)
    const __m256i packed = _mm256_packus_epi32((__m256i)v.part[0], (__m256i)v.part[1]);
    const __m256i words = _mm256_permute4x64_epi64(packed, 0xd8);
    _mm_storeu_si128(
        (__m128i *)p, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1))
    );
#else
    for (int i = 0; i < LANES; i++) {
        const int32_t value = v.part[i / WIDTH][i % WIDTH];
        p[i] = value < 0 ? 0 : value > 255 ? 255 : value;
    }
#endif
}

/* sum + first of each of LANES pairs of pixels times the low half of `pair`, second times the high half. */
static inline ints multiply_pairs(ints sum, const uint8_t *p, int32_t pair) {
    for (int i = 0; i < PARTS; i++) {
#if WIDTH == 16
        const __m512i two = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p)), by = _mm512_set1_epi32(pair);
#ifdef __AVX512VNNI__
        sum.part[i] = (vector)_mm512_dpwssd_epi32((__m512i)sum.part[i], two, by);
#else
        sum.part[i] += (vector)_mm512_madd_epi16(two, by);
#endif
#elif defined(__AVX2__)
        const __m256i two = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(p + 2 * i * WIDTH)));
        sum.part[i] += (vector)_mm256_madd_epi16(two, _mm256_set1_epi32(pair));
#else
        const uint8_t *q = p + 2 * i * WIDTH;
        for (int j = 0; j < WIDTH; j++)
            sum.part[i][j] += q[2 * j] * (int16_t)(pair & 0xffff) + q[2 * j + 1] * (int16_t)(pair >> 16);
#endif
    }
    return sum;
}

#ifdef __clang__
#define CHOOSE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CHOOSE(a, b, ...) __builtin_shuffle(a, b, (bytes){__VA_ARGS__})
#endif
#define FIRST_HALVES(a, b) CHOOSE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define SECOND_HALVES(a, b) CHOOSE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)

/* LANES rows of LANES bytes to their columns. */
static inline void turn(const uint8_t *from, ptrdiff_t stride, uint8_t *to, ptrdiff_t to_stride) {
    bytes a[LANES], b[LANES];
    for (int i = 0; i < LANES; i++) memcpy(&a[i], from + i * stride, LANES);
    for (int twice = 0; twice < 2; twice++) { /* rows 0 to 7 interleaved with rows 8 to 15, byte by byte: four times */
        for (int i = 0; i < LANES / 2; i++) {
            b[2 * i] = FIRST_HALVES(a[i], a[i + 8]);
            b[2 * i + 1] = SECOND_HALVES(a[i], a[i + 8]);
        }
        for (int i = 0; i < LANES / 2; i++) {
            a[2 * i] = FIRST_HALVES(b[i], b[i + 8]);
            a[2 * i + 1] = SECOND_HALVES(b[i], b[i + 8]);
        }
    }
    for (int i = 0; i < LANES; i++) memcpy(to + i * to_stride, &a[i], LANES);
}

/* a0 b0 a1 b1 ... of LANES pixels each. */
static inline void interleave(const uint8_t *a, const uint8_t *b, uint8_t *to) {
    bytes one, other;
    memcpy(&one, a, LANES);
    memcpy(&other, b, LANES);
    const bytes first = FIRST_HALVES(one, other), second = SECOND_HALVES(one, other);
    memcpy(to, &first, LANES);
    memcpy(to + LANES, &second, LANES);
}

/* ---- resizing: ImagingResample ------------------------------------------------------------------------------------

Processors multiply pairs of 16-bit numbers and add them up in one step. So pixels that follow one another along the
axis of the sum are kept as pairs, and a weight w of 22 bits and more as high * 2^LOW_BITS + low: two exact sums. */

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

/* ---- colours: ImageEnhance, torchvision's adjust_hue ---------------------------------------------------------------- */

/* rgb2l; of pixels, or of LANES of them. */
#define LUMA(r, g, b) (((r) * 19595 + (g) * 38470 + (b) * 7471 + 0x8000) >> 16)

/* ImagingBlend of the degenerate image and the image itself; PIL's limits come with the packing to pixels. */
static inline vector blend(vector from, vector to, float alpha) {
    const floats mixed = __builtin_convertvector(from, floats) + alpha * __builtin_convertvector(to - from, floats);
    return __builtin_convertvector(mixed, vector);
}

/* A plane, and what follows up to a whole number of LANES. */
static void towards(uint8_t *p, int n, int32_t from, float alpha) {
    for (int i = 0; i < n; i += LANES) {
        ints v = widen(p + i);
        for (int k = 0; k < PARTS; k++) v.part[k] = blend(from - (vector){0}, v.part[k], alpha);
        narrow(p + i, v);
    }
}

static void contrast(uint8_t *planes, ptrdiff_t plane, int n, float alpha) {
    const uint8_t *restrict r = planes, *restrict g = planes + plane, *restrict b = planes + 2 * plane;
    uint64_t total = 0;
    for (int start = 0; start < n; start += 1 << 16) { /* partial sums fit 32 bits */
        uint32_t sum = 0;
        const int end = n - start < 1 << 16 ? n : start + (1 << 16);
        for (int i = start; i < end; i++) sum += (uint32_t)LUMA(r[i], g[i], b[i]);
        total += sum;
    }
    const int32_t mean = (int)((double)total / n + 0.5);
    for (int c = 0; c < 3; c++) towards(planes + c * plane, n, mean, alpha);
}

static void saturation(uint8_t *planes, ptrdiff_t plane, int n, float alpha) {
    for (int i = 0; i < n; i += LANES) {
        ints v[3];
        for (int c = 0; c < 3; c++) v[c] = widen(planes + c * plane + i);
        for (int k = 0; k < PARTS; k++) {
            const vector grey = LUMA(v[0].part[k], v[1].part[k], v[2].part[k]);
            for (int c = 0; c < 3; c++) v[c].part[k] = blend(grey, v[c].part[k], alpha);
        }
        for (int c = 0; c < 3; c++) narrow(planes + c * plane + i, v[c]);
    }
}

/* yes ? a : b for a `yes` of 0 or 1, without the branch that would keep a loop from being vectorised. */
static inline int32_t pick(int32_t yes, int32_t a, int32_t b) { return b ^ ((a ^ b) & -yes); }
static inline int32_t highest(int32_t a, int32_t b) { return a > b ? a : b; }
static inline int32_t lowest(int32_t a, int32_t b) { return a < b ? a : b; }

/* rgb2hsv_row, the hue moved (uint8, wrapping round), hsv2rgb. In float32 throughout, where PIL has doubles in places:
for all 256^3 colours and shifts the outcome is the same. */
static void hue(uint8_t *planes, ptrdiff_t plane, int n, uint8_t shift) {
    uint8_t *restrict rp = planes, *restrict gp = planes + plane, *restrict bp = planes + 2 * plane;
    for (int i = 0; i < n; i++) {
        const int32_t r = rp[i], g = gp[i], b = bp[i];
        const int32_t v = highest(highest(r, g), b), range = v - lowest(lowest(r, g), b);
        const int32_t red = r == v, green = (g == v) & !red;
        /* the hue in sixths of a turn is base + first / range - second / range; the lowest channel's term is 1 */
        const int32_t base = pick(red, 0, pick(green, 2, 4));
        const int32_t first = v - pick(red, b, pick(green, r, g)), second = v - pick(red, g, pick(green, b, r));
        const int32_t rising = first != range;
        const float ratio = (float)lowest(first, second) / (float)(range + (range == 0));
        const float turns = ((float)(base + 1 - 2 * rising) + (float)(2 * rising - 1) * ratio) / 6.0f;
        const int32_t h = (int32_t)((turns - floorf(turns)) * 255.0f) & -(range != 0);
        const int32_t s = (int32_t)((float)(range * 255) / (float)(v + (v == 0)));

        const int32_t moved = ((h + shift) & 255) * 6, sector = moved / 255, part = moved - sector * 255;
        const float high = (float)v, of = 1.0f / 65025.0f;
        const int32_t p = (int32_t)(high * (float)(255 - s) * (1.0f / 255.0f) + 0.5f);
        const int32_t q = (int32_t)(high - high * (float)(s * part) * of + 0.5f);
        const int32_t t = (int32_t)(high - high * (float)(s * (255 - part)) * of + 0.5f);
        const int32_t is1 = sector == 1, is2 = sector == 2, is3 = sector == 3, is4 = sector == 4, is5 = sector == 5;
        rp[i] = pick(is1, q, pick(is2 | is3, p, pick(is4, t, v))); /* without colour p = q = t = v */
        gp[i] = pick(is1 | is2, v, pick(is3, q, pick(is4 | is5, p, t)));
        bp[i] = pick(is2, t, pick(is3 | is4, v, pick(is5, q, p)));
    }
}

/* ---- blur: ImagingGaussianBlur -------------------------------------------------------------------------------------- */

#define PASSES 3

/* _gaussian_blur_radius */
static float box_radius(float sigma) {
    const float variance = sigma * sigma / PASSES;
    const float length = sqrt(12.0 * variance + 1.0), whole = floor((length - 1.0) / 2.0);
    float part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance);
    part /= 6 * (variance - (whole + 1) * (whole + 1));
    return whole + part;
}

/* ImagingLineBoxBlur8, PASSES times over LANES lines of n pixels side by side; room for reach pixels at either end. */
static void box_blurs(uint8_t (*line)[LANES], uint8_t (*spare)[LANES], int n, float radius) {
    const int whole = (int)radius, reach = whole + 1;
    const uint32_t ww = (uint32_t)((1 << 24) / (radius * 2 + 1));
    const uint32_t fw = ((1 << 24) - (uint32_t)(whole * 2 + 1) * ww) / 2;
    for (int pass = 0; pass < PASSES; pass++) {
        for (int i = 1; i <= reach; i++) {
            memcpy(line[-i], line[0], LANES);
            memcpy(line[n - 1 + i], line[n - 1], LANES);
        }
        ints sum = {0};
        for (int i = -reach; i < whole; i++) {
            const ints next = widen(line[i]);
            for (int k = 0; k < PARTS; k++) sum.part[k] += next.part[k];
        }
        ints last = widen(line[whole]);
        for (int i = 0; i < n; i++) {
            const ints before = widen(line[i - reach]), after = widen(line[i + reach]);
            ints out;
            for (int k = 0; k < PARTS; k++) {
                sum.part[k] += last.part[k] - before.part[k];
                const positive edges = (positive)(before.part[k] + after.part[k]);
                out.part[k] = (vector)(((positive)sum.part[k] * ww + edges * fw + (1u << 23)) >> 24);
            }
            narrow(spare[i], out);
            last = after; /* reach is whole + 1 */
        }
        uint8_t (*swap)[LANES] = line;
        line = spare;
        spare = swap;
    }
}

/* LANES pixels, or the fewer that are there. */
static inline void copy(uint8_t *to, const uint8_t *from, int n) {
    if (n >= LANES)
        memcpy(to, from, LANES);
    else
        memcpy(to, from, n);
}

/* One plane of size by size pixels; PIL does the rows first. */
static void blur(uint8_t *p, int size, float sigma, uint8_t *room) {
    const float radius = box_radius(sigma);
    if (radius == 0) return;
    const int reach = (int)radius + 1;
    uint8_t (*line)[LANES] = (uint8_t (*)[LANES])room + reach;
    uint8_t (*spare)[LANES] = line + size + 2 * reach + LANES;
    uint8_t (*done)[LANES] = PASSES % 2 ? spare : line;
    for (int y = 0; y < size; y += LANES) {
        const int rows = lowest(size - y, LANES);
        for (int x = 0; x < size; x += LANES) {
            block piece = {{0}};
            for (int i = 0; i < rows; i++) copy(piece[i], p + (y + i) * size + x, size - x);
            turn(piece[0], LANES, line[x], LANES);
        }
        box_blurs(line, spare, size, radius);
        for (int x = 0; x < size; x += LANES) {
            block piece;
            turn(done[x], LANES, piece[0], LANES);
            for (int i = 0; i < rows; i++) copy(p + (y + i) * size + x, piece[i], size - x);
        }
    }
    for (int x = 0; x < size; x += LANES) {
        for (int y = 0; y < size; y++) copy(line[y], p + y * size + x, size - x);
        box_blurs(line, spare, size, radius);
        for (int y = 0; y < size; y++) copy(p + y * size + x, done[y], size - x);
    }
}

/* ---- a view --------------------------------------------------------------------------------------------------------- */

static _Thread_local uint8_t *room;
static _Thread_local size_t room_size;

/* The same memory for each call, and never given back: page faults would cost more than the work. */
static uint8_t *room_of(size_t size) {
    if (size > room_size) {
        free(room);
        room_size = 0;
        room = aligned_alloc(64, (size + 63) / 64 * 64);
        if (room != NULL) room_size = size;
    }
    return room;
}

static size_t padded(size_t n) { return (n + 63) / 64 * 64 + 64; }

static int render_one(const uint8_t *pixels, ptrdiff_t stride, const view *v) {
    const int size = v->size, n = size * size;
    const int across = pairs_of(v->width, size), down = pairs_of(v->height, size);
    const ptrdiff_t row = (size + 2 * LANES - 1) / (2 * LANES) * 2 * LANES;
    const ptrdiff_t rows_plane = padded((v->height + LANES) * row), plane = padded(n + 4 * LANES);
    const size_t weights = padded(sizeof(int32_t) * size * (2 + 2 * (size_t)(across > down ? across : down)));
    const size_t turned = padded((3 * (size_t)v->width + 2 * LANES) * LANES);
    const size_t lines = padded(LANES * (2 * (size_t)size + 4 * ((size_t)fabsf(v->sigma) + 2) + 4 * LANES));
    uint8_t *memory = room_of(weights + 3 * turned + 3 * rows_plane + 3 * plane + lines);
    if (memory == NULL) return 1;

    uint8_t *paired = memory + weights + turned, *rows = paired + 2 * turned;
    uint8_t *planes = rows + 3 * rows_plane, *spare = planes + 3 * plane;
    filter f = filter_at((int32_t *)memory, size, across);
    bicubic(&f, v->width, size);
    along_rows(
        pixels + v->top * stride + 3 * v->left, stride, v->width, v->height, size, &f, memory + weights, paired, rows,
        row, rows_plane
    );
    f = filter_at((int32_t *)memory, size, down);
    bicubic(&f, v->height, size);
    for (int c = 0; c < 3; c++) along_columns(rows + c * rows_plane, row, size, &f, planes + c * plane);

    for (int j = 0; j < v->jitters; j++) {
        const float by = v->factor[j];
        switch (v->jitter[j]) {
        case 0: for (int c = 0; c < 3; c++) towards(planes + c * plane, n, 0, by); break;
        case 1: contrast(planes, plane, n, by); break;
        case 2: saturation(planes, plane, n, by); break;
        case 3: hue(planes, plane, n, (uint8_t)((int)by)); break;
        }
    }
    const int channels = v->gray ? 1 : 3;
    if (v->gray)
        for (int i = 0; i < n; i++) planes[i] = LUMA(planes[i], planes[plane + i], planes[2 * plane + i]);
    for (int c = 0; c < 3; c++) {
        uint8_t *from = planes + c * plane, *to = v->out + c * v->plane;
        if (c >= channels) {
            memcpy(to, v->out, n);
            continue;
        }
        if (v->sigma >= 0) blur(from, size, v->sigma, spare);
        if (v->solarize)
            for (int i = 0; i < n; i++) from[i] = from[i] < 128 ? from[i] : 255 - from[i];
        if (!v->flip)
            memcpy(to, from, n);
        else
            for (int y = 0; y < size; y++)
                for (int x = 0; x < size; x++) to[y * size + x] = from[y * size + size - 1 - x];
    }
    return 0;
}

/* Renders the views of an image whose rows are `stride` bytes apart. 0, or 1 where there is no memory. */
int render(const uint8_t *pixels, ptrdiff_t stride, const view *views, int count) {
    for (int i = 0; i < count; i++)
        if (render_one(pixels, stride, &views[i])) return 1;
    return 0;
}
