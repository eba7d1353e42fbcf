"""Image files of declared channels on their way into shards, or read from their folder: checked, never changed."""

from pathlib import Path

import numpy as np
from PIL import Image

from datamodules.channels import array_bytes, decode, encode, kept_as
from datamodules.image_files import IGNORED, IMAGE_SUFFIXES, ORIENTATION, ImageBytes, file_bytes
from datamodules.pixel_format import PixelFormat
from datamodules.tally import Tally

SUFFIXES = (*IMAGE_SUFFIXES, ".npy")
"""Endings of files, in lower case, that are taken for images where channels are declared."""


def read_channels(path: Path, pixels: PixelFormat, tally: Tally) -> tuple[ImageBytes, np.ndarray]:
    """An image file as a shard's member, and its pixels (H, W, C).

    PNG, JPEG and WebP keep their bytes where members of that format hold such images; all else is written anew, as PNG
    where that is without loss, else as .npy.

    Args:
        path: of the file.
        pixels: what it must hold.
        tally: counts what readers of the shards will not see.

    Raises:
        ShardError: for a file that is empty, damaged, or holds something else.
    """
    data = file_bytes(path)
    found = decode(data, str(path), pixels)
    field = kept_as(data)
    if field is not None and _oriented(path):
        tally.add(f"images with an EXIF orientation, {IGNORED}", path.name)
    anew, written = encode(found, pixels)
    if field is not None and anew == "png":
        written = data
    else:
        field = anew
    size = found.shape[1], found.shape[0]
    return ImageBytes(field, written, size, size, 1), found


def folder_member(path: Path, pixels: PixelFormat) -> tuple[str, bytes]:
    """An image file in its folder, as a member that readers take for it: TIFF as .npy, others as they are."""
    data = file_bytes(path)
    if path.suffix.lower() in (".tif", ".tiff"):
        return "npy", array_bytes(decode(data, str(path), pixels))
    return ("npy" if path.suffix.lower() == ".npy" else "png"), data


def _oriented(path: Path) -> bool:
    with Image.open(path) as image:
        return image.getexif().get(ORIENTATION, 1) in range(2, 9)
