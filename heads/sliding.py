"""Segmentation of images of any size: as a whole, or window by window. mmsegmentation's rules.

Shapes: B images, C classes, H x W pixels.
"""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from heads.layers import resize

Window = tuple[int, int, int, int]
"""y1, x1, y2, x2, the last two excluded."""


def windows(size: tuple[int, int], crop: tuple[int, int], stride: tuple[int, int]) -> list[Window]:
    """Where windows lie, row by row.

    max(ceil((size - crop) / stride), 0) + 1 along each side. One that would end beyond the image is moved back, so it
    overlaps more; an image smaller than a window gives one small window.
    """
    starts = [
        [min(i * step, max(side - window, 0)) for i in range(max(-(-(side - window) // step), 0) + 1)]
        for side, window, step in zip(size, crop, stride, strict=True)
    ]
    return [(y, x, min(y + crop[0], size[0]), min(x + crop[1], size[1])) for y, x in product(*starts)]


def segment_whole(logits_of: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Logits (B, C, H, W) of images (B, 3, H, W).

    Args:
        logits_of: images (B, 3, H, W) to logits (B, C, h, w) of whatever size.
        images: all of one size.
    """
    return resize(logits_of(images), images.shape)


def segment_windows(
    logits_of: Callable[[Tensor], Tensor], images: Tensor, crop: tuple[int, int], stride: tuple[int, int],
    at_once: int = 1,
) -> Tensor:  # fmt: skip
    """Logits (B, C, H, W), each pixel's the mean over the windows that hold it.

    Args:
        logits_of: as in :func:`segment_whole`.
        images: (B, 3, H, W).
        crop, stride: of the windows, pixels.
        at_once: windows that pass through the model together.
    """
    batch = len(images)
    found = windows((images.shape[-2], images.shape[-1]), crop, stride)
    total, count = None, images.new_zeros(images.shape[-2:])
    for first in range(0, len(found), at_once):
        some = found[first : first + at_once]
        logits = segment_whole(logits_of, torch.cat([images[..., y1:y2, x1:x2] for y1, x1, y2, x2 in some]))
        if total is None:
            total = logits.new_zeros(batch, logits.shape[1], *images.shape[-2:])
        for (y1, x1, y2, x2), part in zip(some, logits.split(batch), strict=True):
            total[..., y1:y2, x1:x2] += part
            count[y1:y2, x1:x2] += 1
    assert total is not None  # there is one window at least
    return total / count


def classes_at(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """Logits (B, C, H, W) to the most likely class (B, *size) of each pixel of the image as it was before resizing."""
    return resize(logits, size).argmax(1)
