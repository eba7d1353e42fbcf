"""Operations on an image's pixels, (H, W, 3) or (H, W) uint8 to the same, as PIL and torchvision define them.

Each names its counterpart; tests/datamodules/test_pixel_ops.py holds them together, within the tolerances said there.
They round once where PIL truncates, and never leave uint8 where OpenCV does not ask for it.
"""

from functools import lru_cache

import cv2
import numpy as np
import torch
import torch.nn.functional as F

PASSES = 3
"""Of PIL's box blur, which together make its Gaussian."""
_FLOOR = -0.498
"""Added before OpenCV rounds to nearest: what PIL's truncation gives."""
_LUMA = np.tile([0.299, 0.587, 0.114], (3, 1))
"""Each channel's share in a pixel's grey value."""
_SOLARIZE = np.array([v if v < 128 else 255 - v for v in range(256)], np.uint8)

Box = tuple[int, int, int, int]
"""left, top, width, height in pixels."""


def resized_crop(image: np.ndarray, box: Box, size: int) -> np.ndarray:
    """The box of an image (H, W, C), brought to (size, size, C) by antialiased bicubic interpolation.

    ``image.resize((size, size), PIL.Image.BICUBIC)`` of the cut-out box; torch holds a vectorised version of it.
    """
    left, top, width, height = box
    row, pixel, channel = image.strides
    # an image of its own in channels-last order, which is what the vectorised version asks for
    cut = torch.from_numpy(image).as_strided(
        (1, image.shape[2], height, width), (row * height, channel, row, pixel), row * top + pixel * left
    )
    return F.interpolate(cut, (size, size), mode="bicubic", antialias=True).permute(0, 2, 3, 1).numpy()[0]


def brightness(image: np.ndarray, factor: float) -> np.ndarray:
    """``PIL.ImageEnhance.Brightness``: the image times the factor."""
    return cv2.addWeighted(image, factor, image, 0.0, _FLOOR)


def contrast(image: np.ndarray, factor: float) -> np.ndarray:
    """``PIL.ImageEnhance.Contrast``: away from the grey image's mean, by the factor."""
    mean = int(cv2.mean(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY))[0] + 0.5)
    return cv2.addWeighted(image, factor, image, 0.0, (1 - factor) * mean + _FLOOR)


def saturation(image: np.ndarray, factor: float) -> np.ndarray:
    """``PIL.ImageEnhance.Color``: away from each pixel's grey value, by the factor."""
    matrix = (1 - factor) * _LUMA + factor * np.eye(3)
    return cv2.transform(image, np.hstack([matrix, np.full((3, 1), _FLOOR)]))


def hue(image: np.ndarray, shift: float) -> np.ndarray:
    """torchvision's ``adjust_hue``: the hue moved by ``shift`` turns, in [-0.5, 0.5]."""
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)
    hsv[..., 0] += np.uint8(int(shift * 255) % 256)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)


def gray(image: np.ndarray) -> np.ndarray:
    """``image.convert("L")``: (H, W, 3) to (H, W)."""
    return cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)


def gaussian_blur(image: np.ndarray, sigma: float) -> np.ndarray:
    """``PIL.ImageFilter.GaussianBlur(sigma)``: its very kernel, three boxes on one another, edges repeated."""
    kernel = blur_kernel(round(sigma, 2))
    return cv2.sepFilter2D(image, -1, kernel, kernel, borderType=cv2.BORDER_REPLICATE)


@lru_cache(maxsize=1024)
def blur_kernel(sigma: float) -> np.ndarray:
    """PIL's approximation of a Gaussian along one axis, (2k+1) in whole 256ths that sum to 1.

    A box of fractional radius r has weight 1 on 2⌊r⌋+1 pixels and r-⌊r⌋ on the two beside them; r is chosen so that
    three passes have the variance sigma² (Gwosdek et al. 2011). Whole 256ths, since OpenCV rounds to them by itself
    and would then change the mean.
    """
    variance = sigma * sigma / PASSES
    whole = int((np.sqrt(12 * variance + 1) - 1) / 2)
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    box = np.array([part, *[1.0] * (2 * whole + 1), part])
    kernel = np.ones(1)
    for _ in range(PASSES):
        kernel = np.convolve(kernel, box / box.sum())
    steps = np.round(kernel * 256)
    steps[len(steps) // 2] += 256 - steps.sum()
    used = np.flatnonzero(steps)
    return (steps[used[0] : used[-1] + 1] / 256).astype(np.float32)


def solarize(image: np.ndarray) -> np.ndarray:
    """``PIL.ImageOps.solarize(image, 128)``: values from 128 on are inverted."""
    return cv2.LUT(image, _SOLARIZE)


def write_planes(view: np.ndarray, flip: bool, planes: np.ndarray) -> None:
    """(H, W, 3) or (H, W) into (3, H, W)."""
    if view.ndim == 2:
        planes[:] = view[:, ::-1] if flip else view
    else:
        cv2.split(cv2.flip(view, 1) if flip else view, list(planes))
