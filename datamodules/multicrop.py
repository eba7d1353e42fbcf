"""DINO's multi-crop augmentation, uint8 to uint8, seeded by the sample and not by the worker."""

import os
import random
from dataclasses import dataclass

import numpy as np

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # its import would ask the network for a newer version
import albumentations as A
import cv2

BICUBIC, BILINEAR = cv2.INTER_CUBIC, cv2.INTER_LINEAR
RATIO = (3 / 4, 4 / 3)


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


class SampleSeed:
    """One generator for many transforms, set anew for each sample by a key.

    Philox is counter-based: setting its key costs microseconds, and streams of different keys are independent.
    """

    def __init__(self) -> None:
        self._philox = np.random.Philox(0)
        self.numpy = np.random.Generator(self._philox)
        self.python = random.Random(0)
        self._state = self._philox.state

    def set(self, seed: int, epoch: int, index: int) -> None:
        """The stream of a sample: a function of (seed, epoch, index) alone."""
        self._state["state"]["key"][:] = (np.uint64(seed % 2**64), np.uint64(epoch << 40 | index))
        self._state["state"]["counter"][:] = 0
        self._state["buffer_pos"] = 4  # the buffer of the previous sample is spent
        self._state["has_uint32"], self._state["uinteger"] = 0, 0
        self._philox.state = self._state
        self.python.seed(int(self.numpy.integers(2**63)))


def random_resized_crop(size: int, scale: tuple[float, float], interpolation: int) -> A.BasicTransform:
    """A crop of random area and ratio, resized; antialiased where it shrinks, which cv2's cubic is not."""
    return A.RandomResizedCrop(
        (size, size), scale=scale, ratio=RATIO, interpolation=interpolation, area_for_downscale="image"
    )


class MultiCrop:
    """An image to its views: two global, then the local ones.

    Call with (H, W, 3) uint8 and the sample's (seed, epoch, index); returns (3, size, size) uint8 arrays.
    """

    def __init__(self, config: MultiCropConfig) -> None:
        self.config = config
        self.seed = SampleSeed()
        g, loc = (config.global_size, config.global_scale), (config.local_size, config.local_scale)
        first, second, local = config.blur_probs
        self.views = [
            self._view(*g, first, 0.0),
            self._view(*g, second, config.solarize_prob),
            *[self._view(*loc, local, 0.0)] * config.num_local,
        ]
        for view in self.views:
            view.set_random_state(self.seed.numpy, self.seed.python)

    def _view(self, size: int, scale: tuple[float, float], blur_prob: float, solarize_prob: float) -> A.Compose:
        c = self.config
        brightness, contrast, saturation, hue = c.jitter
        return A.Compose(
            [
                random_resized_crop(size, scale, BICUBIC),
                A.HorizontalFlip(p=c.flip_prob),
                A.ColorJitter(brightness, contrast, saturation, hue, p=c.jitter_prob),
                A.ToGray(p=c.gray_prob),
                A.GaussianBlur(blur_limit=0, sigma_limit=c.blur_sigma, p=blur_prob),
                A.Solarize(threshold_range=(128 / 255, 128 / 255), p=solarize_prob),
            ]
        )

    def __call__(self, image: np.ndarray, seed: int, epoch: int, index: int) -> list[np.ndarray]:
        self.seed.set(seed, epoch, index)
        return [to_chw(view(image=image)["image"]) for view in self.views]


class ProbeCrop:
    """The linear probe's training view: RandomResizedCrop (bilinear) and flip; called as :class:`MultiCrop`."""

    def __init__(self, size: int, scale: tuple[float, float] = (0.08, 1.0)) -> None:
        self.seed = SampleSeed()
        self.view = A.Compose([random_resized_crop(size, scale, BILINEAR), A.HorizontalFlip(p=0.5)])
        self.view.set_random_state(self.seed.numpy, self.seed.python)

    def __call__(self, image: np.ndarray, seed: int, epoch: int, index: int) -> np.ndarray:
        self.seed.set(seed, epoch, index)
        return to_chw(self.view(image=image)["image"])


def to_chw(image: np.ndarray) -> np.ndarray:
    """(H, W, 3) to a contiguous (3, H, W)."""
    return np.ascontiguousarray(image.transpose(2, 0, 1))
