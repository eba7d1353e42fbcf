/* The scan of one direction, forward and backward, in blocks of tokens with a state between them. */
#pragma once

#include <math.h>

#include "conv.h"
#include "products.h"

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
