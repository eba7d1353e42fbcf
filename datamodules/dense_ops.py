"""What images and their dense labels go through together; mmsegmentation's and mmdetection's rules.

Images are (H, W, 3) uint8 RGB, label maps (H, W). What is drawn comes from a generator that is handed in.
"""

from typing import Protocol

import cv2
import numpy as np

CROPS = 10
"""Windows drawn in search of one that holds several classes; the one after them is taken as it is."""
SHARE = 0.75
"""Of a window's labelled pixels, that its largest class stays below."""
BRIGHTNESS = (-32, 32)
CONTRAST = SATURATION = (0.5, 1.5)
HUE = (-18, 18)
"""In half degrees, the last one excluded."""


class Draws(Protocol):
    """numpy.random.Generator, as far as it is used here."""

    def integers(self, low: int, high: int) -> int: ...

    def uniform(self, low: float, high: float) -> float: ...


def scaled_size(size: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """The size (W, H) of an image that is brought to fit a target, its ratio kept.

    Args:
        size: (W, H) pixels.
        target: the most of the longer and of the shorter side, in either order.
    """
    scale = min(max(target) / max(size), min(target) / min(size))
    return int(size[0] * scale + 0.5), int(size[1] * scale + 0.5)


def drawn_target(target: tuple[int, int], ratios: tuple[float, float], draws: Draws) -> tuple[int, int]:
    """A target times a ratio, uniform in the range, cut to whole pixels."""
    ratio = draws.uniform(*ratios)
    return int(target[0] * ratio), int(target[1] * ratio)


def resize_image(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Bilinear, OpenCV's, to (W, H)."""
    return cv2.resize(image, size, interpolation=cv2.INTER_LINEAR)


def resize_labels(labels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Nearest, OpenCV's, which floors, to (W, H)."""
    return cv2.resize(labels, size, interpolation=cv2.INTER_NEAREST)


def crop_window(labels: np.ndarray, size: tuple[int, int], ignore_index: int, draws: Draws) -> tuple[slice, slice]:
    """A random window whose labelled pixels are of two classes at least, none of which has ``SHARE`` of them.

    After ``CROPS`` windows that are not so, the next one. A side that is shorter than the window stays.

    Args:
        labels: (H, W).
        size: (height, width) of the window.
        ignore_index: of unlabelled pixels.
        draws: the row is drawn before the column.
    """
    for attempt in range(CROPS + 1):
        top, left = (
            int(draws.integers(0, max(side - wanted, 0) + 1)) for side, wanted in zip(labels.shape, size, strict=True)
        )
        window = slice(top, top + size[0]), slice(left, left + size[1])
        classes, counts = np.unique(labels[window], return_counts=True)
        counts = counts[classes != ignore_index]
        if attempt == CROPS or (len(counts) > 1 and counts.max() / counts.sum() < SHARE):
            break
    return window


def distort(image: np.ndarray, draws: Draws) -> np.ndarray:
    """mmsegmentation's photometric distortion: brightness, contrast, saturation and hue, each half of the time.

    Contrast comes before saturation or after hue, by a fair coin. After each step values are clipped and cut to uint8.
    """
    if draws.integers(0, 2):
        image = _linear(image, 1.0, draws.uniform(*BRIGHTNESS))
    contrast_first = bool(draws.integers(0, 2))
    if contrast_first:
        image = _contrast(image, draws)
    if draws.integers(0, 2):
        hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
        hsv[..., 1] = _linear(hsv[..., 1], draws.uniform(*SATURATION), 0.0)
        image = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
    if draws.integers(0, 2):
        hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
        hsv[..., 0] = (hsv[..., 0].astype(int) + draws.integers(*HUE)) % 180
        image = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
    return image if contrast_first else _contrast(image, draws)


def _contrast(image: np.ndarray, draws: Draws) -> np.ndarray:
    return _linear(image, draws.uniform(*CONTRAST), 0.0) if draws.integers(0, 2) else image


def _linear(values: np.ndarray, factor: float, shift: float) -> np.ndarray:
    return np.clip(values.astype(np.float32) * factor + shift, 0, 255).astype(np.uint8)
