/* A mixer's arguments, and a thread's sizes and scratch memory. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "lanes.h"

#define BLOCK 64 /* tokens, at most */
#define AHEAD 8 /* tokens that are asked for early: a head's channels stand far apart from token to token */

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

/* Where token t of a direction's scan stands in the input. */
static inline int at(const work *w, int direction, int t) { return direction ? w->l - 1 - t : t; }
