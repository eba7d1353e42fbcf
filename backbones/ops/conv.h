/* Causal convolution along a direction's tokens, then SiLU. */
#pragma once

#include "mixer.h"

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
