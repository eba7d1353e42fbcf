"""Bytes to pixels: PIL's values whatever decodes them, and nothing half-read."""

import io
import os

import numpy as np
import pytest
from PIL import Image

from datamodules.decoding import EncodedImage
from datamodules.samples import ShardError

RNG = np.random.default_rng(0)
SMOOTH = Image.fromarray(RNG.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize((217, 163), Image.BICUBIC)


def encode(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


FILES = {
    "4:2:0": encode(SMOOTH, quality=80),
    "4:4:4": encode(SMOOTH, quality=95, subsampling=0),
    "4:2:2, progressive": encode(SMOOTH, quality=90, subsampling=1, progressive=True),
    "grey": encode(SMOOTH.convert("L")),
    "CMYK": encode(SMOOTH.convert("CMYK")),
    "on its side": encode(SMOOTH, exif=exif(6)),
    "bytes after its end": encode(SMOOTH) + b"more",
    "another JPEG after its end": encode(SMOOTH) + encode(SMOOTH)[:-50],
    "PNG": encode(SMOOTH, "PNG"),
    "PNG with a palette": encode(SMOOTH.quantize(17), "PNG"),
    "PNG with an alpha channel": encode(SMOOTH.convert("RGBA"), "PNG"),
    "WebP": encode(SMOOTH, "WEBP"),
}


@pytest.mark.parametrize("what", FILES)
def test_the_pixels_are_pils(what):
    """The mean error is what tells a wrong conversion or a turned image; libjpeg's versions may differ by a value."""
    expected = np.asarray(Image.open(io.BytesIO(FILES[what])).convert("RGB")).astype(int)
    encoded = EncodedImage(FILES[what], "it")
    pixels = encoded.pixels()
    assert pixels.shape == expected.shape and pixels.dtype == np.uint8 and pixels.flags.writeable
    assert encoded.size == (217, 163) and np.abs(pixels - expected).max() <= 1


@pytest.mark.parametrize("reduction", [2, 4, 8])
def test_smaller(reduction):
    encoded = EncodedImage(FILES["4:4:4"], "it")
    pixels = encoded.pixels(reduction)
    assert pixels.shape == (-(-163 // reduction), -(-217 // reduction), 3)
    even = SMOOTH.crop((0, 0, 216, 160))
    means = even.resize((216 // reduction, 160 // reduction), Image.BOX)
    small = EncodedImage(encode(even, quality=95, subsampling=0), "it").pixels(reduction)
    assert np.abs(small.astype(int) - np.asarray(means)).mean() < 2
    assert EncodedImage(FILES["PNG"], "it").pixels(reduction).shape == (163, 217, 3)  # all the same to the caller


@pytest.mark.parametrize("kept", [0.02, 0.3, 0.7, 0.98])
def test_cut_off(kept):
    """OpenCV would fill the rest with grey."""
    for what in ("4:2:0", "4:2:2, progressive", "PNG"):
        data = FILES[what][: int(kept * len(FILES[what]))]
        with pytest.raises(ShardError, match=r"^it cannot be read \(.*replace it, or set data.init_args.policy=skip"):
            EncodedImage(data, "it").pixels()


def test_cut_off_behind_a_thumbnail():
    """The thumbnail in a JPEG's header has an end of its own."""
    tags = b"Exif\0\0" + encode(SMOOTH.resize((16, 12)))
    data = encode(SMOOTH)
    header = b"\xff\xe5" + (len(tags) + 2).to_bytes(2, "big") + tags
    whole = data[:2] + header + data[2:]
    assert EncodedImage(whole, "it").pixels().shape == (163, 217, 3)
    with pytest.raises(ShardError, match="cannot be read"):
        EncodedImage(whole[:-500], "it").pixels()


def test_not_an_image():
    for data in (b"", b"no image", os.urandom(1000), encode(SMOOTH, "TIFF")):
        with pytest.raises(ShardError, match="it cannot be read"):
            EncodedImage(data, "it")
