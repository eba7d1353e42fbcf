/* What a bidirectional Mamba-2 block does between its two projections, forward and backward, on the CPU in float32.

A thread takes a sequence through all stages while it is in its caches: convolution and SiLU, scan, gate and norm of both
directions, their mean. Nothing is flipped: the second direction's tokens are gathered from the last to the first.

    l tokens, h heads of p channels, d = h p, g groups, n state, k taps, c = d + 2 g n channels to convolve
    q tokens in a block, and in a block, with a_t = dt_t A and cum_i the sum of a_t from the block's first token to i,

    y_i = sum_{j <= i} (C_i.B_j) exp(cum_i - cum_j) dt_j x_j + exp(cum_i) C_i S + D x_i
    S  <- exp(cum_q) S + sum_j exp(cum_q - cum_j) B_j (dt_j x_j)^T

(Dao & Gu 2024, sec. 6.) Rows of scratch are padded to whole vectors, by zeros where they are summed over. Compiled and
loaded by native.py; arguments are checked by bidirectional.py. Sums have one order, whatever the number of threads. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 64 /* tokens, at most */
#define PAD 16
#define AHEAD 8 /* tokens that are asked for early: a head's channels stand far apart from token to token */

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

typedef struct {
    int64_t batch, length, heads, headdim, groups, state, taps;
    double eps;
    const float *input; /* (b,l,2d+2gn+h): z, x, B, C, dt */
    const float *conv_weight, *conv_bias, *dt_bias, *A_log, *D, *norm_weight; /* (2,k,c) (2,c) (2,h) (2,h) (2,h) (2,d) */
    float *y;           /* (b,2,l,d): of the scans, in the order of the input */
    float *out;         /* (b,l,d) */
    const float *grad;  /* (b,l,d) */
    float *dinput;      /* (b,l,2d+2gn+h) */
    float *dparameters; /* (b, all of the above, one after the other) */
    int64_t threads;
} mixer;

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

/* ---- products of small matrices -------------------------------------------------------------------------------------- */

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

/* ---- a direction's inputs -------------------------------------------------------------------------------------------- */

/* Sizes, and the scratch memory of a thread. */
typedef struct {
    const mixer *m;
    int l, h, p, g, n, k, d, c, width; /* width: of the input */
    int P, N, blocks, q;               /* padded p and n; blocks of q tokens */
    float *B, *C, *B_raw, *C_raw;      /* (g,l+,N): after SiLU, and before */
    float *dB, *dC;
    float *scores, *dscores;           /* (g,blocks,BLOCK,BLOCK): C.B */
    float *x, *x_raw, *xdt, *dxdt, *dy; /* (l+,P): of one head */
    float *step, *step_raw, *cum;      /* (h,l+) */
    float *dstep;                      /* (l) */
    float *dyy;                        /* (2,l,d): gradients of y */
    float *states;                     /* (blocks,P,N) */
    float *S, *dS, *dST, *decay, *M, *dM, *turned, *tmp, *tmp2; /* (64 or more, 64 or more) */
    float *row;                        /* (2,d+) */
} work;

static inline int at(const work *w, int direction, int t) { return direction ? w->l - 1 - t : t; }

/* Channels [from, from + count) of x, B, C, convolved, in the order of the scan; `raw` before SiLU. */
static void convolve(
    const work *w, int direction, const float *input, int from, int count, float *to, float *raw, int ld
) {
    const float *weight = w->m->conv_weight + (size_t)direction * w->k * w->c + from;
    const float *bias = w->m->conv_bias + (size_t)direction * w->c + from;
    for (int t = 0; t < w->l; t++)
        for (int c = 0; c < count; c += WIDTH) {
            const int there = count - c;
            if (t + AHEAD < w->l) ask_for(input + (size_t)at(w, direction, t + AHEAD) * w->width + w->d + from + c);
            vector sum = load_up_to(bias + c, there);
            for (int k = w->k - 1 - least(t, w->k - 1); k < w->k; k++) {
                const float *in = input + (size_t)at(w, direction, t - (w->k - 1) + k) * w->width + w->d + from;
                sum += load_up_to(weight + (size_t)k * w->c + c, there) * load_up_to(in + c, there);
            }
            store(raw + (size_t)t * ld + c, sum);
            store(to + (size_t)t * ld + c, sum * sigmoids(sum));
        }
}

