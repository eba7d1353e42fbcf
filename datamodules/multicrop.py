"""DINO's multi-crop augmentation, seeded by the sample and not by the worker.

What is done to a view is drawn first (:class:`ViewParameters`), for all views of an image at once; then the image is
decoded, no larger than they need it, and each view is cut, changed and written to where its batch wants it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import numpy as np

from datamodules import channel_ops, pixel_ops
from datamodules.pixel_format import RGB, PixelFormat
from datamodules.pixel_ops import Box, write_planes
from datamodules.sample_seed import SampleSeed
from datamodules.views import ViewParameters, renderer

RATIO = (3 / 4, 4 / 3)
TRIES = 10
"""At a crop that fits, as in torchvision; then the largest one in the middle is taken."""
LEAST_SHRINKING = 2.0
"""A JPEG is decoded at a smaller size only if every view still shrinks by this much after it."""


@dataclass
class MultiCropConfig:
    """The views of one image; the defaults are DINO's (Caron et al. 2021) with the augmentations of BYOL.

    Args:
        global_size, local_size: sides of the views in pixels.
        num_local: local views beside the two global ones.
        global_scale, local_scale: range of a crop's area over the image's.
        flip_prob: of a horizontal flip.
        jitter: strengths for brightness, contrast, saturation, hue, applied in random order.
        jitter_prob, gray_prob: probabilities.
        blur_sigma: range of the Gaussian blur, in pixels.
        blur_probs: for the first global, the second global and the local views.
        solarize_prob: of inverting pixels at or above 128, on the second global view only.
    """

    global_size: int = 224
    local_size: int = 96
    num_local: int = 8
    global_scale: tuple[float, float] = (0.4, 1.0)
    local_scale: tuple[float, float] = (0.05, 0.4)
    flip_prob: float = 0.5
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)
    jitter_prob: float = 0.8
    gray_prob: float = 0.2
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    blur_probs: tuple[float, float, float] = (1.0, 0.1, 0.5)
    solarize_prob: float = 0.2


JITTER = (pixel_ops.brightness, pixel_ops.contrast, pixel_ops.saturation, pixel_ops.hue)
_ORDERS = tuple(permutations(range(len(JITTER))))


class ViewKind(NamedTuple):
    """What views of one sort share."""

    size: int
    scale: tuple[float, float]
    blur_prob: float
    solarize_prob: float


def random_box(width: int, height: int, scale: tuple[float, float], draws: list[float]) -> Box:
    """A crop of random area and ratio, as torchvision's RandomResizedCrop draws it.

    Args:
        width, height: of the image.
        scale: range of the crop's area over the image's, uniform; the logarithm of its ratio is uniform over RATIO.
        draws: 2 + 2 TRIES numbers, uniform in [0, 1).
    """
    area, (low, high) = width * height, (math.log(RATIO[0]), math.log(RATIO[1]))
    for attempt in range(TRIES):
        wanted = area * (scale[0] + (scale[1] - scale[0]) * draws[2 + 2 * attempt])
        ratio = math.exp(low + (high - low) * draws[3 + 2 * attempt])
        w, h = round(math.sqrt(wanted * ratio)), round(math.sqrt(wanted / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(draws[0] * (width - w + 1)), int(draws[1] * (height - h + 1)), w, h
    w = min(width, max(1, round(height * RATIO[1])))
    h = min(height, max(1, round(width / RATIO[0])))
    return (width - w) // 2, (height - h) // 2, w, h


class MultiCrop:
    """An image to its views: two global, then the local ones.

    Args:
        config: the views.
        pixels: what images consist of; other channels than RGB's have no saturation, hue or grey values, and floats of
            no known range are not solarized.
    """

    def __init__(self, config: MultiCropConfig, pixels: PixelFormat = RGB) -> None:
        self.config, self.pixels = config, pixels
        first, second, local = config.blur_probs
        g = (config.global_size, config.global_scale)
        self.kinds = [
            ViewKind(*g, first, 0.0),
            ViewKind(*g, second, config.solarize_prob),
            *[ViewKind(config.local_size, config.local_scale, local, 0.0)] * config.num_local,
        ]
        self._seed = SampleSeed()
        if pixels.plain:
            renderer()  # compiles it here, once, and not in every worker
        strengths = config.jitter
        self._low = [*(max(0.0, 1 - s) for s in strengths[:3]), -strengths[3]]
        self._span = [*(1 + s - low for s, low in zip(strengths[:3], self._low, strict=False)), 2 * strengths[3]]

    def draw(self, width: int, height: int, seed: int, epoch: int, index: int) -> list[ViewParameters]:
        """What is done to the views of a sample whose image is of this size."""
        self._seed.set(seed, epoch, index)
        draws = self._seed.numpy.random((len(self.kinds), 11 + 2 + 2 * TRIES)).tolist()
        views = [self._view(kind, width, height, row) for kind, row in zip(self.kinds, draws, strict=True)]
        return views if self.pixels.plain else [channel_ops.applicable(view, self.pixels) for view in views]

    def _view(self, kind: ViewKind, width: int, height: int, draws: list[float]) -> ViewParameters:
        c = self.config
        jitters, order, factors = draws[0] < c.jitter_prob, _ORDERS[int(draws[1] * len(_ORDERS))], draws[2:6]
        low, high = c.blur_sigma
        return ViewParameters(
            random_box(width, height, kind.scale, draws[11:]),
            tuple((i, self._low[i] + self._span[i] * factors[i]) for i in order) if jitters else (),
            draws[6] < c.gray_prob,
            low + (high - low) * draws[8] if draws[7] < kind.blur_prob else None,
            draws[9] < kind.solarize_prob,
            draws[10] < c.flip_prob,
        )

    def reduction(self, parameters: list[ViewParameters]) -> int:
        """1, 2, 4 or 8: by how much the image may be smaller, so that every view still shrinks LEAST_SHRINKING times.

        PIL has the same rule for its thumbnails; what it changes in a view is measured in the tests.
        """
        pairs = zip(self.kinds, parameters, strict=True)
        least = min(min(p.box[2:]) / kind.size for kind, p in pairs) / LEAST_SHRINKING
        return next((r for r in (8, 4, 2) if least >= r), 1)

    def render(
        self, pixels: np.ndarray, size: tuple[int, int], parameters: list[ViewParameters], out: list[np.ndarray]
    ) -> None:
        """Writes the views of an image.

        Args:
            pixels: (H, W, C), possibly smaller than the image.
            size: (width, height) of the image, which the parameters are about.
            parameters: of each view.
            out: for each view, a (C, size, size) array whose channels are contiguous.
        """
        shrunk = size[0] / pixels.shape[1], size[1] / pixels.shape[0]
        if shrunk != (1.0, 1.0):
            parameters = [p._replace(box=_scaled(p.box, *shrunk)) for p in parameters]
        if self.pixels.plain:
            (renderer() or render_in_python)(pixels, parameters, out)
        else:
            channel_ops.render(self.pixels, pixels, parameters, out)

    def __call__(self, image: np.ndarray, seed: int, epoch: int, index: int) -> list[np.ndarray]:
        """(H, W, C) and the sample's (seed, epoch, index) to (C, size, size) arrays of the buffer's dtype."""
        size = image.shape[1], image.shape[0]
        dtype = np.uint8 if self.pixels.bits == 8 else np.float32
        out = [np.empty((self.pixels.in_chans, kind.size, kind.size), dtype) for kind in self.kinds]
        self.render(image, size, self.draw(*size, seed, epoch, index), out)
        return out


def render_in_python(pixels: np.ndarray, views: Sequence[ViewParameters], out: Sequence[np.ndarray]) -> None:
    """What :func:`datamodules.views.renderer` does, where there is no C compiler; within pixel_ops' tolerances."""
    for p, planes in zip(views, out, strict=True):
        write_planes(change(pixel_ops.resized_crop(pixels, p.box, planes.shape[-1]), p), p.flip, planes)


def change(view: np.ndarray, p: ViewParameters) -> np.ndarray:
    """The view's colours and sharpness; (H, W, 3), or (H, W) where it is grey."""
    for which, factor in p.jitter:
        view = JITTER[which](view, factor)
    if p.gray:
        view = pixel_ops.gray(view)
    if p.sigma is not None:
        view = pixel_ops.gaussian_blur(view, p.sigma)
    return pixel_ops.solarize(view) if p.solarize else view


def _scaled(box: Box, x: float, y: float) -> Box:
    """The box over an image that is smaller by x and y."""
    left, top = round(box[0] / x), round(box[1] / y)
    return left, top, round((box[0] + box[2]) / x) - left, round((box[1] + box[3]) / y) - top
