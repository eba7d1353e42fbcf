/* What a bidirectional Mamba-2 block does between its two projections, forward and backward, on the CPU in float32.

A thread takes a sequence through all stages while it is in its caches: convolution and SiLU, scan, gate and norm of both
directions, their mean. Nothing is flipped: the second direction's tokens are gathered from the last to the first.

    l tokens, h heads of p channels, d = h p, g groups, n state, k taps, c = d + 2 g n channels to convolve
    q tokens in a block, and in a block, with a_t = dt_t A and cum_i the sum of a_t from the block's first token to i,

    y_i = sum_{j <= i} (C_i.B_j) exp(cum_i - cum_j) dt_j x_j + exp(cum_i) C_i S + D x_i
    S  <- exp(cum_q) S + sum_j exp(cum_q - cum_j) B_j (dt_j x_j)^T

(Dao & Gu 2024, sec. 6.) Rows of scratch are padded to whole vectors, by zeros where they are summed over. Compiled and
loaded by common/native.py; arguments are checked by bidirectional.py. Sums have one order, whatever the number of threads. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "norm.h"
#include "scan.h"

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
        aligned_free(memory);
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
    aligned_free(memory);
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