/* From the gradient after SiLU, which it overwrites, to those of the input (added where the direction is the second),
weight and bias. */
static void convolve_backward(
    const work *w, int direction, const float *input, int from, int count, float *grad, const float *raw, int ld,
    float *dinput, float *dweight, float *dbias
) {
    const float *weight = w->m->conv_weight + (size_t)direction * w->k * w->c + from;
    for (int t = 0; t < w->l; t++)
        for (int c = 0; c < count; c += WIDTH) {
            const int there = count - c;
            if (t + AHEAD < w->l) ask_for(input + (size_t)at(w, direction, t + AHEAD) * w->width + w->d + from + c);
            const vector r = load(raw + (size_t)t * ld + c), s = sigmoids(r);
            const vector g = load(grad + (size_t)t * ld + c) * s * (1.0f + r * (1.0f - s));
            store(grad + (size_t)t * ld + c, g);
            store_up_to(dbias + from + c, load_up_to(dbias + from + c, there) + g, there);
            for (int k = w->k - 1 - least(t, w->k - 1); k < w->k; k++) {
                const float *in = input + (size_t)at(w, direction, t - (w->k - 1) + k) * w->width + w->d + from;
                float *sum = dweight + (size_t)k * w->c + from + c;
                store_up_to(sum, load_up_to(sum, there) + g * load_up_to(in + c, there), there);
            }
        }
    for (int t = 0; t < w->l; t++) {
        float *out = dinput + (size_t)at(w, direction, t) * w->width + w->d + from;
        for (int c = 0; c < count; c += WIDTH) {
            const int there = count - c;
            if (t + AHEAD < w->l) ask_for(dinput + (size_t)at(w, direction, t + AHEAD) * w->width + w->d + from + c);
            vector sum = {0};
            if (direction) sum = load_up_to(out + c, there);
            for (int k = w->k - least(w->k, w->l - t); k < w->k; k++)
                sum += load_up_to(weight + (size_t)k * w->c + c, there) * load(grad + (size_t)(t + w->k - 1 - k) * ld + c);
            store_up_to(out + c, sum, there);
        }
    }
}

static inline int block_length(const work *w, int block) { return least(w->q, w->l - block * w->q); }

/* B, C, their products in each block, the steps and their sums in each block. */
static void shared_inputs(const work *w, int direction, const float *input) {
    for (int g = 0; g < w->g; g++) {
        const size_t start = (size_t)g * (w->l + BLOCK) * w->N;
        convolve(w, direction, input, w->d + g * w->n, w->n, w->B + start, w->B_raw + start, w->N);
        convolve(w, direction, input, w->d + (w->g + g) * w->n, w->n, w->C + start, w->C_raw + start, w->N);
        for (int b = 0; b < w->blocks; b++) {
            const int q = block_length(w, b);
            const size_t first = start + (size_t)b * w->q * w->N;
            transpose(q, w->N, w->B + first, w->N, w->turned, BLOCK);
            multiply(
                LOWER_OUT, q, padded(q), w->N, w->C + first, w->N, 1, w->turned, BLOCK,
                w->scores + ((size_t)g * w->blocks + b) * BLOCK * BLOCK, BLOCK, 0
            );
        }
    }
    for (int h = 0; h < w->h; h++) {
        const float bias = w->m->dt_bias[direction * w->h + h], A = -expf(w->m->A_log[direction * w->h + h]);
        float *step = w->step + (size_t)h * w->l, *cum = w->cum + (size_t)h * w->l, sum = 0.0f;
        for (int t = 0; t < w->l; t++) {
            const float raw = input[(size_t)at(w, direction, t) * w->width + w->width - w->h + h] + bias;
            w->step_raw[(size_t)h * w->l + t] = raw;
            step[t] = raw > 20.0f ? raw : log1pf(expf(raw));
            sum = (t % w->q ? sum : 0.0f) + step[t] * A;
            cum[t] = sum;
        }
    }
}

/* x and dt x of a head. */
static void head_inputs(const work *w, int direction, const float *input, int head) {
    convolve(w, direction, input, head * w->p, w->p, w->x, w->x_raw, w->P);
    for (int t = 0; t < w->l; t++) {
        const float step = w->step[(size_t)head * w->l + t];
        for (int c = 0; c < w->P; c++) w->xdt[(size_t)t * w->P + c] = step * w->x[(size_t)t * w->P + c];
    }
}

