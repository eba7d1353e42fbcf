"""Bytes to pixels of any number of channels: arrays, TIFF with bands or pages, and PNG, JPEG, WebP of up to four.

Values come out as they are stored, or not at all: nothing is scaled, no channel is dropped or made up.
"""

import io
from typing import Any

import cv2
import numpy as np
from PIL import Image

from datamodules.file_kinds import other_kind
from datamodules.pixel_format import PixelFormat
from datamodules.samples import ShardError

ARRAY = b"\x93NUMPY"
TIFFS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
KEPT = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
"""Formats, as PIL calls them, that are kept as they are, and the members they become."""
_REDUCED, _MASK = 1, 4  # of TIFF's NewSubfileType
_WHITE_IS_ZERO, _PALETTE = 0, 3  # of its PhotometricInterpretation


def decode(data: bytes, what: str, pixels: PixelFormat) -> np.ndarray:
    """An image file's pixels.

    Args:
        data: the file: .npy (H, W) or (H, W, C), TIFF, or PNG, JPEG, WebP, BMP, GIF.
        what: it is, for messages.
        pixels: what it must hold.

    Returns:
        (H, W, C) of ``pixels.dtype``.

    Raises:
        ShardError: for what cannot be read or holds something else, naming what was found.
    """
    try:
        if data.startswith(ARRAY):
            found = np.load(io.BytesIO(data), allow_pickle=False)
        elif data.startswith(TIFFS):
            found = _tiff(data, what, pixels)
        else:
            found = _picture(data, what, pixels)
    except ShardError:
        raise
    except Exception as error:  # readers raise anything on damaged files
        kind = None if data.startswith(ARRAY) else other_kind(data)
        found = f"is {kind[0]}; {kind[1]}" if kind else f"cannot be read ({type(error).__name__}: {error}); replace it"
        raise ShardError(f"{what} {found}, or leave it out by policy skip") from None
    return checked(found, what, pixels)


def checked(found: np.ndarray, what: str, pixels: PixelFormat) -> np.ndarray:
    """An array as (H, W, C) of ``pixels.dtype``, its values unchanged. ShardError where they cannot be."""
    if found.ndim == 2:
        found = found[..., None]
    if found.ndim != 3 or found.shape[2] != pixels.in_chans or not found.size:
        turned = found.ndim == 3 and found.shape[0] == pixels.in_chans
        raise ShardError(
            f"{what} is {found.shape}; wanted (height, width, {pixels.in_chans})"
            + ("; it seems to have its channels first: np.moveaxis(array, 0, -1)" if turned else "")
            + f" (in_chans={pixels.in_chans})"
        )
    kind, size = found.dtype.kind, found.dtype.itemsize * 8
    if pixels.bits == 32:
        if not (kind == "f" or (kind in "iu" and size <= 16)):
            raise ShardError(f"{what} is {found.dtype}; bits=32 takes floats, and integers of up to 16 bits")
        with np.errstate(over="ignore"):
            values = found.astype(np.float32)
        if wrong := int((~np.isfinite(values)).sum()):
            raise ShardError(f"{what} has {wrong} values that are no finite numbers of 32 bits; fill them")
    else:
        if kind not in "iu" or size != pixels.bits:
            raise ShardError(
                f"{what} is {found.dtype}; bits={pixels.bits} takes uint{pixels.bits}: declare what it is (8, 16, or "
                "32 for floats), or convert it"
            )
        if kind == "i" and (low := int(found.min())) < 0:
            raise ShardError(f"{what} is {found.dtype} with values down to {low}; bits=32 takes it as floats")
        values = found.astype(pixels.dtype)
    if pixels.max_value is not None and (high := float(values.max())) > pixels.max_value:
        raise ShardError(f"{what} has values up to {high:g}, above max_value={pixels.max_value:g}; raise it")
    return np.ascontiguousarray(values)


