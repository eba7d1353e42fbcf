"""Which ids a mask's pixels tell, by which encoding, and that nothing else becomes one."""

import io
import warnings

import numpy as np
import pytest
from PIL import Image

from datamodules import ImageNetSDataModule
from datamodules.decoding import mask_ids
from datamodules.masks import odd_ids
from datamodules.prepare import PixelRules, imagenet_s
from datamodules.samples import ShardError
from tests.datamodules.test_shards import FakeTrainer

RNG = np.random.default_rng(0)


def encode(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def grey(values, dtype=np.uint8):
    return Image.fromarray(np.array([values], dtype))


def colours(*values):
    return Image.fromarray(np.array([values], np.uint8))


def palette(*entries):
    image = Image.new("P", (len(entries), 1))
    image.putdata(range(len(entries)))
    image.putpalette([channel for entry in entries for channel in entry])
    return image


VOC = palette((0, 0, 0), (128, 0, 0), (0, 128, 0))
READ = {  # image, encoding -> ids
    "grey": (grey([0, 7, 255]), "auto", [0, 7, 255]),
    "16 bits": (grey([0, 300, 1000], np.uint16), "auto", [0, 300, 1000]),
    "1 bit": (grey([0, 255]).convert("1"), "auto", [0, 1]),
    "R + 256 G": (colours((5, 1, 0), (232, 3, 0), (0, 0, 0)), "auto", [261, 1000, 0]),
    "opaque": (colours((5, 1, 0, 255), (0, 0, 0, 255)), "rgb", [261, 0]),
    "three equal channels": (colours((5, 5, 5), (0, 0, 0)), "index", [5, 0]),
    "a palette's numbers": (VOC, "palette", [0, 1, 2]),
    "a palette's colours": (palette((0, 0, 0), (232, 3, 0)), "rgb", [0, 1000]),
    "a palette of greys": (palette((0, 0, 0), (1, 1, 1), (2, 2, 2)), "auto", [0, 1, 2]),
    "transparency": (colours((9, 9, 9, 200), (0, 0, 255, 10)), "alpha", [1, 0]),
}


@pytest.mark.parametrize("what", READ)
def test_what_is_read(what):
    image, encoding, ids = READ[what]
    assert mask_ids(encode(image), "it", encoding, None, "encoding").tolist() == [ids]


@pytest.mark.parametrize(("bits", "values"), [(1, [0, 1]), (2, [0, 1, 2, 3]), (4, [0, 1, 14, 15])])
def test_few_bits_are_numbers_and_not_levels(bits, values):
    """PIL opens 2 and 4 bits as 8, times 85 and 17."""
    scaled = grey(np.array(values) * (255 // (2**bits - 1)))
    data = encode(scaled.convert("1") if bits == 1 else scaled, bits=bits)
    assert data[24] == bits
    assert mask_ids(data, "it", "auto", None, "encoding").tolist() == [values]


REFUSED = {  # image, encoding -> words
    "blue": (colours((0, 0, 255), (0, 0, 0)), "auto", r"no ids, .*: \(0, 0, 255\) \(1 pixels\)\."),
    "green": (colours((0, 255, 0)), "auto", r"\(0, 255, 0\)"),
    "grey in three channels": (colours((5, 5, 5)), "auto", r"\(5, 5, 5\)"),
    "half transparent": (colours((5, 0, 0, 128)), "auto", r"\(5, 0, 0, 128\)"),
    "a palette of colours": (VOC, "auto", r"\(P\).*\(128, 0, 0\) .*encoding = index, rgb, palette, alpha"),
    "rgb of one channel": (grey([3]), "rgb", r"\(L\) has pixels that are no ids, read as rgb: 3"),
    "alpha without any": (colours((1, 0, 0)), "alpha", "read as alpha"),
    "a palette that is none": (grey([3]), "palette", "read as palette"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    image, encoding, words = REFUSED[what]
    with pytest.raises(ShardError, match=words):
        mask_ids(encode(image), "it", encoding, None, "encoding")


def test_other_refusals():
    with pytest.raises(ShardError, match="a JPEG, which need not keep ids"):
        mask_ids(encode(grey([3]), "JPEG"), "it", "auto", None, "encoding")
    with pytest.raises(ShardError, match=r"51 \(2 pixels\)\. Ids are 0 to 50, and 1000"):
        mask_ids(encode(grey([0, 51, 51, 1000], np.uint16)), "it", "index", 50, "encoding")
    with pytest.raises(ValueError, match="encoding='colour'; allowed: auto, index"):
        mask_ids(encode(grey([3])), "it", "colour", None, "encoding")
    many = colours(*[(0, 0, 9 * i) for i in range(1, 20)])
    with pytest.raises(ShardError, match=r"… 19 in all"):
        mask_ids(encode(many), "it", "auto", None, "encoding")


def tree(root, mask, orientation=1, size=(40, 30)):
    image = Image.fromarray(RNG.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    tags = Image.Exif()
    tags[0x0112] = orientation
    for folder, name, what, options in (
        ("validation", "a.JPEG", image, {"exif": tags}),
        ("validation-segmentation", "a.png", mask, {}),
    ):
        (root / folder / "n1").mkdir(parents=True)
        what.save(root / folder / "n1" / name, **options)
    return str(root)


def first_masks(out, **kwargs):
    data = ImageNetSDataModule(str(out), "validation-*.tar", 2, 0, resize=30, crop=30, **kwargs)
    return next(iter(data.val_dataloader()))["mask"]


def quarter(width, height):
    """7 in the first quarter, by rows and columns."""
    mask = np.zeros((height, width), np.uint8)
    mask[: height // 2, : width // 2] = 7
    return Image.fromarray(mask)


def test_masks_are_declared_once(tmp_path):
    """What readers would not see by themselves is written as ids."""
    mask = Image.new("P", (40, 30))
    mask.putdata([1] * 600 + [0] * 600)
    mask.putpalette([0, 0, 0, 0, 0, 255])
    src = tree(tmp_path / "src", mask)
    with pytest.raises(ShardError, match=r"mask .*n1/a\.png \(P\) .*\(0, 0, 255\) \(600 pixels\).*--mask_encoding"):
        imagenet_s(src, str(tmp_path / "out"))
    imagenet_s(src, str(tmp_path / "out"), mask_encoding="palette")
    found = first_masks(tmp_path / "out")
    assert (found[0, :15] == 1).all() and not found[0, 15:].any()


@pytest.mark.parametrize("drawn", ["on the stored pixels", "on what viewers show"])
def test_a_mask_beside_a_photo_that_is_turned(tmp_path, drawn):
    """Orientation 6 is shown turned right: what was first is then the upper right."""
    stored = drawn == "on the stored pixels"
    src = tree(tmp_path / "src", quarter(40, 30) if stored else quarter(30, 40), orientation=6)
    if stored:
        imagenet_s(src, str(tmp_path / "as_stored"))
        assert first_masks(tmp_path / "as_stored")[0, 0, 0] == 7
    else:
        with pytest.raises(ShardError, match=r"is \(30, 40\), its image .* is \(40, 30\); .*orientation apply"):
            imagenet_s(src, str(tmp_path / "as_stored"))
    imagenet_s(src, str(tmp_path / "turned"), pixels=PixelRules(orientation="apply"))
    row = first_masks(tmp_path / "turned")[0, 2]
    assert (row[0], row[-1]) == ((0, 7) if stored else (7, 0))


def test_masks_and_images_are_one_to_one(tmp_path, caplog):
    src = tree(tmp_path / "src", quarter(40, 30))
    quarter(40, 30).save(tmp_path / "src/validation-segmentation/n1/b.png")
    imagenet_s(src, str(tmp_path / "out"))
    assert "masks of which there is no image, left out: 1 ('b.png')" in caplog.text
    quarter(40, 30).save(tmp_path / "src/validation/n1/a.png")
    with pytest.raises(ShardError, match=r"a\.JPEG and .*a\.png have one mask, a\.png"):
        imagenet_s(src, str(tmp_path / "twice"))


def drawn(values, side=64):
    """Squares of ids one inside the other, a background around."""
    ids = np.zeros((side, side), np.uint8)
    for number, value in enumerate(values):
        inset = 8 + 6 * number
        ids[inset : side - inset, inset : side - inset] = value
    return ids


def blurred():
    return np.asarray(Image.fromarray(drawn([255])).resize((63, 61), 2).resize((64, 64), 2))


ODD = {
    "VOC": (drawn([255, 3]), "with 255 beside other ids"),
    "many classes": (drawn([255, 1, 150, 40, 90]), "with 255 beside other ids"),
    "blurred": (blurred(), "blurred edges"),
    "0 and 255": (drawn([255]), None),
    "0 and 1": (drawn([1]), None),
    "ImageNet-S": (drawn([255]).astype(np.int32) + 700 * (drawn([1]) == 0), None),
    "empty": (drawn([]), None),
}


@pytest.mark.parametrize("what", ODD)
def test_void_and_blurred_masks_are_said(tmp_path, what, caplog):
    """By prepare, and by a run that does not ignore them."""
    ids, words = ODD[what]
    found = odd_ids(ids)
    assert found is None if words is None else words in found
    src = tree(
        tmp_path / "src", Image.fromarray(ids if ids.dtype == np.uint8 else ids.astype(np.uint16)), size=(64, 64)
    )
    imagenet_s(src, str(tmp_path / "out"))
    assert (words or "") in caplog.text and (words is not None) == (
        "masks with 255" in caplog.text or "blurred" in caplog.text
    )
    data = ImageNetSDataModule(str(tmp_path / "out"), "validation-*.tar", 2, 0, resize=64, crop=64)
    data.trainer = FakeTrainer(0, 1)
    (batch,) = data.val_dataloader()
    for ignored, wanted in ((1000, words), (255, None)):
        data.trainer.lightning_module.ignore_index, data._masks_looked_at = ignored, False
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            data.on_before_batch_transfer(batch, 0)
            data.on_before_batch_transfer(batch, 0)
        assert len(said) == (wanted is not None) and all(wanted in str(one.message) for one in said)