/* The decays of a block and the token-mixing matrix, zero above the diagonal. */
static void mixing(const work *w, int q, const float *cum, const float *scores) {
    integers position;
    for (int i = 0; i < WIDTH; i++) position[i] = i;
    for (int i = 0; i < q; i++) {
        const vector here = all(cum[i]);
        for (int j = 0; j < padded(q); j += WIDTH) { /* beyond i whatever stands there */
            vector decay = {0}, M = {0};
            if (j <= i) {
                const integers earlier = position <= i - j;
                decay = chosen(earlier, exponentials(here - load(cum + j)), decay);
                M = chosen(earlier, decay * load(scores + i * BLOCK + j), M);
            }
            store(w->decay + i * BLOCK + j, decay);
            store(w->M + i * BLOCK + j, M);
        }
    }
}

/* rows[i] = exp(end - cum_i) or, with a sign of 1 and an end of 0, exp(cum_i), times from[i]. */
static void scaled(int q, int width, const float *cum, float end, float sign, const float *from, float *to) {
    for (int i = 0; i < q; i++) {
        const vector by = all(exponential(end + sign * cum[i]));
        for (int c = 0; c < width; c += WIDTH) store(to + i * width + c, by * load(from + i * width + c));
    }
}

/* ---- forward ---------------------------------------------------------------------------------------------------------- */

static void scan(const work *w, int direction, const float *input, float *y) {
    const int P = w->P, N = w->N;
    shared_inputs(w, direction, input);
    for (int head = 0; head < w->h; head++) {
        const int g = head / (w->h / w->g);
        const float skip = w->m->D[direction * w->h + head];
        head_inputs(w, direction, input, head);
        for (int b = 0; b < w->blocks; b++) {
            const int first = b * w->q, q = block_length(w, b);
            const float *cum = w->cum + (size_t)head * w->l + first, *xdt = w->xdt + (size_t)first * P;
            const size_t maps = ((size_t)g * (w->l + BLOCK) + first) * N;
            float *out = w->tmp;
            if (b) {
                multiply(FULL, q, P, N, w->C + maps, N, 1, w->S, P, w->tmp2, P, 0);
                scaled(q, P, cum, 0.0f, 1.0f, w->tmp2, out);
            }
            mixing(w, q, cum, w->scores + ((size_t)g * w->blocks + b) * BLOCK * BLOCK);
            for (int i = 0; i < q; i++)
                for (int c = 0; c < w->p; c += WIDTH)
                    ask_for(y + (size_t)at(w, direction, first + i) * w->d + head * w->p + c);
            multiply(LOWER, q, P, q, w->M, BLOCK, 1, xdt, P, out, P, b != 0);
            for (int i = 0; i < q; i++) {
                float *to = y + (size_t)at(w, direction, first + i) * w->d + head * w->p;
                for (int c = 0; c < w->p; c += WIDTH)
                    store_up_to(to + c, load(out + i * P + c) + skip * load(w->x + (size_t)(first + i) * P + c), w->p - c);
            }
            if (b + 1 < w->blocks) {
                const float end = cum[q - 1], through = exponential(end);
                scaled(q, P, cum, end, -1.0f, xdt, w->tmp2);
                if (b)
                    for (int i = 0; i < N * P; i++) w->S[i] *= through;
                multiply(FULL, N, P, q, w->B + maps, 1, N, w->tmp2, P, w->S, P, b != 0);
            }
        }
    }
}