def _tiff(data: bytes, what: str, pixels: PixelFormat) -> np.ndarray:
    try:
        import tifffile
    except ImportError:
        raise ShardError(f"{what} is a TIFF, whose bands tifffile reads: pip install 'dinomamba[channels]'") from None
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        pages = [page for page in file.pages if not page.aspage().subfiletype & (_REDUCED | _MASK)]
        photometric = {int(page.aspage().photometric) for page in pages}
        if _PALETTE in photometric:
            raise ShardError(f"{what} holds numbers of a palette's colours; write its values instead")
        if len(pages) == 1:
            found = pages[0].asarray()
            axes = pages[0].aspage().axes
            if axes == "SYX":  # bands in planes of their own
                found = np.moveaxis(found, 0, -1)
            elif axes not in ("YX", "YXS"):
                raise ShardError(f"{what} has axes {axes}, {found.shape}; wanted height, width and bands")
        else:
            named = len(file.series) == 1 and sorted(file.series[0].axes) == ["C", "X", "Y"]
            if pixels.pages != "bands" and not named:
                raise ShardError(
                    f"{what} holds {len(pages)} pages; pages=bands takes each as a channel, else extract the one meant"
                )
            planes = [page.asarray() for page in pages]
            if any(plane.ndim != 2 or plane.shape != planes[0].shape for plane in planes):
                shapes = ", ".join(dict.fromkeys(str(plane.shape) for plane in planes))
                raise ShardError(f"{what}: its pages are {shapes}; as channels each must be one (height, width)")
            found = np.stack(planes, -1)
    if photometric == {_WHITE_IS_ZERO} and found.dtype.kind == "u":
        found = np.iinfo(found.dtype).max - found
    return found


def _picture(data: bytes, what: str, pixels: PixelFormat) -> np.ndarray:
    with Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP", "GIF", "BMP")) as opened:
        image: Image.Image = opened
        if getattr(opened, "n_frames", 1) > 1 and image.format != "MPO":
            raise ShardError(f"{what} holds {opened.n_frames} pictures; extract the one that is meant")  # type: ignore[attr-defined]
        if image.format == "PNG":  # decoding does not look at the checksums of pixels
            Image.open(io.BytesIO(data), formats=("PNG",)).verify()
        image.load()  # raises where something is missing, which OpenCV would not
        if image.format == "PNG" and data[24] == 16:
            # of colours PIL keeps the high bytes
            return np.asarray(image).astype(np.uint16) if image.mode in ("I;16", "I") else _deep_png(data, what)
        if image.mode == "P" or (image.mode in ("L", "RGB") and "transparency" in image.info):
            transparent = "transparency" in image.info
            image = image.convert("RGBA" if transparent else "RGB")
        elif image.mode == "1":
            image = image.convert("L")
        if image.mode not in ("L", "LA", "RGB", "RGBA"):
            raise ShardError(f"{what} has pixels of mode {image.mode}; write them as grey, RGB, RGBA, TIFF or .npy")
        found = np.asarray(image)
    grey = found.ndim == 3 and found.shape[2] == 3 and pixels.in_chans == 1
    if grey and (found == found[..., :1]).all():  # a grey picture in three equal channels
        found = found[..., 0]
    return found


def _deep_png(data: bytes, what: str) -> np.ndarray:
    """A PNG of 16 bits in colour, or with transparency."""
    found = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if found is None or found.dtype != np.uint16:
        raise ShardError(f"{what} is no whole PNG of 16 bits; replace it")
    if found.ndim == 3:
        found = found[..., [2, 1, 0, *range(3, found.shape[2])]]
        if data[25] == 4:  # grey and alpha, which OpenCV repeats
            found = found[..., [0, 3]]
    return found


def encode(found: np.ndarray, pixels: PixelFormat) -> tuple[str, bytes]:
    """Member and bytes that hold an image without loss: PNG where that can, else .npy.

    Args:
        found: (H, W, C) of ``pixels.dtype``.
        pixels: what it holds.
    """
    buffer = io.BytesIO()
    if (pixels.in_chans, pixels.bits) in ((1, 8), (1, 16), (3, 8), (4, 8)):
        Image.fromarray(found[..., 0] if pixels.in_chans == 1 else found).save(buffer, "PNG")
        return "png", buffer.getvalue()
    return "npy", array_bytes(found)


def array_bytes(found: Any) -> bytes:
    """As .npy."""
    buffer = io.BytesIO()
    np.save(buffer, found, allow_pickle=False)
    return buffer.getvalue()


def kept_as(data: bytes) -> str | None:
    """The member that a file may be as it is; None where shards do not hold its format."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            return KEPT.get(str(image.format))
    except Exception:  # PIL raises many types for what is no image of its own, such as an array
        return None
