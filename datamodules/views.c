/* An image's views in one call: cut, resized, coloured, blurred and written, with the bits that PIL gives.

Each operation follows PIL's integer or float arithmetic step by step (named beside it), so its results are equal and
not near; tests/datamodules/test_views.py holds them together. Widths are resized before heights, as Pillow did for all
images up to version 12; it now takes the other order where heights shrink far more. Pixels are uint8. A view lives in
three planes, one a channel, of size rows of size pixels each. The operations are in the headers, how many pixels are worked
on at once in lanes.h.

Compiled and loaded by common/native.py. No function here checks its arguments: datamodules/views.py does. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "blur.h"
#include "colour.h"
#include "lanes.h"
#include "resize.h"

typedef struct {
    int32_t left, top, width, height; /* of the box in the image */
    int32_t size;                     /* of the view */
    int32_t jitters;                  /* how many of the four follow */
    int32_t jitter[4];                /* 0 brightness, 1 contrast, 2 saturation, 3 hue */
    float factor[4];
    int32_t gray, solarize, flip;
    float sigma;                      /* of the blur; negative: none */
    uint8_t *out;                     /* three planes */
    int64_t plane;                    /* bytes from one to the next */
} view;

static _Thread_local uint8_t *room;
static _Thread_local size_t room_size;

/* The same memory for each call, and never given back: page faults would cost more than the work. */
static uint8_t *room_of(size_t size) {
    if (size > room_size) {
        aligned_free(room);
        room_size = 0;
        room = aligned_alloc(64, (size + 63) / 64 * 64);
        if (room != NULL) room_size = size;
    }
    return room;
}

static size_t padded(size_t n) { return (n + 63) / 64 * 64 + 64; }

static int render_one(const uint8_t *pixels, ptrdiff_t stride, const view *v) {
    const int size = v->size, n = size * size;
    const int across = pairs_of(v->width, size), down = pairs_of(v->height, size);
    const ptrdiff_t row = (size + 2 * LANES - 1) / (2 * LANES) * 2 * LANES;
    const ptrdiff_t rows_plane = padded((v->height + LANES) * row), plane = padded(n + 4 * LANES);
    const size_t weights = padded(sizeof(int32_t) * size * (2 + 2 * (size_t)(across > down ? across : down)));
    const size_t turned = padded((3 * (size_t)v->width + 2 * LANES) * LANES);
    const size_t lines = padded(LANES * (2 * (size_t)size + 4 * ((size_t)fabsf(v->sigma) + 2) + 4 * LANES));
    uint8_t *memory = room_of(weights + 3 * turned + 3 * rows_plane + 3 * plane + lines);
    if (memory == NULL) return 1;

    uint8_t *paired = memory + weights + turned, *rows = paired + 2 * turned;
    uint8_t *planes = rows + 3 * rows_plane, *spare = planes + 3 * plane;
    filter f = filter_at((int32_t *)memory, size, across);
    bicubic(&f, v->width, size);
    along_rows(
        pixels + v->top * stride + 3 * v->left, stride, v->width, v->height, size, &f, memory + weights, paired, rows,
        row, rows_plane
    );
    f = filter_at((int32_t *)memory, size, down);
    bicubic(&f, v->height, size);
    for (int c = 0; c < 3; c++) along_columns(rows + c * rows_plane, row, size, &f, planes + c * plane);

    for (int j = 0; j < v->jitters; j++) {
        const float by = v->factor[j];
        switch (v->jitter[j]) {
        case 0: for (int c = 0; c < 3; c++) towards(planes + c * plane, n, 0, by); break;
        case 1: contrast(planes, plane, n, by); break;
        case 2: saturation(planes, plane, n, by); break;
        case 3: hue(planes, plane, n, (uint8_t)((int)by)); break;
        }
    }
    const int channels = v->gray ? 1 : 3;
    if (v->gray)
        for (int i = 0; i < n; i++) planes[i] = LUMA(planes[i], planes[plane + i], planes[2 * plane + i]);
    for (int c = 0; c < 3; c++) {
        uint8_t *from = planes + c * plane, *to = v->out + c * v->plane;
        if (c >= channels) {
            memcpy(to, v->out, n);
            continue;
        }
        if (v->sigma >= 0) blur(from, size, v->sigma, spare);
        if (v->solarize)
            for (int i = 0; i < n; i++) from[i] = from[i] < 128 ? from[i] : 255 - from[i];
        if (!v->flip)
            memcpy(to, from, n);
        else
            for (int y = 0; y < size; y++)
                for (int x = 0; x < size; x++) to[y * size + x] = from[y * size + size - 1 - x];
    }
    return 0;
}

/* Renders the views of an image whose rows are `stride` bytes apart. 0, or 1 where there is no memory. */
int render(const uint8_t *pixels, ptrdiff_t stride, const view *views, int count) {
    for (int i = 0; i < count; i++)
        if (render_one(pixels, stride, &views[i])) return 1;
    return 0;
}