/* out = the mean over directions of rms_norm(y silu(z)) weight, the mean square over each of g parts of a token. */
static void norm(const work *w, const float *input, const float *y, float *out) {
    const int part = w->d / w->g;
    for (int t = 0; t < w->l; t++)
        for (int start = 0; start < w->d; start += part) {
            const float *z = input + (size_t)t * w->width + start;
            float *to = out + (size_t)t * w->d + start, *gated[2] = {w->row, w->row + padded(part)};
            vector square[2] = {{0}, {0}};
            for (int c = 0; c < part; c += WIDTH) {
                const vector gate = load_up_to(z + c, part - c), silu = gate * sigmoids(gate);
                for (int r = 0; r < 2; r++) {
                    const vector v = silu * load_up_to(y + ((size_t)r * w->l + t) * w->d + start + c, part - c);
                    square[r] += v * v;
                    store(gated[r] + c, v);
                }
            }
            float by[2];
            for (int r = 0; r < 2; r++) by[r] = 0.5f / sqrtf(total(square[r]) / part + (float)w->m->eps);
            for (int c = 0; c < part; c += WIDTH) {
                vector sum = {0};
                for (int r = 0; r < 2; r++)
                    sum += by[r] * load(gated[r] + c) * load_up_to(w->m->norm_weight + r * w->d + start + c, part - c);
                store_up_to(to + c, sum, part - c);
            }
        }
}

/* ---- backward --------------------------------------------------------------------------------------------------------- */

static void norm_backward(
    const work *w, const float *input, const float *y, const float *grad, float *dy, float *dinput, float *dweight
) {
    const int part = w->d / w->g;
    for (int t = 0; t < w->l; t++)
        for (int start = 0; start < w->d; start += part) {
            const float *z = input + (size_t)t * w->width + start, *go = grad + (size_t)t * w->d + start;
            float *gate = w->row, *slope = w->row + padded(part);
            for (int c = 0; c < part; c += WIDTH) {
                const vector v = load_up_to(z + c, part - c), s = sigmoids(v);
                store(gate + c, v * s);
                store(slope + c, s * (1.0f + v * (1.0f - s)));
            }
            for (int r = 0; r < 2; r++) {
                const size_t here = ((size_t)r * w->l + t) * w->d + start;
                const float *weight = w->m->norm_weight + r * w->d + start;
                float *dw = dweight + r * w->d + start, *dz = dinput + (size_t)t * w->width + start;
                vector square = {0}, along = {0};
                for (int c = 0; c < part; c += WIDTH) {
                    const vector gated = load_up_to(y + here + c, part - c) * load(gate + c);
                    square += gated * gated;
                    along += gated * load_up_to(go + c, part - c) * load_up_to(weight + c, part - c);
                }
                const float by = 0.5f / sqrtf(total(square) / part + (float)w->m->eps);
                const float back = 4.0f * by * by * total(along) / part;
                for (int c = 0; c < part; c += WIDTH) {
                    const int there = part - c;
                    const vector from = load_up_to(y + here + c, there), gated = from * load(gate + c);
                    const vector g = by * load_up_to(go + c, there);
                    store_up_to(dw + c, load_up_to(dw + c, there) + g * gated, there);
                    const vector inner = g * load_up_to(weight + c, there) - by * back * gated;
                    store_up_to(dy + here + c, inner * load(gate + c), there);
                    vector sum = inner * from * load(slope + c);
                    if (r) sum += load_up_to(dz + c, there);
                    store_up_to(dz + c, sum, there);
                }
            }
        }
}

