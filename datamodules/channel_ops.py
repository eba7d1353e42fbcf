"""What :mod:`datamodules.pixel_ops` does to RGB, for any channels and depth: (H, W, C) to the same.

Views are worked on as float32 in their own units. Of 8 bits each operation leaves whole numbers, as PIL does; deeper
ones keep fractions. Values of a known range are cut to it; see :class:`~datamodules.pixel_format.PixelFormat`.

Brightness, contrast, blur and solarize are defined for any channels: contrast turns about one mean over all channels.
Saturation, hue and grey values are RGB's, and exist where there are three channels.
"""

from collections.abc import Sequence

import cv2
import numpy as np
import torch
import torch.nn.functional as F

from datamodules import pixel_ops
from datamodules.pixel_format import PixelFormat
from datamodules.pixel_ops import Box
from datamodules.views import HUE, ViewParameters

ANY_CHANNELS = (0, 1)
"""Of the jitters, brightness and contrast."""
LUMA = np.array([0.299, 0.587, 0.114], np.float32)
_TRUNCATED = 0.498
"""Below whole numbers; see pixel_ops."""


def resized_crop(image: np.ndarray, box: Box, size: int, pixels: PixelFormat) -> np.ndarray:
    """The box brought to (size, size, C) float32 by antialiased bicubic interpolation, as PIL has it for mode F.

    8 bits are rounded and cut as PIL has it for mode L.
    """
    if pixels.bits == 8:
        return _cut(pixel_ops.resized_crop(image, box, size).astype(np.float32), pixels)
    left, top, width, height = box
    cut = torch.from_numpy(image[top : top + height, left : left + width].astype(np.float32)).permute(2, 0, 1)
    found = F.interpolate(cut[None], (size, size), mode="bicubic", antialias=True)
    return _cut(found[0].permute(1, 2, 0).numpy(), pixels)


def change(view: np.ndarray, p: ViewParameters, pixels: PixelFormat) -> np.ndarray:
    """The view's colours and sharpness; (H, W, C), of RGB also (H, W, 1) where it is grey."""
    for which, factor in p.jitter:
        if which == 0:
            view = _settled(view * factor, pixels, _TRUNCATED)
        elif which == 1:
            mean = float((view @ LUMA if pixels.in_chans == 3 else view).mean())
            mean = float(int(mean + 0.5)) if pixels.bits == 8 else mean
            view = _settled(view * factor + (1 - factor) * mean, pixels, _TRUNCATED)
        elif which == HUE:
            hsv = cv2.cvtColor(view, cv2.COLOR_RGB2HSV)
            hsv[..., 0] = (hsv[..., 0] + 360 * factor) % 360
            view = _settled(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB), pixels)
        else:
            view = _settled(view * factor + (1 - factor) * (view @ LUMA)[..., None], pixels, _TRUNCATED)
    if p.gray:
        view = _settled((view @ LUMA)[..., None], pixels)
    if p.sigma is not None:
        kernel = pixel_ops.blur_kernel(round(p.sigma, 2))
        blurred = cv2.sepFilter2D(view, -1, kernel, kernel, borderType=cv2.BORDER_REPLICATE)
        view = _settled(blurred.reshape(view.shape), pixels)  # OpenCV drops a single channel's axis
    return solarize(view, pixels) if p.solarize and pixels.top is not None else view


def solarize(view: np.ndarray, pixels: PixelFormat) -> np.ndarray:
    """Values in the upper half of the range are inverted: 128 to 255 of 8 bits, 32768 to 65535 of 16."""
    assert pixels.top is not None
    half = (pixels.top + 1) / 2 if pixels.bits < 32 else pixels.top / 2
    return np.where(view < half, view, pixels.top - view)


def _settled(view: np.ndarray, pixels: PixelFormat, below: float = 0.0) -> np.ndarray:
    """Rounded where values are of 8 bits, and cut to the range."""
    return _cut(np.rint(view - below) if pixels.bits == 8 else view, pixels)


def _cut(view: np.ndarray, pixels: PixelFormat) -> np.ndarray:
    return view if pixels.top is None else view.clip(0, pixels.top)


def render(pixels: PixelFormat, image: np.ndarray, views: Sequence[ViewParameters], out: Sequence[np.ndarray]) -> None:
    """Writes the views of an image.

    Args:
        pixels: of the image.
        image: (H, W, C) of ``pixels.dtype``.
        views: what is done to each; boxes inside the image.
        out: for each view, a (C, size, size) array of the buffer's dtype.
    """
    for p, planes in zip(views, out, strict=True):
        view = change(resized_crop(image, p.box, planes.shape[-1], pixels), p, pixels)
        planes[:] = (view[:, ::-1] if p.flip else view).transpose(2, 0, 1)


def applicable(p: ViewParameters, pixels: PixelFormat) -> ViewParameters:
    """The parameters without what only RGB has, for other channels; and without solarize for floats of no range."""
    if pixels.in_chans != 3:
        p = p._replace(jitter=tuple(j for j in p.jitter if j[0] in ANY_CHANNELS), gray=False)
    return p if pixels.top is not None else p._replace(solarize=False)
