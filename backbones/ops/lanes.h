/* Several numbers at a time: vectors, their parts in memory, and functions of them. */
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef _WIN32 /* whose C library has another name for it, and for giving it back */
#include <malloc.h>
#define aligned_alloc(alignment, size) _aligned_malloc(size, alignment)
#define aligned_free _aligned_free
#else
#include <stdlib.h>
#define aligned_free free
#endif

#define PAD 16

#ifdef __AVX512F__
#define WIDTH 16
#define COLUMNS 4 /* vectors in a row of a tile */
#else
#define WIDTH 8
#define COLUMNS 2
#endif
#define ROWS 6 /* of a tile: its sums fill the registers */
typedef float vector __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

static inline int padded(int n) { return (n + PAD - 1) / PAD * PAD; }
static inline int least(int a, int b) { return a < b ? a : b; }
static inline int most(int a, int b) { return a > b ? a : b; }
static inline vector all(float x) { return x - (vector){0}; }
static inline void ask_for(const float *p) { __builtin_prefetch(p); }
static inline vector load(const float *p) { return *(const vector *)p; }
static inline void store(float *p, vector v) { *(vector *)p = v; }

/* A vector's first `count` numbers, the others 0; and only these to memory. */
static inline vector load_up_to(const float *p, int count) {
    if (count >= WIDTH) return load(p);
    float part[WIDTH] = {0};
    memcpy(part, p, sizeof(float) * count);
    return load(part);
}
static inline void store_up_to(float *p, vector v, int count) {
    if (count >= WIDTH)
        store(p, v);
    else
        memcpy(p, &v, sizeof(float) * count);
}

static inline vector chosen(integers yes, vector a, vector b) {
    return (vector)((yes & (integers)a) | (~yes & (integers)b));
}

/* exp to two units in the last place; what is below e^-60 counts for nothing and would slow products down. */
static inline vector exponentials(vector x) {
    x = chosen(x < -60.0f, all(-60.0f), x);
    x = chosen(x > 88.0f, all(88.0f), x);
    const vector whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* rounds: 1.5 * 2^23 has no fraction */
    const vector r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * (vector)((__builtin_convertvector(whole, integers) + 127) << 23);
}

static inline float exponential(float x) { return exponentials(all(x))[0]; }
static inline vector sigmoids(vector x) { return 1.0f / (1.0f + exponentials(-x)); }
static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