/* The gradients of one block of one head. dS and dST hold the gradient of the state behind the block and, afterwards, of
the one before it; `state` is the latter's value, (P, N). Returns what the block adds to the gradient of A. */
static float block_backward(
    const work *w, int head, int b, size_t maps, const float *scores, float *dscores, const float *state, float A,
    float *dstep
) {
    const int P = w->P, N = w->N, first = b * w->q, q = block_length(w, b), last = b + 1 == w->blocks;
    const float *cum = w->cum + (size_t)head * w->l + first, *step = w->step + (size_t)head * w->l + first;
    const float *xdt = w->xdt + (size_t)first * P, *dy = w->dy + (size_t)first * P, *x = w->x + (size_t)first * P;
    const float *B = w->B + maps, *C = w->C + maps;
    float *dxdt = w->dxdt + (size_t)first * P, *dB = w->dB + maps, *dC = w->dC + maps;
    float dcum[BLOCK] = {0}, columns[BLOCK] = {0}, at_end = 0.0f;
    const float end = cum[q - 1], through = exponential(end);

    mixing(w, q, cum, scores);
    transpose(q, P, xdt, P, w->turned, BLOCK);
    multiply(LOWER_OUT, q, padded(q), P, dy, P, 1, w->turned, BLOCK, w->dM, BLOCK, 0);
    multiply(UPPER, q, P, q, w->M, 1, BLOCK, dy, P, dxdt, P, 0);
    for (int i = 0; i < q; i++) { /* the diagonal does not decay */
        const float *restrict dM = w->dM + i * BLOCK, *restrict decay = w->decay + i * BLOCK;
        const float *restrict s = scores + i * BLOCK;
        float *restrict ds = dscores + i * BLOCK, sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int j = 0; j < i; j++) {
            const float by_decay = dM[j] * decay[j], both = by_decay * s[j];
            ds[j] += by_decay;
            columns[j] += both;
            sum += both;
        }
        ds[i] += dM[i];
        dcum[i] = sum;
    }
    if (!last) {
        multiply(FULL, q, P, N, B, N, 1, w->dS, P, w->tmp, P, 0);
        scaled(q, P, cum, end, -1.0f, w->tmp, w->tmp2);
        for (int i = 0; i < q * P; i++) dxdt[i] += w->tmp2[i];
        scaled(q, P, cum, end, -1.0f, xdt, w->tmp2);
        multiply(FULL, q, N, P, w->tmp2, P, 1, w->dST, N, w->tmp, N, 0);
        for (int i = 0; i < q; i++) {
            const float moved = dot(B + i * N, w->tmp + i * N, N);
            columns[i] += moved;
            at_end += moved;
            for (int c = 0; c < N; c++) dB[i * N + c] += w->tmp[i * N + c];
        }
        if (b) at_end += through * dot(w->dST, state, P * N);
    }
    if (b) {
        scaled(q, P, cum, 0.0f, 1.0f, dy, w->tmp2);
        multiply(FULL, q, N, P, w->tmp2, P, 1, state, N, w->tmp, N, 0);
        for (int i = 0; i < q; i++) {
            dcum[i] += dot(C + i * N, w->tmp + i * N, N);
            for (int c = 0; c < N; c++) dC[i * N + c] += w->tmp[i * N + c];
        }
        if (!last)
            for (int i = 0; i < N * P; i++) w->dS[i] *= through;
        multiply(FULL, N, P, q, C, 1, N, w->tmp2, P, w->dS, P, !last);
        transpose(N, P, w->dS, P, w->dST, N);
    }
    dcum[q - 1] += at_end;
    float later = 0.0f, dA = 0.0f;
    for (int i = q - 1; i >= 0; i--) {
        later += dcum[i] - columns[i];
        dstep[first + i] = A * later + dot(x + i * P, dxdt + i * P, P);
        dA += step[i] * later;
    }
    return dA;
}

