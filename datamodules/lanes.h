/* LANES pixels worked on at once: along a row, or, where a row's pixels depend on one another, in LANES rows that have been
turned so that they stand beside each other. */

#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef _WIN32 /* whose C library has another name for it, and for giving it back */
#include <malloc.h>
#define aligned_alloc(alignment, size) _aligned_malloc(size, alignment)
#define aligned_free _aligned_free
#else
#include <stdlib.h>
#define aligned_free free
#endif

#define LANES 16

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

static inline int32_t highest(int32_t a, int32_t b) { return a > b ? a : b; }
static inline int32_t lowest(int32_t a, int32_t b) { return a < b ? a : b; }
