"""Each operation against PIL's or torchvision's for fixed parameters, pixel by pixel."""

import numpy as np
import pytest
import torchvision.transforms.functional as TF
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from datamodules import pixel_ops


def smooth():
    y, x = np.mgrid[:150, :200]
    base = np.stack([127 + 130 * np.sin(x / f) * np.cos(y / f) for f in (7, 11, 19)], -1)
    return np.clip(base + np.random.default_rng(0).normal(0, 5, base.shape), 0, 255).astype(np.uint8)


IMAGES = {
    "smooth": smooth(),
    "noise": np.random.default_rng(1).integers(0, 256, (150, 200, 3), dtype=np.uint8),
    "one colour": np.full((33, 47, 3), (250, 3, 128), np.uint8),
}


@pytest.fixture(params=IMAGES)
def image(request):
    return IMAGES[request.param]


def close(ours, pil, most, mean=None):
    """Within ``most`` everywhere, ``mean`` on average, and without a shift of the brightness."""
    ours, pil = ours.astype(int), np.asarray(pil).astype(int)
    assert ours.shape == pil.shape
    error = np.abs(ours - pil)
    assert error.max() <= most, error.max()
    assert mean is None or error.mean() <= mean, error.mean()
    assert mean is None or abs((ours - pil).mean()) <= 0.7


@pytest.mark.parametrize("factor", [0.0, 0.6, 0.77, 1.0, 1.23, 1.4])
def test_brightness_contrast_saturation(image, factor):
    pil = Image.fromarray(image)
    close(pixel_ops.brightness(image, factor), ImageEnhance.Brightness(pil).enhance(factor), 0)
    close(pixel_ops.contrast(image, factor), ImageEnhance.Contrast(pil).enhance(factor), 1)
    close(pixel_ops.saturation(image, factor), ImageEnhance.Color(pil).enhance(factor), 1)


@pytest.mark.parametrize("shift", [-0.5, -0.1, -0.03, 0.0, 0.05, 0.1, 0.5])
def test_hue(image, shift):
    """Both go through 8-bit HSV; PIL truncates there, so it may be further from the exact colour than ours."""
    close(
        pixel_ops.hue(image, shift), TF.adjust_hue(Image.fromarray(image), shift), 14, None if len(image) == 33 else 1.3
    )


def test_hue_is_as_near_to_the_exact_one_as_torchvisions():
    image = IMAGES["smooth"]
    exact = TF.adjust_hue(TF.to_tensor(image).double(), 0.05).permute(1, 2, 0).numpy() * 255
    ours = np.abs(pixel_ops.hue(image, 0.05) - exact).mean()
    assert ours < np.abs(np.asarray(TF.adjust_hue(Image.fromarray(image), 0.05)) - exact).mean() < 2


def test_gray(image):
    close(pixel_ops.gray(image), Image.fromarray(image).convert("L"), 1, 0.01)


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.5, 0.9, 1.4, 2.0])
def test_blur(image, sigma):
    """PIL repeats the edge before each of its six passes, ours before both: they differ within reach of the edge."""
    ours = pixel_ops.gaussian_blur(image, sigma)
    pil = np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(sigma)))
    close(ours[7:-7, 7:-7], pil[7:-7, 7:-7], 4, 1.0)
    close(ours, pil, 40, 1.0)


def test_blur_has_the_asked_for_width_and_keeps_the_mean():
    for sigma in np.linspace(0.1, 2, 30):
        kernel = pixel_ops.blur_kernel(round(float(sigma), 2)).astype(float)
        at = np.arange(len(kernel)) - len(kernel) // 2
        assert kernel.sum() == 1 and np.array_equal(kernel, kernel[::-1]) and kernel.min() >= 0
        assert abs(np.sqrt((kernel * at**2).sum()) - sigma) < 0.05
    flat = np.full((40, 40, 3), 201, np.uint8)
    assert np.array_equal(pixel_ops.gaussian_blur(flat, 1.7), flat)
    grey = pixel_ops.gray(IMAGES["noise"])
    assert np.array_equal(
        pixel_ops.gaussian_blur(grey.repeat(3).reshape(150, 200, 3), 1.1)[..., 0], pixel_ops.gaussian_blur(grey, 1.1)
    )


def test_solarize():
    values = np.arange(256, dtype=np.uint8).reshape(16, 16)
    assert np.array_equal(pixel_ops.solarize(values), np.asarray(ImageOps.solarize(Image.fromarray(values), 128)))


@pytest.mark.parametrize(
    ("box", "size"),
    [((3, 5, 150, 120), 96), ((0, 0, 200, 150), 224), ((0, 0, 200, 150), 7), ((17, 2, 31, 29), 96), ((4, 4, 1, 1), 5), ((0, 0, 199, 1), 16)],
)  # fmt: skip
def test_resized_crop(box, size):
    for image in (IMAGES["smooth"], IMAGES["noise"]):
        left, top, width, height = box
        pil = Image.fromarray(image).crop((left, top, left + width, top + height)).resize((size, size), Image.BICUBIC)
        ours = pixel_ops.resized_crop(image, box, size)
        close(ours, pil, 1 + (size > width), 0.02)
        assert ours.flags["C_CONTIGUOUS"] and ours.dtype == np.uint8


def test_resized_crop_of_a_view_of_an_image():
    """A box of a box, with rows that do not follow one another."""
    part = IMAGES["noise"][10:100, 20:150]
    assert np.array_equal(
        pixel_ops.resized_crop(part, (5, 7, 60, 50), 24), pixel_ops.resized_crop(part.copy(), (5, 7, 60, 50), 24)
    )
