"""views.c against PIL and torchvision: equal, to the bit."""

import numpy as np
import pytest
import torchvision.transforms.functional as TF
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from datamodules.views import ViewParameters, renderer
from tests.datamodules.test_pixel_ops import IMAGES as PIXELS

render = renderer()
pytestmark = pytest.mark.skipif(render is None, reason="no C compiler")
PLAIN = ViewParameters((0, 0, 1, 1), (), False, None, False, False)


IMAGES = {
    "smooth": PIXELS["smooth"],
    "noise": PIXELS["noise"],
    "extremes": np.random.default_rng(2).choice(np.array([0, 255], np.uint8), (150, 200, 3)),
    "one colour": np.full((150, 200, 3), (250, 3, 128), np.uint8),
}


@pytest.fixture(params=IMAGES)
def image(request):
    return IMAGES[request.param]


def resized(pil, size):
    """Width before height: Pillow up to 12 does so for all images, later ones for most."""
    return pil.resize((size, pil.height), Image.BICUBIC).resize((size, size), Image.BICUBIC)


def view(image, size, **what):
    """(size, size, 3); the planes stand in memory that must otherwise stay as it is."""
    room = np.full((5, size * size), 77, np.uint8)
    planes = room[1:4].reshape(3, size, size)
    render(image, [PLAIN._replace(**what)], [planes])
    assert (room[[0, 4]] == 77).all()
    return planes.transpose(1, 2, 0)


def whole(image, **what):
    """Of a square piece in its own size, so that nothing but ``what`` is done."""
    return view(image, 131, box=(3, 5, 131, 131), **what), Image.fromarray(image[5:136, 3:134])


@pytest.mark.parametrize(
    ("box", "size"),
    [
        ((3, 5, 150, 120), 96), ((0, 0, 200, 150), 224), ((0, 0, 200, 150), 7), ((17, 2, 31, 29), 96), ((4, 4, 1, 1), 5),
        ((0, 0, 199, 1), 16), ((199, 149, 1, 1), 1), ((0, 0, 1, 150), 33), ((61, 20, 139, 130), 48), ((0, 0, 17, 16), 17),
    ],
)  # fmt: skip
def test_resized_crop(image, box, size):
    left, top, width, height = box
    pil = resized(Image.fromarray(image).crop((left, top, left + width, top + height)), size)
    assert np.array_equal(view(image, size, box=box), np.asarray(pil))


def test_random_boxes_and_sizes():
    rng = np.random.default_rng(0)
    for _ in range(200):
        width, height, size = int(rng.integers(1, 201)), int(rng.integers(1, 151)), int(rng.integers(1, 120))
        left, top = int(rng.integers(0, 201 - width)), int(rng.integers(0, 151 - height))
        cut = IMAGES["noise"][top : top + height, left : left + width]
        pil = resized(Image.fromarray(cut), size)
        assert np.array_equal(view(IMAGES["noise"], size, box=(left, top, width, height)), np.asarray(pil))


def test_rows_that_do_not_follow_one_another():
    part = IMAGES["noise"][10:100, 20:150]
    pil = resized(Image.fromarray(part[7:57, 5:65]), 24)
    assert np.array_equal(view(part, 24, box=(5, 7, 60, 50)), np.asarray(pil))


@pytest.mark.parametrize("factor", [0.0, 0.6, 0.77, 1.0, 1.23, 1.4, 3.7])
@pytest.mark.parametrize("which", range(3))
def test_brightness_contrast_saturation(image, which, factor):
    ours, pil = whole(image, jitter=((which, factor),))
    enhancer = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[which]
    assert np.array_equal(ours, np.asarray(enhancer(pil).enhance(factor)))


@pytest.mark.parametrize("shift", [-0.5, -0.1, -0.03, 0.0, 0.05, 0.1, 0.5])
def test_hue(image, shift):
    ours, pil = whole(image, jitter=((3, shift),))
    assert np.array_equal(ours, np.asarray(TF.adjust_hue(pil, shift)))


@pytest.mark.parametrize("shift", [0.0, 0.0423])
def test_hue_of_all_colours(shift):
    levels = np.arange(256, dtype=np.uint8)
    for reds in np.split(levels, 4):
        colours = np.stack(np.meshgrid(reds, levels, levels, indexing="ij"), -1).reshape(2048, 2048, 3)
        ours = view(colours, 2048, box=(0, 0, 2048, 2048), jitter=((3, shift),))
        assert np.array_equal(ours, np.asarray(TF.adjust_hue(Image.fromarray(colours), shift)))


@pytest.mark.parametrize("sigma", [0.0, 0.1, 0.3, 0.5, 0.9, 1.4, 2.0, 3.3, 20.0])
@pytest.mark.parametrize("gray", [False, True])
def test_blur(image, sigma, gray):
    ours, pil = whole(image, sigma=sigma, gray=gray)
    pil = (pil.convert("L").convert("RGB") if gray else pil).filter(ImageFilter.GaussianBlur(sigma))
    assert np.array_equal(ours, np.asarray(pil))


def test_gray_solarize_flip(image):
    ours, pil = whole(image, gray=True)
    assert np.array_equal(ours, np.asarray(pil.convert("L").convert("RGB")))
    ours, pil = whole(image, solarize=True, flip=True)
    assert np.array_equal(ours, np.asarray(TF.hflip(ImageOps.solarize(pil, 128))))


def test_a_wrong_image_is_refused():
    with pytest.raises(ValueError, match=r"\(H, W, 3\) uint8.*float32"):
        view(IMAGES["noise"].astype(np.float32), 8, box=(0, 0, 8, 8))
    with pytest.raises(ValueError, match="dense rows"):
        view(IMAGES["noise"][:, ::2], 8, box=(0, 0, 8, 8))
