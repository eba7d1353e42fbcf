"""Binary-AUC against sklearn, and its behaviour over batches and processes."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from sklearn.metrics import roc_curve as sklearn_roc_curve

from metrics import BinaryAUC, binary_auc, masks_to_grid, position_map, roc_curve
from tests.processes import run_ranks

IGNORED = 1000


def sklearn_auc(scores, masks):
    out = np.full(scores.shape[:2], np.nan)
    for b in range(len(scores)):
        mask = masks[b].flatten().numpy()
        kept = mask != IGNORED
        target = mask[kept] != 0
        for k in range(scores.shape[1]):
            if 0 < target.sum() < len(target):
                out[b, k] = roc_auc_score(target, scores[b, k].flatten().numpy()[kept])
    return torch.from_numpy(out)


def make(kind, b=7, k=3, h=9, w=13, seed=0):
    g = torch.Generator().manual_seed(seed)
    masks = torch.tensor([0, 0, 3, 7, IGNORED])[torch.randint(0, 5, (b, h, w), generator=g)]
    noise = torch.randn(b, k, h, w, generator=g, dtype=torch.float64)
    scores = {
        "random": noise,
        "float32": noise.float(),
        "tied": (noise * 2).round(),
        "constant": torch.zeros_like(noise),
        "tiny": noise * 1e-300,
        "large": noise * 1e300,
        "separated": noise.abs() * (masks != 0)[:, None] + (masks != 0)[:, None],
    }[kind]
    return scores, masks


@pytest.mark.parametrize("kind", ["random", "float32", "tied", "constant", "tiny", "large", "separated"])
def test_equals_sklearn(kind):
    scores, masks = make(kind)
    torch.testing.assert_close(binary_auc(scores, masks), sklearn_auc(scores, masks), atol=1e-12, rtol=0)


@pytest.mark.parametrize("size", [(1, 2), (2, 1), (1, 1), (14, 14), (61, 3)])
def test_odd_grids(size):
    scores, masks = make("tied", b=20, h=size[0], w=size[1], seed=3)
    torch.testing.assert_close(
        binary_auc(scores, masks), sklearn_auc(scores, masks), atol=1e-12, rtol=0, equal_nan=True
    )


def test_one_class_is_nan_and_infinities_are_ordered():
    scores = torch.tensor([-torch.inf, 0.0, 1.0, torch.inf]).view(1, 1, 2, 2)
    assert binary_auc(scores, torch.tensor([[[0, 0], [5, 5]]])).item() == 1.0
    assert binary_auc(scores, torch.tensor([[[0, 0], [0, 0]]])).isnan()
    assert binary_auc(scores, torch.tensor([[[2, 2], [2, IGNORED]]])).isnan()
    assert binary_auc(scores, torch.tensor([[[9, 9], [9, 0]]]), ignore_index=9).isnan()


def test_errors():
    scores, masks = make("random")
    scores[2, 1, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="image 2, map 1"):
        binary_auc(scores, masks)
    with pytest.raises(ValueError, match="integer masks"):
        binary_auc(scores.nan_to_num(), masks.float())
    with pytest.raises(ValueError, match=r"\(B,K,h,w\)"):
        binary_auc(scores[0], masks)
    with pytest.raises(ValueError, match="num_maps=2"):
        BinaryAUC(2).update(scores.nan_to_num(), masks)


def test_masks_go_to_the_grid_by_cell_centres():
    masks = torch.arange(6 * 9).view(1, 6, 9)
    assert masks_to_grid(masks, (2, 3)).tolist() == [[[10, 13, 16], [37, 40, 43]]]
    blocks = torch.randint(0, 1001, (2, 4, 5))
    large = blocks.repeat_interleave(16, 1).repeat_interleave(16, 2)
    assert torch.equal(masks_to_grid(large, (4, 5)), blocks)
    scores = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(binary_auc(scores, large), binary_auc(scores, blocks), equal_nan=True)


def test_a_cell_by_its_area():
    masks = torch.zeros(1, 4, 4, dtype=torch.int64)
    masks[0, :2, :2] = torch.tensor([[5, 5], [0, 0]])  # half of a cell: foreground
    masks[0, :2, 2:] = torch.tensor([[0, 0], [0, 5]])  # a quarter; but the nearest pixel is foreground
    masks[0, 2:, :2] = torch.tensor([[IGNORED, IGNORED], [IGNORED, 7]])  # of what takes part, all
    masks[0, 2:, 2:] = IGNORED
    scores = torch.tensor([[[[2.0, 1.0], [0.0, 9.0]]]])
    # foreground 2 and 0 against background 1; the last cell takes no part
    assert binary_auc(scores, masks, compare="area").item() == 0.5
    grid = masks_to_grid(masks, (2, 2))
    assert grid.tolist() == [[[0, 5], [7, IGNORED]]] and binary_auc(scores, masks).item() == 0
    fine = torch.randint(0, 2, (3, 5, 7))
    maps = torch.randn(3, 2, 5, 7)
    assert torch.equal(binary_auc(maps, fine, compare="area"), binary_auc(maps, fine))


def test_a_map_as_large_as_the_mask():
    scores, masks = make("random", h=5, w=7)
    _, large = make("random", h=23, w=19, seed=2)
    upsampled = torch.nn.functional.interpolate(scores, size=(23, 19), mode="bilinear", align_corners=False)
    torch.testing.assert_close(
        binary_auc(scores, large, compare="mask"), sklearn_auc(upsampled, large), atol=1e-12, rtol=0
    )
    with pytest.raises(ValueError, match="compare='pixel'; allowed: grid, area, mask"):
        binary_auc(scores, masks, compare="pixel")


def test_position_alone():
    found = position_map((3, 4))
    assert found.shape == (3, 4) and found.argmax() in (5, 6) and found[1, 1] == found[1, 2] == -0.5
    assert found[0, 0] == found.min() == -np.hypot(1, 1.5)


def dataset():
    scores, masks = make("tied", b=23, seed=5)
    masks[4] = 0  # one class: skipped
    masks[9] = 3
    return scores, masks


def test_batching_does_not_matter():
    scores, masks = dataset()
    results = []
    for sizes in ([23], [1] * 23, [5, 17, 1]):
        metric = BinaryAUC(3)
        for s, m in zip(scores.split(sizes), masks.split(sizes), strict=True):
            metric.update(s, m)
        results.append(metric.compute())
    reference = sklearn_auc(scores, masks)
    scored = reference[~reference[:, 0].isnan()]
    for result in results:
        assert result["images"] == len(scored) == 21 and result["skipped"] == 2
        torch.testing.assert_close(result["auc"], scored.mean(0), atol=1e-12, rtol=0)
        folded = torch.maximum(scored, 1 - scored)
        torch.testing.assert_close(result["auc_normalized"], folded.mean(0), atol=1e-12, rtol=0)
        mean = scored.mean(0)
        torch.testing.assert_close(result["auc_of_mean_normalized"], torch.maximum(mean, 1 - mean), atol=1e-12, rtol=0)


def brought(scores, masks, compare):
    """Scores and masks where they meet, by numpy and a loop over cells."""
    if compare == "mask":
        return torch.nn.functional.interpolate(
            scores, size=masks.shape[-2:], mode="bilinear", align_corners=False
        ), masks
    h, w = scores.shape[-2:]
    down, across = masks.shape[1] // h, masks.shape[2] // w  # odd: the middle pixel is the nearest
    cells = masks.numpy().reshape(len(masks), h, down, w, across).swapaxes(2, 3).reshape(len(masks), h, w, -1)
    if compare == "grid":
        return scores, torch.from_numpy(cells[..., down * across // 2].copy())
    counted, foreground = (cells != IGNORED).sum(-1), ((cells != 0) & (cells != IGNORED)).sum(-1)
    return scores, torch.from_numpy(np.where(counted == 0, IGNORED, 2 * foreground >= counted).astype(np.int64))


@pytest.mark.parametrize("compare", ["grid", "area", "mask"])
def test_every_way_is_sklearns_on_every_image(compare):
    scores, _ = make("random", b=11, h=3, w=5)
    _, masks = make("random", b=11, h=9, w=15, seed=4)
    masks[2, :6] = IGNORED  # whole cells that take no part
    masks[5] = masks[7] = 0
    masks[7, 0, 0] = 3  # one pixel, no nearest to a cell's centre
    wanted = sklearn_auc(*brought(scores, masks, compare))
    metric, found = BinaryAUC(3, compare=compare), []
    for s, m in zip(scores.split([1, 6, 4]), masks.split([1, 6, 4]), strict=True):
        metric.update(s, m)
        found.append(metric.last)
    torch.testing.assert_close(torch.cat(found), wanted, atol=1e-12, rtol=0, equal_nan=True)
    result, scored = metric.compute(), wanted[~wanted[:, 0].isnan()]
    assert result["images"] == len(scored) == (10 if compare == "mask" else 9) and result["skipped"] == 11 - len(scored)
    torch.testing.assert_close(result["auc"], scored.mean(0), atol=1e-12, rtol=0)


def test_nothing_scored_is_nan():
    metric = BinaryAUC(2)
    metric.update(torch.randn(3, 2, 4, 4), torch.zeros(3, 8, 8, dtype=torch.int32))
    result = metric.compute()
    assert result["auc"].isnan().all() and result["images"] == 0 and result["skipped"] == 3


def test_random_maps_score_one_half():
    g = torch.Generator().manual_seed(0)
    metric = BinaryAUC(1)
    masks = torch.zeros(4000, 8, 8, dtype=torch.int64)
    masks[:, 2:6, 2:6] = 1
    metric.update(torch.randn(4000, 1, 8, 8, generator=g), masks)
    result = metric.compute()
    assert abs(result["auc"].item() - 0.5) < 0.005
    assert result["auc_normalized"].item() > 0.55  # why the per-image form needs its control beside it


def _rank(rank, parts):
    metric = BinaryAUC(3)
    scores, masks = dataset()
    start = sum(parts[:rank])
    if parts[rank]:
        metric.update(scores[start : start + parts[rank]], masks[start : start + parts[rank]])
    return {k: v.tolist() for k, v in metric.compute().items()}


def test_uneven_and_empty_ranks():
    alone = BinaryAUC(3)
    alone.update(*dataset())
    for result in run_ranks(_rank, 3, [20, 3, 0]):
        for name, value in alone.compute().items():
            np.testing.assert_allclose(result[name], value.tolist(), atol=1e-12)


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_roc_curve_is_sklearns(levels):
    rng = np.random.default_rng(levels)
    scores, positive = rng.integers(0, levels, 200) / 7.0, rng.random(200) < 0.3
    fpr, tpr = roc_curve(scores, positive)
    wanted = sklearn_roc_curve(positive, scores, drop_intermediate=False)
    np.testing.assert_allclose(fpr, wanted[0], atol=1e-15)
    np.testing.assert_allclose(tpr, wanted[1], atol=1e-15)
    assert np.trapezoid(tpr, fpr) == pytest.approx(roc_auc_score(positive, scores), abs=1e-12)
