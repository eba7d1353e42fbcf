/* Colours: PIL's ImageEnhance, torchvision's adjust_hue. A plane's pixels are followed by some to spare: up to a whole number
of LANES are written. */

#pragma once

#include <math.h>

#include "lanes.h"

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
