"""The views of an image by views.c, to the bit as PIL and torchvision make them."""

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common import native
from datamodules.pixel_ops import Box

_VIEW = struct.Struct("4i i i 4i 4f 3i f P q")
"""``view`` of views.c."""
HUE = 3
"""Of the jitters, the one whose factor is not a factor."""


class ViewParameters(NamedTuple):
    """What is done to one view, in this order."""

    box: Box
    jitter: tuple[tuple[int, float], ...]
    """(which of brightness, contrast, saturation and hue, by its number; its factor) in order; empty for none."""
    gray: bool
    sigma: float | None
    solarize: bool
    flip: bool
    """Commutes with all the others, so it comes with the last copy."""


@cache
def renderer() -> Callable[[np.ndarray, Sequence[ViewParameters], Sequence[np.ndarray]], None] | None:
    """:func:`_render` where views.c can be compiled, else None."""
    library = native.library(Path(__file__).with_name("views.c"))
    if library is None:
        return None
    function = library.render
    function.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_char_p, ctypes.c_int]
    return partial(_render, function)


def _render(
    function: Callable[..., int], pixels: np.ndarray, views: Sequence[ViewParameters], out: Sequence[np.ndarray]
) -> None:
    """Writes the views of an image.

    Args:
        pixels: (H, W, 3) uint8, the pixels of a row beside each other.
        views: what is done to each; boxes inside the image.
        out: for each view, a (3, size, size) uint8 array whose channels are contiguous.
    """
    height, width = pixels.shape[:2]
    if pixels.dtype != np.uint8 or pixels.strides[1:] != (3, 1) or pixels.shape[2] != 3:
        raise ValueError(f"an image must be (H, W, 3) uint8 with dense rows; found {pixels.shape} {pixels.dtype}")
    packed = bytearray()
    for p, planes in zip(views, out, strict=True):
        left, top, w, h = p.box
        size = planes.shape[-1]
        assert min(left, top) >= 0 and min(w, h, size) > 0 and left + w <= width and top + h <= height, p.box
        assert planes.shape == (3, size, size) and planes.strides[1:] == (size, 1) and planes.dtype == np.uint8
        which = [i for i, _ in p.jitter] + [0] * (4 - len(p.jitter))
        factors = [int(f * 255) % 256 if i == HUE else f for i, f in p.jitter] + [0] * (4 - len(p.jitter))
        packed += _VIEW.pack(
            left, top, w, h, size, len(p.jitter), *which, *factors, p.gray, p.solarize, p.flip,
            -1.0 if p.sigma is None else p.sigma, planes.__array_interface__["data"][0], planes.strides[0],
        )  # fmt: skip
    if function(pixels.__array_interface__["data"][0], pixels.strides[0], bytes(packed), len(views)):
        raise MemoryError(f"no memory for the views of an image of {width} x {height} pixels")