static void scan_backward(
    const work *w, int direction, const float *input, const float *dyy, float *dinput, float *dweight, float *dbias,
    float *ddt_bias, float *dA_log, float *dD
) {
    const int P = w->P, N = w->N;
    const size_t map_size = (size_t)w->g * (w->l + BLOCK) * N, score_size = (size_t)w->g * w->blocks * BLOCK * BLOCK;
    shared_inputs(w, direction, input);
    memset(w->dB, 0, sizeof(float) * map_size);
    memset(w->dC, 0, sizeof(float) * map_size);
    memset(w->dscores, 0, sizeof(float) * score_size);
    for (int head = 0; head < w->h; head++) {
        const int g = head / (w->h / w->g);
        const float A = -expf(w->m->A_log[direction * w->h + head]), skip = w->m->D[direction * w->h + head];
        const float *step = w->step + (size_t)head * w->l;
        const size_t maps = (size_t)g * (w->l + BLOCK) * N;
        head_inputs(w, direction, input, head);
        for (int t = 0; t < w->l; t++)
            for (int c = 0; c < w->p; c += WIDTH) {
                const float *from = dyy + (size_t)at(w, direction, t) * w->d + head * w->p + c;
                if (t + AHEAD < w->l) ask_for(dyy + (size_t)at(w, direction, t + AHEAD) * w->d + head * w->p + c);
                store(w->dy + (size_t)t * P + c, load_up_to(from, w->p - c));
            }
        for (int b = 0; b + 1 < w->blocks; b++) { /* the state before block b + 1, transposed */
            const int q = block_length(w, b);
            const float *cum = w->cum + (size_t)head * w->l + b * w->q, end = cum[q - 1], through = exponential(end);
            float *next = w->states + (size_t)(b + 1) * P * N;
            scaled(q, P, cum, end, -1.0f, w->xdt + (size_t)b * w->q * P, w->tmp2);
            if (b)
                for (int i = 0; i < P * N; i++) next[i] = through * next[i - P * N];
            multiply(FULL, P, N, q, w->tmp2, 1, P, w->B + maps + (size_t)b * w->q * N, N, next, N, b != 0);
        }
        float dA = 0.0f;
        for (int b = w->blocks - 1; b >= 0; b--) {
            const size_t block = ((size_t)g * w->blocks + b) * BLOCK * BLOCK;
            dA += block_backward(
                w, head, b, maps + (size_t)b * w->q * N, w->scores + block, w->dscores + block,
                w->states + (size_t)b * P * N, A, w->dstep
            );
        }
        float sum_bias = 0.0f, sum_D = 0.0f;
        for (int t = 0; t < w->l; t++) {
            const float raw = w->dstep[t] * sigmoid(w->step_raw[(size_t)head * w->l + t]);
            float *to = dinput + (size_t)at(w, direction, t) * w->width + w->width - w->h + head;
            *to = direction ? *to + raw : raw;
            sum_bias += raw;
            float *restrict dx = w->dxdt + (size_t)t * P;
            const float *restrict dy = w->dy + (size_t)t * P;
            sum_D += dot(dy, w->x + (size_t)t * P, P);
            for (int c = 0; c < P; c++) dx[c] = step[t] * dx[c] + skip * dy[c];
        }
        ddt_bias[head] = sum_bias;
        dA_log[head] = dA * A;
        dD[head] = sum_D;
        convolve_backward(w, direction, input, head * w->p, w->p, w->dxdt, w->x_raw, P, dinput, dweight, dbias);
    }
    for (int g = 0; g < w->g; g++) {
        const size_t maps = (size_t)g * (w->l + BLOCK) * N;
        for (int b = 0; b < w->blocks; b++) {
            const int q = block_length(w, b);
            const size_t first = maps + (size_t)b * w->q * N;
            const float *ds = w->dscores + ((size_t)g * w->blocks + b) * BLOCK * BLOCK;
            multiply(LOWER, q, N, q, ds, BLOCK, 1, w->B + first, N, w->dC + first, N, 1);
            multiply(UPPER, q, N, q, ds, 1, BLOCK, w->C + first, N, w->dB + first, N, 1);
        }
        convolve_backward(
            w, direction, input, w->d + g * w->n, w->n, w->dB + maps, w->B_raw + maps, N, dinput, dweight, dbias
        );
        convolve_backward(
            w, direction, input, w->d + (w->g + g) * w->n, w->n, w->dC + maps, w->C_raw + maps, N, dinput, dweight, dbias
        );
    }
}

/* ---- a batch ---------------------------------------------------------------------------------------------------------- */

/* Kept from call to call, as page faults would cost as much as the work; but not more than KEPT bytes of it. */
#define KEPT (64 << 20)
static _Thread_local float *memory;
static _Thread_local size_t memory_size;

/* Hands out pieces of `from`, or counts them where it is NULL. */
typedef struct { float *from; size_t used; } pool;

static float *piece(pool *p, size_t count) {
    float *found = p->from ? p->from + p->used : NULL;
    p->used += (count + PAD - 1) / PAD * PAD;
    return found;
}

static void lay_out(work *w, pool *p) {
    const size_t l = w->l + BLOCK, maps = w->g * l * w->N, head = l * w->P, steps = (size_t)w->h * w->l + PAD;
    const size_t side = most(BLOCK, most(w->P, w->N));
    float **all_maps[] = {&w->B, &w->C, &w->B_raw, &w->C_raw, &w->dB, &w->dC};
    float **all_heads[] = {&w->x, &w->x_raw, &w->xdt, &w->dxdt, &w->dy};
    float **all_steps[] = {&w->step, &w->step_raw, &w->cum};
    float **squares[] = {&w->S, &w->dS, &w->dST, &w->decay, &w->M, &w->dM, &w->turned, &w->tmp, &w->tmp2};
    for (size_t i = 0; i < sizeof all_maps / sizeof *all_maps; i++) *all_maps[i] = piece(p, maps);
    for (size_t i = 0; i < sizeof all_heads / sizeof *all_heads; i++) *all_heads[i] = piece(p, head);
    for (size_t i = 0; i < sizeof all_steps / sizeof *all_steps; i++) *all_steps[i] = piece(p, steps);
    for (size_t i = 0; i < sizeof squares / sizeof *squares; i++) *squares[i] = piece(p, side * side);
    w->scores = piece(p, (size_t)w->g * w->blocks * BLOCK * BLOCK);
    w->dscores = piece(p, (size_t)w->g * w->blocks * BLOCK * BLOCK);
    w->states = piece(p, (size_t)w->blocks * w->P * w->N);
    w->dyy = piece(p, 2 * (size_t)w->l * w->d);
    w->dstep = piece(p, w->l);
    w->row = piece(p, 2 * ((size_t)w->d + PAD));
}

