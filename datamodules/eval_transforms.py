"""Decoding, and the evaluation transform that published accuracies hang on.

Decoding is ``PIL.Image.open(...).convert("RGB")``, as torchvision's ImageFolder does it, so evaluation sees the pixels
that published models were scored on. That has two consequences. EXIF orientation is *not* applied: the reference
pipelines ignore it too. And 16-bit grey images would come out white, since PIL clips them at 255; here they keep
their high byte, as PIL does itself when it opens 16-bit RGB.
"""

import io

import numpy as np
import torchvision.transforms.functional as TF
from PIL import Image
from torchvision.transforms import InterpolationMode

from datamodules.samples import RawSample, ShardError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""What an image may be, whatever its name says; PIL would hand others, such as EPS, to other programs."""


def _open(data: bytes, what: str) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        image.load()
    except Exception as error:  # PIL raises anything from SyntaxError to struct.error on damaged files
        raise ShardError(
            f"{what} cannot be read ({type(error).__name__}: {error}); replace it, or set data.init_args.policy=skip"
        ) from None
    return image


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to 8-bit RGB."""
    if image.mode.startswith("I;16") or image.mode == "I":
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


def decode_image(raw: RawSample) -> Image.Image:
    """A sample's image in 8-bit RGB. ShardError, naming shard and key, where it cannot be read."""
    return to_rgb(_open(raw.image(), f"the image of {raw.name}"))


def decode_mask(raw: RawSample, size: tuple[int, int]) -> Image.Image:
    """A sample's segmentation ids as a mode "I" image: R + 256·G of RGB (ImageNet-S), else the pixel values.

    ShardError where it is missing, unreadable, or not of ``size`` (width, height).
    """
    if "mask.png" not in raw.fields:
        raise ShardError(f"{raw.name} has no .mask.png member; write shards from an ImageNet-S tree with masks")
    mask = _open(raw.fields["mask.png"], f"the mask of {raw.name}")
    if mask.size != size:
        raise ShardError(
            f"{raw.name}: the mask is {mask.size[0]} x {mask.size[1]}, the image {size[0]} x {size[1]}; "
            "pair them by basename and write the shard again"
        )
    values = np.asarray(mask).astype(np.int32)
    if values.ndim == 3:
        values = values[..., 0] + 256 * values[..., 1]
    return Image.fromarray(values)


class EvalTransform:
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
        """An RGB image to (3, crop, crop) uint8."""
        return np.ascontiguousarray(np.asarray(self._geometry(image, InterpolationMode.BICUBIC)).transpose(2, 0, 1))

    def mask(self, mask: Image.Image) -> np.ndarray:
        """A mode "I" mask to (crop, crop) int32."""
        return np.array(self._geometry(mask, InterpolationMode.NEAREST), dtype=np.int32)
