/* Products of small matrices, and what goes with them. */
#pragma once

#include "lanes.h"

enum kind {
    FULL,
    LOWER,     /* A is lower triangular */
    UPPER,     /* A is upper triangular */
    LOWER_OUT, /* of C only what is on and below the diagonal is wanted */
};

/* `rows` x `columns` vectors of C = A B, or C += A B. */
static inline __attribute__((always_inline)) void tile(
    const int rows, const int columns, int from, int to, const float *A, int row, int step, const float *B, int ldb,
    float *C, int ldc, int add
) {
    vector sum[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) sum[i][j] = add ? load(C + i * ldc + j * WIDTH) : (vector){0};
    for (int k = from; k < to; k++) {
        vector b[COLUMNS];
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) b[j] = load(B + k * ldb + j * WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            const float a = A[i * row + k * step];
#pragma GCC unroll 8
            for (int j = 0; j < columns; j++) sum[i][j] += a * b[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) store(C + i * ldc + j * WIDTH, sum[i][j]);
}

/* C (m, n) = or += A (m, k) B (k, n). A's elements are `row` and `step` apart, so it may be a transpose; n is padded. */
static void multiply(
    enum kind kind, int m, int n, int k, const float *A, int row, int step, const float *B, int ldb, float *C, int ldc,
    int add
) {
    for (int i = 0; i < m; i += ROWS) {
        const int rows = least(ROWS, m - i), to = kind == LOWER ? least(k, i + rows) : k, from = kind == UPPER ? i : 0;
        const int end = kind == LOWER_OUT ? least(n, (i + rows + WIDTH - 1) / WIDTH * WIDTH) : n;
        const float *a = A + i * row;
        for (int j = 0; j < end;) {
            const int wide = end - j >= COLUMNS * WIDTH;
            float *c = C + i * ldc + j;
#define TILE(R)                                                                                                        \
    case R:                                                                                                            \
        if (wide)                                                                                                      \
            tile(R, COLUMNS, from, to, a, row, step, B + j, ldb, c, ldc, add);                                         \
        else                                                                                                           \
            tile(R, 1, from, to, a, row, step, B + j, ldb, c, ldc, add);                                               \
        break;
            switch (rows) { TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) }
#undef TILE
            j += wide ? COLUMNS * WIDTH : WIDTH;
        }
    }
}

/* (m, n) to (n, m), both counts rounded up to fours. */
static void transpose(int m, int n, const float *from, int ld, float *to, int ldt) {
    typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
    typedef int32_t which __attribute__((vector_size(16)));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (which){__VA_ARGS__})
#endif
    for (int i = 0; i < m; i += 4)
        for (int j = 0; j < n; j += 4) {
            const float *f = from + i * ld + j;
            float *t = to + j * ldt + i;
            const four a = *(const four *)f, b = *(const four *)(f + ld);
            const four c = *(const four *)(f + 2 * ld), d = *(const four *)(f + 3 * ld);
            const four ac = SHUFFLE(a, c, 0, 4, 1, 5), bd = SHUFFLE(b, d, 0, 4, 1, 5);
            const four ac2 = SHUFFLE(a, c, 2, 6, 3, 7), bd2 = SHUFFLE(b, d, 2, 6, 3, 7);
            *(four *)t = SHUFFLE(ac, bd, 0, 4, 1, 5);
            *(four *)(t + ldt) = SHUFFLE(ac, bd, 2, 6, 3, 7);
            *(four *)(t + 2 * ldt) = SHUFFLE(ac2, bd2, 0, 4, 1, 5);
            *(four *)(t + 3 * ldt) = SHUFFLE(ac2, bd2, 2, 6, 3, 7);
        }
}

static inline float total(vector v) {
    float sum = 0.0f;
    for (int i = 0; i < WIDTH; i++) sum += v[i];
    return sum;
}

/* n is padded. */
static inline float dot(const float *a, const float *b, int n) {
    vector sum = {0};
    for (int i = 0; i < n; i += WIDTH) sum += load(a + i) * load(b + i);
    return total(sum);
}