/* This thread's scratch for these sizes; 0 where there is no memory. */
static int prepare(const mixer *m, work *w) {
    *w = (work){
        .m = m, .l = m->length, .h = m->heads, .p = m->headdim, .g = m->groups, .n = m->state, .k = m->taps,
        .d = m->heads * m->headdim, .P = padded(m->headdim), .N = padded(m->state),
    };
    w->c = w->d + 2 * w->g * w->n;
    w->width = w->d + w->c + w->h;
    w->blocks = (w->l + BLOCK - 1) / BLOCK;
    w->q = (w->l + w->blocks - 1) / w->blocks;
    w->blocks = (w->l + w->q - 1) / w->q;
    pool p = {NULL, 0};
    lay_out(w, &p);
    if (p.used > memory_size) {
        free(memory);
        memory = aligned_alloc(64, sizeof(float) * p.used);
        memory_size = memory ? p.used : 0;
        if (!memory) return 0;
        memset(memory, 0, sizeof(float) * p.used);
    } else if (w->P > w->p || w->N > w->n) {
        memset(memory, 0, sizeof(float) * p.used); /* for the padding */
    }
    p = (pool){memory, 0};
    lay_out(w, &p);
    return 1;
}

static void leave(void) {
    if (sizeof(float) * memory_size <= KEPT) return;
    free(memory);
    memory = NULL;
    memory_size = 0;
}

static void forward_of(const work *w, int64_t s) {
    const mixer *m = w->m;
    const float *input = m->input + (size_t)s * w->l * w->width;
    float *y = m->y + (size_t)s * 2 * w->l * w->d;
    scan(w, 0, input, y);
    scan(w, 1, input, y + (size_t)w->l * w->d);
    norm(w, input, y, m->out + (size_t)s * w->l * w->d);
}

static void backward_of(const work *w, int64_t s) {
    const mixer *m = w->m;
    const size_t conv = (size_t)2 * w->k * w->c, all = conv + 2 * w->c + 6 * w->h + 2 * w->d, outputs = (size_t)w->l * w->d;
    const float *input = m->input + (size_t)s * w->l * w->width;
    float *dinput = m->dinput + (size_t)s * w->l * w->width;
    float *dweight = m->dparameters + (size_t)s * all, *dbias = dweight + conv, *ddt_bias = dbias + 2 * w->c;
    float *dA_log = ddt_bias + 2 * w->h, *dD = dA_log + 2 * w->h, *dnorm = dD + 2 * w->h;
    memset(dweight, 0, sizeof(float) * all);
    norm_backward(w, input, m->y + s * 2 * outputs, m->grad + s * outputs, w->dyy, dinput, dnorm);
    for (int r = 0; r < 2; r++)
        scan_backward(
            w, r, input, w->dyy + r * outputs, dinput, dweight + r * conv / 2, dbias + r * w->c, ddt_bias + r * w->h,
            dA_log + r * w->h, dD + r * w->h
        );
}

/* 0, or 1 where there is no memory. */
static int for_each_sequence(const mixer *m, void (*function)(const work *, int64_t)) {
    int failed = 0;
#pragma omp parallel num_threads((int)m->threads) reduction(| : failed)
    {
        work w;
        failed = !prepare(m, &w);
#pragma omp for schedule(dynamic)
        for (int64_t s = 0; s < m->batch; s++)
            if (!failed) function(&w, s);
        leave();
    }
    return failed;
}

int forward(const mixer *m) { return for_each_sequence(m, forward_of); }
int backward(const mixer *m) { return for_each_sequence(m, backward_of); }
