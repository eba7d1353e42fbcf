/* Blur: PIL's ImagingGaussianBlur, three box blurs on one another. */

#pragma once

#include <math.h>

#include "lanes.h"

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
