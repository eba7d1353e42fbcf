"""Segmentation ids out of mask files, by an encoding that is declared, or that no other could be meant by.

Whatever does not fit is an error with the colours that were found; nothing becomes background by a guess.
"""

import io
from typing import Literal, get_args

import numpy as np
from PIL import Image

from datamodules.samples import ShardError

MaskEncoding = Literal["auto", "index", "rgb", "palette", "alpha"]
"""How a mask's pixels tell ids:

- ``index``: the grey level, of one channel or of three equal ones; of 1, 2 and 4 bits the number that is stored.
- ``rgb``: R + 256·G with B = 0, as ImageNet-S has it, up to 1000.
- ``palette``: the number in a palette, whatever its colour, as Pascal VOC has it.
- ``alpha``: 1 where a pixel is opaque by half or more, else 0.
- ``auto``: ``index`` for one channel, ``rgb`` for three; palettes only where colours and numbers say the same.
"""
ENCODINGS = get_args(MaskEncoding)
IGNORED = 1000
"""ImageNet-S's id of pixels that take no part."""
MOST_CLASSES = 919
"""Of ImageNet-S's sets the largest."""
VOID = 255
"""What Pascal VOC, Cityscapes and ADE20K call pixels that take no part."""
WITH_VOID = (
    "with 255 beside other ids, which counts as foreground as they do (void in VOC, Cityscapes, ADE20K: "
    "--model.ignore_index 255)"
)
BLURRED = (
    "of 0 and 255 with blurred edges, whose every grey level above 0 counts as foreground (write them anew as 0 and 1)"
)
SHOWN = 4


def ids_of(
    image: Image.Image, data: bytes, what: str, encoding: MaskEncoding, largest: int | None, option: str
) -> np.ndarray:
    """A mask's ids (H, W) int32.

    Args:
        image: the mask, loaded.
        data: of its file, a PNG, BMP or GIF.
        what: how errors call it.
        encoding: see :data:`MaskEncoding`.
        largest: highest id beside 1000; None for any.
        option: how errors call ``encoding``.

    Raises:
        ShardError: where pixels tell no id by that encoding, with their colours.
    """
    if encoding not in ENCODINGS:
        raise ValueError(f"{option}={encoding!r}; allowed: {', '.join(ENCODINGS)}")
    if image.format in ("JPEG", "WEBP"):
        raise ShardError(f"{what} is a {image.format}, which need not keep ids; write it as PNG")
    if image.format == "PNG" and data[24] == 16 and data[25] != 0:
        raise ShardError(f"{what} has several channels of 16 bits; write ids as one channel of 8 or 16 bits")
    ids = _ids(image, data, encoding)
    wrong = ids < 0 if largest is None else (ids < 0) | (ids > largest) & (ids != IGNORED)
    if wrong.any():
        read = "neither by grey level nor as R + 256·G with B = 0" if encoding == "auto" else f"as {encoding}"
        at_most = "" if largest is None else f" Ids are 0 to {largest}, and {IGNORED}."
        raise ShardError(
            f"{what} ({image.mode}) has pixels that are no ids, read {read}: {_colours(image, wrong)}.{at_most} "
            f"Declare how it was made, {option} = {', '.join(ENCODINGS[1:])}, or write it as one channel of ids"
        )
    return ids


def odd_ids(ids: np.ndarray) -> str | None:
    """What is strange about a mask's ids, as it reads after "masks"; None for nothing.

    Args:
        ids: of any shape; 0 is background.
    """
    counts = np.bincount(ids[(ids >= 0) & (ids < 256)].ravel(), minlength=256)
    between = counts[1:VOID]
    if not counts[VOID] or not between.any():
        return None
    # edges take every level and few pixels; numbers of classes lie close together, or cover as much as the void
    if between[:63].any() and between[191:].any() and between.sum() < counts[VOID] and np.count_nonzero(between) > 3:
        return BLURRED
    return WITH_VOID


def _ids(image: Image.Image, data: bytes, encoding: MaskEncoding) -> np.ndarray:
    """(H, W) int32; -1 where the encoding gives none."""
    if encoding == "alpha":
        if image.mode not in ("LA", "RGBA", "PA") and "transparency" not in image.info:
            return np.full(image.size[::-1], -1, np.int32)
        return (np.asarray(image.convert("RGBA"))[..., 3] >= 128).astype(np.int32)
    if image.mode == "P":
        return _palette_ids(image, encoding)
    values = np.asarray(image).astype(np.int32)
    if image.mode in ("LA", "RGBA"):  # opaque, or something is said by what is not
        values = np.where(values[..., -1:] == 255, values[..., :-1], -1)
        values = values[..., 0] if image.mode == "LA" else values
    if encoding == "palette":
        return np.full(values.shape[:2], -1, np.int32)
    if values.ndim == 2:
        if encoding == "rgb":
            return np.full(values.shape, -1, np.int32)
        return values // _unit(image, data)
    if encoding == "index":
        return np.where((values == values[..., :1]).all(-1), values[..., 0], -1).astype(np.int32)
    return _from_rgb(values)


def _unit(image: Image.Image, data: bytes) -> int:
    """What PIL multiplies grey levels of 2 and 4 bits by."""
    bits = data[24] if image.format == "PNG" and image.mode == "L" else 8
    return 255 // (2**bits - 1) if bits < 8 else 1


def _from_rgb(colours: np.ndarray) -> np.ndarray:
    """(..., 3) to ids by ImageNet-S's rule; -1 where it gives none."""
    ids = colours[..., 0] + 256 * colours[..., 1]
    valid = (colours >= 0).all(-1) & (colours[..., 2] == 0) & (ids <= IGNORED)
    return np.where(valid, ids, -1).astype(np.int32)


def _palette_ids(image: Image.Image, encoding: MaskEncoding) -> np.ndarray:
    index = np.asarray(image).astype(np.int32)
    if encoding == "palette":
        return index
    colours = np.zeros((256, 3), np.int32)
    table = np.array(image.getpalette("RGB") or [], np.int32).reshape(-1, 3)
    colours[: len(table)] = table
    number = np.arange(256, dtype=np.int32)
    grey = np.where((colours == number[:, None]).all(-1), number, -1)
    rgb = _from_rgb(colours)
    if encoding == "auto":  # both of what a palette may mean must agree
        rgb = np.where(rgb == number, number, grey)
    return (grey if encoding == "index" else rgb)[index]


def _colours(image: Image.Image, wrong: np.ndarray) -> str:
    """What an image shows where something is wrong, the most frequent first."""
    if image.mode in ("1", "L", "I;16", "I"):
        values = np.asarray(image).astype(np.int64)[wrong][:, None]
    else:
        values = np.asarray(image.convert("RGBA" if "A" in image.mode else "RGB"))[wrong].astype(np.int64)
    found, counts = np.unique(values, axis=0, return_counts=True)
    order = np.argsort(-counts)[:SHOWN]
    colours = [tuple(colour) if len(colour) > 1 else colour[0] for colour in found[order].tolist()]
    shown = [f"{colour} ({count} pixels)" for colour, count in zip(colours, counts[order], strict=True)]
    return ", ".join(shown) + (f", … {len(found)} in all" if len(found) > SHOWN else "")


def index_png(ids: np.ndarray) -> bytes:
    """Ids (H, W) as a PNG of one channel, 8 bits where they suffice, else 16."""
    kind = np.uint8 if ids.max(initial=0) < 256 else np.uint16
    buffer = io.BytesIO()
    Image.fromarray(ids.astype(kind)).save(buffer, "PNG")
    return buffer.getvalue()
