"""Multi-crop: views, probabilities and pixel operations against PIL and torchvision."""

import random

import albumentations as A
import numpy as np
import pytest
from PIL import Image, ImageOps

from datamodules.multicrop import (
    BICUBIC,
    MultiCrop,
    MultiCropConfig,
    ProbeCrop,
    SampleSeed,
    random_resized_crop,
)


@pytest.fixture(scope="module")
def image():
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:90, :120]
    base = np.stack([127 + 100 * np.sin(x / f) * np.cos(y / f) for f in (7, 11, 19)], -1)
    return np.clip(base + rng.normal(0, 5, base.shape), 0, 255).astype(np.uint8)


def test_views(image):
    config = MultiCropConfig(global_size=48, local_size=24, num_local=5)
    views = MultiCrop(config)(image, 0, 0, 0)
    assert [v.shape for v in views] == [(3, 48, 48)] * 2 + [(3, 24, 24)] * 5
    assert all(v.dtype == np.uint8 and v.flags["C_CONTIGUOUS"] for v in views)
    assert not any(np.array_equal(views[2], v) for v in views[3:])  # views of one kind differ


def test_depends_on_seed_epoch_and_index_alone(image):
    config = MultiCropConfig(global_size=16, local_size=8, num_local=1)
    one, other = MultiCrop(config), MultiCrop(config)
    first = one(image, 1, 2, 3)
    for index in range(5):
        other(image, 9, 9, index)  # a different history
    np.random.seed(5)
    random.seed(5)
    for a, b in zip(first, other(image, 1, 2, 3), strict=True):
        assert np.array_equal(a, b)
    for changed in ((0, 2, 3), (1, 0, 3), (1, 2, 4)):
        assert not np.array_equal(first[0], one(image, *changed)[0])


def test_streams_of_neighbouring_samples_are_unrelated():
    seed, draws = SampleSeed(), []
    for index in range(2000):
        seed.set(0, 0, index)
        draws.append((seed.numpy.random(), seed.python.random()))
    draws = np.array(draws)
    assert np.abs(draws.mean(0) - 0.5).max() < 0.03
    for generator in (0, 1):
        assert abs(np.corrcoef(draws[:-1, generator], draws[1:, generator])[0, 1]) < 0.08
    assert abs(np.corrcoef(draws[:, 0], draws[:, 1])[0, 1]) < 0.08


def only(**changes):
    """A config whose probabilities are all 0 but for the changes."""
    off = {
        "flip_prob": 0.0,
        "jitter_prob": 0.0,
        "gray_prob": 0.0,
        "blur_probs": (0.0, 0.0, 0.0),
        "solarize_prob": 0.0,
    }
    return MultiCropConfig(global_size=32, local_size=16, num_local=1, **{**off, **changes})


def share(config, view, happened, image, n=400):
    crops = MultiCrop(config)
    return np.mean([happened(crops(image, 0, 0, i)[view]) for i in range(n)])


def test_probabilities(image):
    coloured = np.zeros((40, 40, 3), np.uint8)
    coloured[:, :20] = (200, 40, 10)
    coloured[:, 20:] = (10, 40, 60)

    def gray(v):
        return np.array_equal(v[0], v[1])

    assert abs(share(only(gray_prob=0.2), 0, gray, coloured) - 0.2) < 0.06
    ramp = np.repeat(np.linspace(0, 255, 64).astype(np.uint8)[None, :, None], 64, 0).repeat(3, -1)
    falls = share(only(flip_prob=0.5), 0, lambda v: int(v[0, 0, 0]) > int(v[0, 0, -1]), ramp)
    assert abs(falls - 0.5) < 0.08
    white = np.full((40, 40, 3), 200, np.uint8)
    for view, expected in ((0, 0.0), (1, 0.2), (2, 0.0)):  # solarize: the second global view only
        assert abs(share(only(solarize_prob=0.2), view, lambda v: v.max() < 100, white) - expected) < 0.06
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    config = only(
        blur_probs=(1.0, 0.1, 0.5), blur_sigma=(1.5, 1.5), global_scale=(0.25, 0.25), local_scale=(0.07, 0.07)
    )
    for view, expected in ((0, 1.0), (1, 0.1), (2, 0.5)):
        assert abs(share(config, view, lambda v: v.std() < 40, noise) - expected) < 0.07


def test_solarize_equals_pil():
    values = np.arange(256, dtype=np.uint8).reshape(16, 16)
    ours = A.Solarize(threshold_range=(128 / 255, 128 / 255), p=1.0)(image=values[..., None].repeat(3, -1))["image"]
    assert np.array_equal(ours[..., 0], np.asarray(ImageOps.solarize(Image.fromarray(values), 128)))


def test_blur_sigma_reaches_the_kernel():
    dot = np.zeros((41, 41, 3), np.uint8)
    dot[20, 20] = 255
    widths = [
        A.GaussianBlur(blur_limit=0, sigma_limit=(s, s), p=1.0)(image=dot)["image"].max() for s in (0.5, 1.0, 2.0)
    ]
    expected = [255 / (2 * np.pi * s * s) for s in (0.5, 1.0, 2.0)]
    np.testing.assert_allclose(widths[1:], expected[1:], atol=1.5)
    assert widths[0] > widths[1] > widths[2]


def test_crop_area_and_ratio(image):
    crop = random_resized_crop(16, (0.25, 0.5), BICUBIC)
    areas, ratios = [], []
    for _ in range(300):
        x1, y1, x2, y2 = crop.get_params_dependent_on_data({"shape": image.shape}, {})["crop_coords"]
        areas.append((x2 - x1) * (y2 - y1) / (image.shape[0] * image.shape[1]))
        ratios.append((x2 - x1) / (y2 - y1))
    assert min(areas) > 0.23 and max(areas) < 0.53 and abs(np.mean(areas) - 0.375) < 0.02
    assert min(ratios) > 0.72 and max(ratios) < 1.4 and abs(np.mean(np.log(ratios))) < 0.05


@pytest.mark.parametrize("side", [40, 160])
def test_resizing_is_close_to_pil(side):
    """Shrinking and enlarging of a smooth image, against PIL's antialiased bicubic."""
    y, x = np.mgrid[:80, :80]
    smooth = np.stack([127 + 100 * np.sin(x / f) * np.cos(y / f) for f in (9, 13, 17)], -1).astype(np.uint8)
    crop = A.RandomResizedCrop((side, side), (1.0, 1.0), (1.0, 1.0), BICUBIC, area_for_downscale="image")
    ours = crop(image=smooth)["image"].astype(int)
    pil = np.asarray(Image.fromarray(smooth).resize((side, side), Image.BICUBIC)).astype(int)
    assert np.abs(ours - pil).mean() < 1.0


def test_shrinking_does_not_alias():
    """A pixel-wise checkerboard shrinks to grey, where cv2's cubic keeps full contrast."""
    board = (np.indices((120, 120)).sum(0) % 2 * 255).astype(np.uint8)[..., None].repeat(3, -1)
    crop = A.RandomResizedCrop((40, 40), (1.0, 1.0), (1.0, 1.0), BICUBIC, area_for_downscale="image")
    assert crop(image=board)["image"].std() < 20


def test_probe_crop(image):
    crop = ProbeCrop(20)
    assert crop(image, 0, 0, 0).shape == (3, 20, 20)
    assert np.array_equal(crop(image, 0, 0, 7), ProbeCrop(20)(image, 0, 0, 7))
