"""The evaluation transform that published accuracies hang on."""

import numpy as np
import torchvision.transforms.functional as TF
from PIL import Image
from torchvision.transforms import InterpolationMode

from datamodules.pixel_format import PixelFormat


class ResizeCenterCrop:
    """Resize the shorter side (bicubic, antialiased as PIL does), then crop the centre.

    Masks go through the same geometry by nearest neighbour.

    Args:
        resize: shorter side after resizing.
        crop: side of the centre crop.
    """

    def __init__(self, resize: int = 256, crop: int = 224) -> None:
        if crop > resize:
            raise ValueError(f"crop={crop} must not be larger than resize={resize}")
        self.resize, self.crop = resize, crop

    def _geometry(self, image: Image.Image, how: InterpolationMode) -> Image.Image:
        return TF.center_crop(TF.resize(image, [self.resize], how), [self.crop])

    def image(self, image: Image.Image) -> np.ndarray:
        """An RGB image to (3, crop, crop) uint8, a view of (crop, crop, 3)."""
        return np.asarray(self._geometry(image, InterpolationMode.BICUBIC)).transpose(2, 0, 1)

    def channels(self, image: np.ndarray, pixels: PixelFormat) -> np.ndarray:
        """(H, W, C) to (C, crop, crop), cut to the range: each channel as an image of its own, mode L (8 bits) or F."""
        planes = np.ascontiguousarray(image.transpose(2, 0, 1), np.uint8 if pixels.bits == 8 else np.float32)
        found = np.stack([np.asarray(self._geometry(Image.fromarray(p), InterpolationMode.BICUBIC)) for p in planes])
        return found if pixels.top is None else found.clip(0, pixels.top).astype(planes.dtype)

    def mask(self, mask: Image.Image) -> np.ndarray:
        """A mode "I" mask to (crop, crop) int32."""
        return np.array(self._geometry(mask, InterpolationMode.NEAREST), dtype=np.int32)
