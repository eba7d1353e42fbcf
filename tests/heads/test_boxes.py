"""Arithmetic of boxes, masks and their features against torchvision, torch and loops."""

import math

import pytest
import torch
import torchvision

from heads.boxes import LARGEST_LOG_RATIO, DeltaCoder, assign, clip, grouped_nms, iou, sample, smooth_l1
from heads.mask_head import mask_targets, paste_masks
from heads.roi_align import roi_features
from tests.heads.scenes import PADDED, STRIDES, boxes_of, levels_of, truth_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_iou_is_torchvisions():
    a, b = boxes_of(13, 1), boxes_of(7, 2)
    torch.testing.assert_close(iou(a, b), torchvision.ops.box_iou(a, b))
    flat = torch.tensor([[3.0, 3.0, 3.0, 9.0]])
    assert iou(flat, flat).item() == 0


@pytest.mark.parametrize("stds", [(1.0, 1.0, 1.0, 1.0), (0.1, 0.1, 0.2, 0.2)])
def test_decoding_undoes_encoding(stds):
    boxes, truth, coder = boxes_of(31, 1), boxes_of(31, 2), DeltaCoder(stds)
    deltas = coder.encode(boxes, truth)
    torch.testing.assert_close(coder.decode(boxes, deltas), truth, atol=1e-4, rtol=1e-5)
    theirs = torchvision.models.detection._utils.BoxCoder([1 / s for s in stds])
    torch.testing.assert_close(deltas, theirs.encode([truth], [boxes])[0], atol=1e-5, rtol=1e-5)
    several = coder.decode(boxes, deltas.repeat(1, 3))
    assert torch.equal(several.unflatten(1, (3, 4)), coder.decode(boxes, deltas)[:, None].expand(-1, 3, -1))


def test_ratios_are_clamped_both_ways():
    box = torch.tensor([[10.0, 10.0, 20.0, 30.0]])
    found = DeltaCoder().decode(box, torch.tensor([[0.0, 0.0, 9.0, -9.0]]))[0]
    assert math.log(((found[2] - found[0]) / 10).item()) == pytest.approx(LARGEST_LOG_RATIO, rel=1e-5)
    assert math.log(((found[3] - found[1]) / 20).item()) == pytest.approx(-LARGEST_LOG_RATIO, rel=1e-4)


def test_assignment_by_loops():
    boxes, truth = boxes_of(150, 3), boxes_of(9, 4)
    boxes = torch.cat([boxes, boxes[:40]])  # ties
    overlaps, expected = torchvision.ops.box_iou(boxes, truth), []
    for row in overlaps:
        expected.append(int(row.argmax()) + 1 if row.max() >= 0.4 else 0 if row.max() < 0.2 else -1)
    for k in range(len(truth)):
        if overlaps[:, k].max() >= 0.25:
            for i in torch.nonzero(overlaps[:, k] == overlaps[:, k].max())[:, 0].tolist():
                expected[i] = k + 1
    assert assign(boxes, truth, 0.4, 0.2, 0.25).tolist() == expected
    assert {-1, 0} < set(expected)
    assert assign(boxes, truth[:0], 0.4, 0.2, 0.25).tolist() == [0] * len(boxes)
    assert assign(boxes[:0], truth, 0.4, 0.2, 0.25).tolist() == []


def test_sampling():
    assigned = torch.tensor([1, 0, -1, 2, 0, -2, 3, 0, 0, 1])
    positive, background = sample(assigned, 100, 0.5)
    assert (positive.tolist(), background.tolist()) == ([0, 3, 6, 9], [1, 4, 7, 8])
    draws = [sample(assigned, 5, 0.5, torch.Generator().manual_seed(s)) for s in range(40)]
    for positive, background in draws:
        assert len(positive) == 2 and len(background) == 3
        assert (assigned[positive] > 0).all() and (assigned[background] == 0).all()
        assert positive.tolist() == sorted(set(positive.tolist()))
    assert set(torch.cat([p for p, _ in draws]).tolist()) == {0, 3, 6, 9}  # every one has its chance
    again = sample(assigned, 5, 0.5, torch.Generator().manual_seed(3))
    assert all(torch.equal(a, b) for a, b in zip(again, draws[3], strict=True))
    assert len(sample(assigned, 6, 0.01)[0]) == 0
    assert len(sample(assigned, 6, 0.01)[1]) == 4


