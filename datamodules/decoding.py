"""Bytes to pixels.

What comes out is ``PIL.Image.open(...).convert("RGB")``, as torchvision's ImageFolder has it, so evaluation sees the
pixels that published models were scored on. That has two consequences. EXIF orientation is *not* applied: the
reference pipelines ignore it too. And 16-bit grey images would come out white, since PIL clips them at 255; here they
keep their high byte, as PIL does itself when it opens 16-bit RGB.

Also as there: what is transparent shows the colour that is stored below it, colour profiles are ignored, CMYK is
converted without one (inverted where Adobe wrote it so), and of several pictures in a file the first counts. What of
this should be otherwise is said when shards are written: :class:`datamodules.image_files.PixelRules`.
"""

import io

import cv2
import numpy as np
from PIL import Image, UnidentifiedImageError

from datamodules import channels, jpeg_damage
from datamodules.file_kinds import other_kind
from datamodules.masks import MaskEncoding, ids_of
from datamodules.pixel_format import PixelFormat
from datamodules.samples import RawSample, ShardError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""What an image may be, whatever its name says; PIL would hand others, such as EPS, to other programs."""
_PLAIN = cv2.IMREAD_IGNORE_ORIENTATION
_REDUCED = {2: cv2.IMREAD_REDUCED_COLOR_2, 4: cv2.IMREAD_REDUCED_COLOR_4, 8: cv2.IMREAD_REDUCED_COLOR_8}


class EncodedImage:
    """An image whose header has been read. ShardError, naming shard and key, where it cannot be.

    Attributes:
        size: (width, height) in pixels.
    """

    def __init__(self, data: bytes, what: str) -> None:
        self._data, self._what = data, what
        try:
            self._image = Image.open(io.BytesIO(data), formats=FORMATS)
        except Exception as error:  # PIL raises anything from SyntaxError to struct.error on damaged files
            raise self._unreadable(error) from None
        self.size = self._image.size

    def _unreadable(self, error: Exception) -> ShardError:
        kind = other_kind(self._data)
        found = f"is {kind[0]}" if kind else f"cannot be read ({type(error).__name__}: {_said(error)})"
        return ShardError(
            f"{self._what} {found}; {kind[1] if kind else 'replace it'}, or set data.init_args.policy=skip"
        )

    def image(self) -> Image.Image:
        """In the mode it is stored in."""
        try:
            self._image.load()
        except Exception as error:
            raise self._unreadable(error) from None
        return self._image

    def pixels(self, reduction: int = 1) -> np.ndarray:
        """(H, W, 3) uint8, writable; a JPEG may come out smaller by 2, 4 or 8, which decodes faster.

        JPEGs go through OpenCV, whose libjpeg-turbo gives PIL's values in less time. It would take a cut-off file for a
        whole one, so those without an end, and all that is not plain grey or YCbCr, are left to PIL.
        """
        if self._image.format == "JPEG" and self._image.mode in ("RGB", "L") and jpeg_damage.is_whole(self._data):
            pixels = _decode_jpeg(np.frombuffer(self._data, np.uint8), reduction)
            if pixels is not None:
                return pixels
        return np.array(to_rgb(self.image()))


def _said(error: Exception) -> str:
    """PIL's own words name an object in memory."""
    return "no image of a known kind" if isinstance(error, UnidentifiedImageError) else str(error)


def _decode_jpeg(data: np.ndarray, reduction: int) -> np.ndarray | None:
    """RGB, or None where OpenCV cannot; PIL then has the word."""
    try:
        if reduction == 1:
            return cv2.imdecode(data, _PLAIN | cv2.IMREAD_COLOR_RGB)
        pixels = cv2.imdecode(data, _PLAIN | _REDUCED[reduction])
    except cv2.error:
        return None
    return None if pixels is None else cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to 8-bit RGB."""
    if image.mode.startswith("I;16") or image.mode == "I":
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


def open_image(raw: RawSample) -> EncodedImage:
    """A sample's image before it is decoded."""
    return EncodedImage(raw.image(), f"the image of {raw.name}")


def sample_pixels(raw: RawSample, pixels: PixelFormat) -> np.ndarray:
    """A sample's image (H, W, C) of any format, unchanged. ShardError, naming shard and key, where it is another."""
    if pixels.plain:
        return open_image(raw).pixels()
    return channels.decode(raw.image(pixels.fields), f"the image of {raw.name}", pixels)


def decode_image(raw: RawSample) -> Image.Image:
    """A sample's image in 8-bit RGB. ShardError, naming shard and key, where it cannot be read."""
    return to_rgb(open_image(raw).image())


def decode_mask(
    raw: RawSample, size: tuple[int, int], encoding: MaskEncoding = "auto", largest: int | None = None
) -> Image.Image:
    """A sample's segmentation ids as a mode "I" image.

    Args:
        raw: the sample.
        size: (width, height) of its image.
        encoding: see :data:`datamodules.masks.MaskEncoding`.
        largest: highest id beside 1000; None for any.

    Raises:
        ShardError: where it is missing, unreadable, not of ``size``, or not of that encoding.
    """
    if "mask.png" not in raw.fields:
        raise ShardError(f"{raw.name} has no .mask.png member; write shards from an ImageNet-S tree with masks")
    data = raw.fields["mask.png"]
    ids = mask_ids(data, f"the mask of {raw.name}", encoding, largest, "data.init_args.mask_encoding")
    if ids.shape[::-1] != size:
        turned = ids.shape == size and size[0] != size[1]
        raise ShardError(
            f"{raw.name}: the mask is {ids.shape[1]} x {ids.shape[0]}, the image {size[0]} x {size[1]}; "
            + (
                "if the image has an EXIF orientation, write the shard with --pixels.orientation apply"
                if turned
                else "pair them by basename and write the shard again"
            )
        )
    return Image.fromarray(ids)


def mask_ids(data: bytes, what: str, encoding: MaskEncoding, largest: int | None, option: str) -> np.ndarray:
    """A mask file's ids (H, W) int32; see :func:`datamodules.masks.ids_of`."""
    return ids_of(EncodedImage(data, what).image(), data, what, encoding, largest, option)
