"""Decoding and the evaluation transform against PIL and torchvision."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from datamodules.decoding import decode_image, decode_mask
from datamodules.eval_transforms import ResizeCenterCrop
from datamodules.samples import RawSample, ShardError
from datamodules.transforms import normalize

MODES = ("RGB", "L", "CMYK", "P", "RGBA", "LA", "1", "I;16", "EXIF")


def photo(rng, width, height):
    """Smooth with edges and noise, so that antialiasing matters."""
    y, x = np.mgrid[:height, :width]
    base = np.stack([127 + 120 * np.sin(x / f + y / g) for f, g in ((3, 17), (9, 5), (2, 31))], -1)
    return np.clip(base + rng.normal(0, 20, base.shape), 0, 255).astype(np.uint8)


def encode(array, mode):
    image, buffer = Image.fromarray(array), io.BytesIO()
    if mode == "CMYK":
        image.convert("CMYK").save(buffer, "jpeg")
    elif mode == "EXIF":
        exif = Image.Exif()
        exif[0x0112] = 6  # turn by 90 degrees
        image.save(buffer, "jpeg", exif=exif)
    elif mode == "I;16":
        Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 256 + 77).save(buffer, "png")
    else:
        image.convert(mode).save(buffer, "png")
    return buffer.getvalue()


def reference(data, resize, crop):
    """The published pipelines: PIL opens and converts, torchvision resizes and crops; 16 bits by their high byte."""
    image = Image.open(io.BytesIO(data))
    if image.mode == "I;16":
        image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
    pipeline = transforms.Compose(
        [
            transforms.Resize(resize, transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(crop),
            transforms.PILToTensor(),
        ]
    )
    return pipeline(image.convert("RGB"))


@pytest.mark.parametrize("case", range(100))
def test_equals_pil(case):
    rng = np.random.default_rng(case)
    width, height = rng.integers(17, 420, 2)
    mode = MODES[case % len(MODES)]
    data = encode(photo(rng, width, height), mode)
    resize, crop = ((256, 224), (72, 64), (64, 64))[case % 3]
    image = decode_image(RawSample("shard.tar", "key", {"png": data}))
    assert image.mode == "RGB"
    assert image.size == (width, height)  # EXIF orientation is not applied, as in the reference pipelines
    ours = torch.from_numpy(ResizeCenterCrop(resize, crop).image(image)).int()
    assert (ours - reference(data, resize, crop).int()).abs().max() <= 1
    if mode == "I;16":
        assert 20 < ours.float().mean() < 235  # not the white image that PIL's clipping gives


def test_masks_follow_the_image():
    """A mask that is the image's own value lands where the image lands."""
    rng = np.random.default_rng(0)
    ids = np.kron(rng.integers(0, 1001, (6, 8)), np.ones((20, 20), int))
    rgb = np.stack([ids % 256, ids // 256, np.zeros_like(ids)], -1).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(rgb).save(buffer, "png")
    raw = RawSample("s", "k", {"mask.png": buffer.getvalue()})
    mask = decode_mask(raw, (160, 120))
    assert np.array_equal(np.asarray(mask), ids)
    ours = ResizeCenterCrop(60, 48).mask(mask)
    # 120 -> 60 rows; the centre 48 of 60 x 80
    expected = np.asarray(Image.fromarray(ids.astype(np.int32)).resize((80, 60), Image.NEAREST))[6:54, 16:64]
    assert np.array_equal(ours, expected)
    assert set(np.unique(ours)) <= set(np.unique(ids))


def test_damaged_image_is_named():
    data = encode(photo(np.random.default_rng(0), 50, 50), "RGB")
    with pytest.raises(ShardError, match=r"sample 'key' in shard shard.tar cannot be read"):
        decode_image(RawSample("shard.tar", "key", {"png": data[: len(data) // 2]}))


def test_crop_larger_than_resize():
    with pytest.raises(ValueError, match="crop=64 must not be larger than resize=32"):
        ResizeCenterCrop(32, 64)


def test_normalize_equals_torchvision():
    images = torch.randint(0, 256, (3, 3, 5, 7), dtype=torch.uint8)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = transforms.Normalize(mean, std)(images.double() / 255)
    torch.testing.assert_close(normalize(images, mean, std, torch.float64), expected)
    torch.testing.assert_close(normalize(images, mean, std, torch.float32), expected.float(), atol=1e-6, rtol=1e-6)