def test_suppression_is_strict_and_within_groups():
    boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 7.0], [0.0, 0.0, 10.0, 6.9], [0.0, 0.0, 10.0, 10.0]])
    scores, groups = torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([0, 0, 0, 1])
    assert iou(boxes[:1], boxes[1:2]).item() == pytest.approx(0.7)
    assert grouped_nms(boxes, scores, groups, 0.7).tolist() == [0, 1, 3]
    moved = boxes + 1000
    for group in (0, 79):
        assert grouped_nms(moved, scores, torch.full((4,), group), 0.7).tolist() == [0, 1]
    some, score, group = (
        boxes_of(200, 5) - 20,
        torch.rand(200, generator=torch.Generator().manual_seed(0)),
        torch.arange(200) % 5,
    )
    one_by_one = torch.cat(
        [
            torch.nonzero(group == k)[:, 0][torchvision.ops.nms(some[group == k], score[group == k], 0.5)]
            for k in range(5)
        ]
    )
    expected = one_by_one[score[one_by_one].argsort(descending=True)]
    assert torch.equal(grouped_nms(some, score, group, 0.5), expected)


@pytest.mark.parametrize("beta", [1.0, 1 / 9, 0.0])
def test_smooth_l1_is_torchs(beta):
    a, b = boxes_of(9, 1) / 60, boxes_of(9, 2) / 60
    torch.testing.assert_close(
        smooth_l1(a, b, beta), torch.nn.functional.smooth_l1_loss(a, b, reduction="sum", beta=beta)
    )


def test_mask_targets_one_by_one():
    truth = truth_of([5])[0]
    boxes, matched = boxes_of(17, 8) - 3, torch.arange(17) % 5  # some reach over the edge
    found = mask_targets(truth["masks"], boxes, matched)
    for box, k, mask in zip(clip(boxes, PADDED), matched, found, strict=True):
        roi = torch.cat([torch.zeros(1), box])[None]
        expected = torchvision.ops.roi_align(truth["masks"][k][None, None].float(), roi, 28, 1.0, 0, True)[0, 0] >= 0.5
        assert torch.equal(mask, expected)
    assert found.any() and not found.all()


def test_masks_in_pieces(monkeypatch):
    truth, boxes, matched = truth_of([5])[0], boxes_of(17, 8), torch.arange(17) % 5
    probabilities = torch.rand(17, 28, 28, generator=torch.Generator().manual_seed(0))
    whole = mask_targets(truth["masks"], boxes, matched), paste_masks(probabilities, boxes, (70, 91))
    monkeypatch.setattr("heads.mask_head.PIXELS_AT_ONCE", 2 * PADDED[0] * PADDED[1])
    pieces = mask_targets(truth["masks"], boxes, matched), paste_masks(probabilities, boxes, (70, 91))
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_pasting_is_grid_sampling():
    g = torch.Generator().manual_seed(0)
    masks, boxes = torch.rand(11, 28, 28, generator=g), boxes_of(11, 6) * 1.3 - 15  # over every edge
    h, w = PADDED
    pasted = paste_masks(masks, boxes, PADDED)
    for mask, (x1, y1, x2, y2), ours in zip(masks.double(), boxes.double(), pasted, strict=True):
        y, x = (
            (torch.arange(n, dtype=torch.float64) + 0.5 - a) / (b - a) * 2 - 1 for n, a, b in ((h, y1, y2), (w, x1, x2))
        )
        grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)[None]
        sampled = torch.nn.functional.grid_sample(mask[None, None], grid, align_corners=False)[0, 0]
        assert torch.equal(ours, sampled >= 0.5)
    assert pasted.any((1, 2)).sum() > 5
    nowhere = torch.tensor([[5.0, 5.0, 5.0, 20.0], [-50.0, 0.0, -20.0, 30.0]])
    assert not paste_masks(torch.ones(2, 28, 28), nowhere, PADDED).any()
    assert paste_masks(masks[:0], boxes[:0], PADDED).shape == (0, h, w)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(paste_masks(masks, boxes, PADDED), pasted)


def test_features_one_by_one():
    levels, boxes = levels_of()[:4], torch.cat([boxes_of(20, 3), torch.tensor([[-9.0, -9, 300, 200], [5, 5, 5, 5]])])
    rois = torch.cat([(torch.arange(22) % 2).float()[:, None], boxes], 1)
    found = roi_features(levels, rois, 7)
    for roi, features in zip(rois, found, strict=True):
        side = math.sqrt((roi[3] - roi[1]) * (roi[4] - roi[2]))
        k = min(max(math.floor(math.log2(side / 56 + 1e-6)), 0), 3)
        expected = torchvision.ops.roi_align(levels[k], roi[None], 7, 1 / STRIDES[k], 0, True)[0]
        torch.testing.assert_close(features, expected)


def test_half_precision_features_keep_coordinates():
    levels = [level.bfloat16() for level in levels_of()[:4]]
    rois = torch.tensor([[1.0, 101.3, 43.7, 117.9, 60.1]])
    found, exact = roi_features(levels, rois, 7), roi_features([level.float() for level in levels], rois, 7)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.bfloat16())
