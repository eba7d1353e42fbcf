"""Multi-crop: what is drawn, with the reference's distributions, and what becomes of the pixels, against PIL."""

import io
import random

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as TF
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from scipy import stats
from torchvision.transforms import ColorJitter, RandomResizedCrop

from datamodules.buffers import rows_of
from datamodules.decoding import EncodedImage
from datamodules.multicrop import MultiCrop, MultiCropConfig, render_in_python
from datamodules.sample_seed import SampleKey, SampleSeed
from datamodules.samples import RawSample
from datamodules.transforms import MultiCropTransform, ProbeTransform
from datamodules.views import renderer

WIDTH, HEIGHT, SAMPLES = 500, 375, 3000


@pytest.fixture(scope="module")
def image():
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:90, :120]
    base = np.stack([127 + 100 * np.sin(x / f) * np.cos(y / f) for f in (7, 11, 19)], -1)
    return np.clip(base + rng.normal(0, 5, base.shape), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def drawn():
    """[sample][view]"""
    crops = MultiCrop(MultiCropConfig())
    return [crops.draw(WIDTH, HEIGHT, 0, 0, index) for index in range(SAMPLES)]


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


def same_distribution(ours, theirs):
    return stats.ks_2samp(ours, theirs).pvalue > 0.001


@pytest.mark.parametrize(("width", "height"), [(WIDTH, HEIGHT), (60, 600), (600, 60), (9, 7)])
@pytest.mark.parametrize("view", [0, 2])
def test_boxes_are_torchvisions(width, height, view):
    """Extreme ratios too, where no try fits and the middle is taken."""
    torch.manual_seed(0)
    crops = MultiCrop(MultiCropConfig())
    boxes = np.array([crops.draw(width, height, 0, 0, i)[view].box for i in range(SAMPLES)])
    blank, scale = torch.empty(3, height, width), list(crops.kinds[view].scale)
    theirs = np.array([RandomResizedCrop.get_params(blank, scale, [3 / 4, 4 / 3]) for _ in range(SAMPLES)])[
        :, [1, 0, 3, 2]
    ]
    assert (
        (boxes[:, :2] >= 0).all()
        and (boxes[:, 0] + boxes[:, 2] <= width).all()
        and (boxes[:, 1] + boxes[:, 3] <= height).all()
    )
    for ours, reference in ((boxes[:, i], theirs[:, i]) for i in range(4)):
        assert same_distribution(ours, reference)
    assert same_distribution(boxes[:, 2] * boxes[:, 3], theirs[:, 2] * theirs[:, 3])
    assert same_distribution(boxes[:, 2] / boxes[:, 3], theirs[:, 2] / theirs[:, 3])


def test_jitter_is_torchvisions(drawn):
    torch.manual_seed(0)
    jittered = [views[3].jitter for views in drawn if views[3].jitter]
    theirs = [ColorJitter.get_params((0.6, 1.4), (0.6, 1.4), (0.8, 1.2), (-0.1, 0.1)) for _ in range(SAMPLES)]
    for which in range(4):
        ours = [dict(jitter)[which] for jitter in jittered]
        assert same_distribution(ours, [t[1 + which] for t in theirs])
    orders = [tuple(which for which, _ in jitter) for jitter in jittered]
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24 and stats.chisquare(counts).pvalue > 0.001


def test_probabilities(drawn):
    """Of each kind of view, and independent of one another."""
    happened = {
        "jitter": lambda p: bool(p.jitter),
        "gray": lambda p: p.gray,
        "blur": lambda p: p.sigma is not None,
        "solarize": lambda p: p.solarize,
        "flip": lambda p: p.flip,
    }
    expected = {  # first global, second global, local
        "jitter": (0.8, 0.8, 0.8),
        "gray": (0.2, 0.2, 0.2),
        "blur": (1.0, 0.1, 0.5),
        "solarize": (0.0, 0.2, 0.0),
        "flip": (0.5, 0.5, 0.5),
    }
    for column, view in enumerate((0, 1, 5)):
        found = np.array([[happened[name](views[view]) for name in happened] for views in drawn], float)
        for share, wanted in zip(found.mean(0), (expected[name][column] for name in happened), strict=True):
            assert abs(share - wanted) <= 4 * np.sqrt(wanted * (1 - wanted) / SAMPLES)
        varied = found[:, found.std(0) > 0]
        assert np.abs(np.corrcoef(varied.T) - np.eye(varied.shape[1])).max() < 0.08
    flips = np.array([[p.flip for p in views] for views in drawn], float)
    assert np.abs(np.corrcoef(flips.T) - np.eye(10)).max() < 0.08  # and of the other views
    sigmas = [views[0].sigma for views in drawn]
    assert stats.kstest(sigmas, stats.uniform(0.1, 1.9).cdf).pvalue > 0.001


def by_pil(image, size, p):
    """A view as PIL and torchvision make it."""
    left, top, width, height = p.box
    view = Image.fromarray(image).crop((left, top, left + width, top + height))
    view = view.resize((size, height), Image.BICUBIC).resize((size, size), Image.BICUBIC)  # in this order in any Pillow
    view = TF.hflip(view) if p.flip else view
    for which, factor in p.jitter:
        if which < 3:
            view = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[which](view).enhance(factor)
        else:
            view = TF.adjust_hue(view, factor)
    view = TF.to_grayscale(view, 3) if p.gray else view
    view = view if p.sigma is None else view.filter(ImageFilter.GaussianBlur(p.sigma))
    return np.asarray(ImageOps.solarize(view, 128) if p.solarize else view).transpose(2, 0, 1).astype(int)


@pytest.mark.skipif(renderer() is None, reason="no C compiler")
def test_whole_views_are_pils(image):
    crops = MultiCrop(MultiCropConfig(global_size=64, local_size=28))
    seen = set()
    for index in range(60):
        drawn = crops.draw(120, 90, 0, 0, index)
        for kind, p, ours in zip(crops.kinds, drawn, crops(image, 0, 0, index), strict=True):
            assert np.array_equal(ours, by_pil(image, kind.size, p))
            seen.add((bool(p.jitter), p.gray, p.sigma is not None, p.solarize, p.flip))
    assert len(seen) > 20


def test_whole_views_in_python_are_near_to_pils(image):
    """The mean error of a view is that of a hue by 8 bits; solarising turns a value about the threshold over."""
    crops = MultiCrop(MultiCropConfig(global_size=64, local_size=28))
    errors = []
    for index in range(60):
        drawn = crops.draw(120, 90, 0, 0, index)
        out = [np.empty((3, kind.size, kind.size), np.uint8) for kind in crops.kinds]
        render_in_python(image, drawn, out)
        for kind, p, ours in zip(crops.kinds, drawn, out, strict=True):
            error = np.abs(ours - by_pil(image, kind.size, p))
            if p.solarize:
                error = np.minimum(error, np.abs(255 - ours - by_pil(image, kind.size, p)))
            errors.append(error.mean())
            assert error.mean() < 3.5 and np.quantile(error, 0.99) <= 14
    assert np.mean(errors) < 0.8


def test_only_what_was_asked_for(image):
    """With all probabilities 0 a view is the resized crop."""
    off = {"flip_prob": 0.0, "jitter_prob": 0.0, "gray_prob": 0.0, "blur_probs": (0.0, 0.0, 0.0), "solarize_prob": 0.0}
    crops = MultiCrop(MultiCropConfig(global_size=32, local_size=16, num_local=1, **off))
    for kind, p, ours in zip(crops.kinds, crops.draw(120, 90, 0, 0, 0), crops(image, 0, 0, 0), strict=True):
        assert np.abs(ours - by_pil(image, kind.size, p)).max() <= 1


def photograph(width, height):
    """Something with edges and fine grain."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:height, :width]
    base = np.stack([127 + 90 * np.sign(np.sin(x / f) * np.cos(y / f)) for f in (47, 91, 133)], -1)
    file = io.BytesIO()
    Image.fromarray(np.clip(base + rng.normal(0, 8, base.shape), 0, 255).astype(np.uint8)).save(
        file, "JPEG", quality=92
    )
    return file.getvalue()


def test_a_large_jpeg_is_decoded_smaller():
    """Only where all views still shrink by two; a box then has corners on the small image's pixels."""
    off = {"flip_prob": 0.0, "jitter_prob": 0.0, "gray_prob": 0.0, "blur_probs": (0.0, 0.0, 0.0), "solarize_prob": 0.0}
    crops = MultiCrop(MultiCropConfig(global_size=64, local_size=32, **off))
    encoded, reductions = EncodedImage(photograph(1200, 800), "it"), []
    whole = encoded.pixels()
    for index in range(25):
        drawn = crops.draw(*encoded.size, 0, 0, index)
        reduction = crops.reduction(drawn)
        reductions.append(reduction)
        out = [np.empty((3, kind.size, kind.size), np.uint8) for kind in crops.kinds]
        crops.render(encoded.pixels(reduction), encoded.size, drawn, out)
        for kind, p, small in zip(crops.kinds, drawn, out, strict=True):
            assert min(p.box[2:]) / reduction >= 2 * kind.size or reduction == 1
            left, top, width, height = p.box
            corners = [reduction * round(v / reduction) for v in (left, top, left + width, top + height)]
            box = (*corners[:2], corners[2] - corners[0], corners[3] - corners[1])
            assert max(abs(a - b) for a, b in zip(box, p.box, strict=True)) <= reduction
            assert np.abs(small - by_pil(whole, kind.size, p._replace(box=box))).mean() < 1
    assert {2, 4} <= set(reductions)
    usual = MultiCrop(MultiCropConfig())
    assert all(usual.reduction(usual.draw(WIDTH, HEIGHT, 0, 0, index)) == 1 for index in range(50))


def test_a_batch_is_written_where_it_stays(image):
    """One piece of memory for all views of a batch, and the same pixels as from the views alone."""
    config = MultiCropConfig(global_size=16, local_size=8, num_local=2)
    transform, file = MultiCropTransform(config), io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    raw, buffers = RawSample("s", "k", {"png": file.getvalue(), "cls": b"7"}), transform.allocate(3)
    samples = [transform(raw, SampleKey(0, 0, i), rows_of(buffers, i)) for i in range(3)]
    assert len({t.untyped_storage().data_ptr() for t in buffers["crops"]}) == 1
    assert transform.collate(samples)["label"].tolist() == [7, 7, 7]
    for index in range(3):
        for batch, alone in zip(buffers["crops"], MultiCrop(config)(image, 0, 0, index), strict=True):
            assert np.array_equal(batch[index].numpy(), alone)


def test_probe_crop(image):
    out, again = np.empty((3, 20, 20), np.uint8), np.empty((3, 20, 20), np.uint8)
    crop = ProbeTransform(20).crop
    crop(image, SampleKey(0, 0, 0), out)
    crop(image, SampleKey(0, 0, 7), out)
    ProbeTransform(20).crop(image, SampleKey(0, 0, 7), again)
    assert np.array_equal(out, again)
    board = (np.indices((120, 120)).sum(0) % 2 * 255).astype(np.uint8)[..., None].repeat(3, -1)
    ProbeTransform(20, (0.9, 1.0)).crop(board, SampleKey(0, 0, 0), out)
    assert out.std() < 20  # it shrinks to grey, where cv2's bilinear keeps the contrast
