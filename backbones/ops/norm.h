/* Gate and norm of both directions, and their mean. */
#pragma once

#include <math.h>

#include "mixer.h"
#include "products.h"

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
