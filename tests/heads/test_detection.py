"""Detectors and their parts: what must hold for any sizes, images without boxes and number formats."""

import math

import pytest
import torch
import torchvision
from torchvision.models.detection.roi_heads import fastrcnn_loss

from heads import CascadeMaskRCNN, MaskRCNN
from heads.boxes import LARGEST_LOG_RATIO, DeltaCoder, assign, clip, grouped_nms, iou, sample, smooth_l1
from heads.mask_head import mask_targets, paste_masks
from heads.roi_align import roi_features

pytestmark = pytest.mark.usefixtures("one_thread")
CLASSES, CHANNELS, PADDED = 3, 8, (96, 128)
SIZES, ORIGINAL = [(96, 128), (75, 101)], [(61, 83), (150, 202)]
STRIDES = (4, 8, 16, 32, 64)


def tiny(kind, **settings):
    torch.manual_seed(0)
    few = {"train_proposals": (200, 100), "test_proposals": (100, 60), "roi_samples": 64}
    return kind(CLASSES, CHANNELS, CHANNELS, 16, CHANNELS, **{**few, **settings})


def levels_of(seed=0, dtype=torch.float32, grad=False, images=2):
    g = torch.Generator().manual_seed(seed)
    shapes = [[-(-n // s) for n in PADDED] for s in STRIDES]
    return [torch.randn(images, CHANNELS, *s, generator=g).to(dtype).requires_grad_(grad) for s in shapes]


def boxes_of(n, seed=0, size=PADDED):
    g = torch.Generator().manual_seed(seed)
    corner = torch.rand(n, 2, generator=g) * torch.tensor([size[1], size[0]]) * 0.6
    return torch.cat([corner, corner + 4 + torch.rand(n, 2, generator=g) * torch.tensor([size[1], size[0]]) * 0.3], 1)


def truth_of(counts, seed=0):
    g = torch.Generator().manual_seed(seed)
    made = []
    for i, n in enumerate(counts):
        boxes, masks = boxes_of(n, seed + i, SIZES[i]), torch.zeros(n, *PADDED, dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.round().int().tolist(), strict=True):
            mask[y1:y2, x1 : (x1 + x2) // 2] = 1
        made.append({"boxes": boxes, "labels": torch.randint(CLASSES, (n,), generator=g), "masks": masks})
    return made


# --- boxes


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


# --- masks


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


# --- features of boxes


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


# --- detectors


@pytest.mark.parametrize("kind", [CascadeMaskRCNN, MaskRCNN])
@pytest.mark.parametrize("counts", [(0, 0), (3, 0), (2, 4)])
def test_every_parameter_has_a_gradient(kind, counts):
    detector, levels = tiny(kind), levels_of(grad=True)
    losses = detector.loss(levels, truth_of(counts), SIZES, torch.Generator().manual_seed(0))
    parts = [v for k, v in losses.items() if "loss" in k and k != "loss"]
    torch.testing.assert_close(losses["loss"], sum(parts))
    assert all(v.isfinite() and v.shape == () for v in losses.values())
    losses["loss"].backward()
    for name, parameter in [*detector.named_parameters(), *enumerate(levels)]:
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    mask_losses = [v.item() for k, v in losses.items() if "loss_mask" in k]
    assert all((value == 0) == (counts == (0, 0)) for value in mask_losses)


@pytest.mark.parametrize("kind", [CascadeMaskRCNN, MaskRCNN])
def test_without_proposals(kind):
    detector, levels = tiny(kind), levels_of(grad=True)
    none = [torch.zeros(0, 4)] * 2
    losses = detector.roi_head.loss(levels, none, truth_of((0, 0)), SIZES)
    assert {v.item() for v in losses.values()} == {0.0}
    sum(v for k, v in losses.items() if "loss" in k).backward()
    for name, parameter in detector.roi_head.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
    losses = detector.roi_head.loss(levels, none, truth_of((2, 0)), SIZES)  # the truth's own boxes are trained on
    first = next(iter(k for k in losses if "loss_cls" in k))
    assert losses[first] > 0
    for result, size in zip(detector.roi_head.predict(levels, none, SIZES, ORIGINAL), ORIGINAL, strict=True):
        assert [result[k].shape[0] for k in ("boxes", "scores", "labels", "masks")] == [0] * 4
        assert result["masks"].shape[1:] == size


@pytest.mark.parametrize("kind", [CascadeMaskRCNN, MaskRCNN])
def test_prediction(kind):
    detector, levels = tiny(kind, score_threshold=0.2, max_detections=7).eval(), levels_of()
    for result, size in zip(detector.predict(levels, SIZES, ORIGINAL), ORIGINAL, strict=True):
        assert len(result["boxes"]) == 7
        assert result["masks"].shape == (7, *size) and result["masks"].dtype == torch.bool
        assert (result["scores"].diff() <= 0).all() and (result["scores"] > 0.2).all()
        assert torch.equal(clip(result["boxes"], [n + 1e-3 for n in size]), result["boxes"])
    nothing = tiny(kind, score_threshold=0.99).eval().predict(levels, SIZES, ORIGINAL)
    assert [len(r["boxes"]) for r in nothing] == [0, 0]


@pytest.mark.parametrize("kind", [CascadeMaskRCNN, MaskRCNN])
def test_images_do_not_see_each_other(kind):
    detector, levels = tiny(kind, score_threshold=0.2).double().eval(), levels_of(dtype=torch.float64)
    together = detector.predict(levels, SIZES, ORIGINAL)
    for b, size in enumerate(SIZES):
        alone = detector.predict([level[b : b + 1] for level in levels], [size], [ORIGINAL[b]])[0]
        for name, value in alone.items():
            torch.testing.assert_close(value, together[b][name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [CascadeMaskRCNN, MaskRCNN])
def test_autocast(kind, dtype):
    """Losses stay near those in float32; boxes, scores and targets are in float32."""
    detector, truth = tiny(kind), truth_of((3, 2))
    exact = detector.loss(levels_of(), truth, SIZES, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype):
        found = detector.loss([x.to(dtype) for x in levels_of()], truth, SIZES, torch.Generator().manual_seed(0))
        results = detector.predict([x.to(dtype) for x in levels_of()], SIZES, ORIGINAL)
    assert all(v.dtype == torch.float32 for v in found.values())
    assert found["loss"].item() == pytest.approx(exact["loss"].item(), rel=0.1)
    found["loss"].backward()
    assert all(r["boxes"].dtype == r["scores"].dtype == torch.float32 for r in results)


def test_double():
    detector, levels = tiny(CascadeMaskRCNN).double(), levels_of(dtype=torch.float64)
    assert detector.loss(levels, truth_of((3, 2)), SIZES)["loss"].dtype == torch.float64
    assert detector.predict(levels, SIZES, ORIGINAL)[0]["boxes"].dtype == torch.float64


def test_sampling_follows_its_generator():
    detector, levels, truth = tiny(CascadeMaskRCNN, roi_samples=16, rpn_samples=8), levels_of(), truth_of((3, 2))

    def losses(seed):
        return detector.loss(levels, truth, SIZES, torch.Generator().manual_seed(seed))["loss"].item()

    before = torch.get_rng_state()
    assert losses(1) == losses(1) != losses(2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert detector.loss(levels, truth, SIZES)["loss"].item() == losses(1)  # None is torch's own


def test_anchors_beyond_an_images_own_padding():
    """In a batch of larger images, anchors that an image would not have by itself take no part."""
    head = tiny(MaskRCNN).rpn_head
    truth = [t["boxes"] for t in truth_of((3, 2))]
    sizes, padded = [(96, 128), (30, 40)], [(96, 128), (32, 64)]
    assigned = head.targets(levels_of(), truth, sizes, padded).assigned
    rows = assigned[1].split([level[0, 0].numel() * 3 for level in levels_of()])
    for row, level, stride in zip(rows, levels_of(), STRIDES, strict=True):
        inside = torch.nonzero((row.view(*level.shape[-2:], 3) != -2).all(-1))
        assert (inside.amax(0) + 1).tolist() == [math.ceil(32 / stride), math.ceil(64 / stride)]
    assert (assigned[0] != -2).all()


def test_class_specific_loss_is_torchvisions():
    """With torchvision's classes (background first there) and its β; both divide by the number of boxes."""
    head = tiny(MaskRCNN).roi_head.bbox_head
    head.beta = 1 / 9
    g = torch.Generator().manual_seed(0)
    logits, deltas = torch.randn(19, CLASSES + 1, generator=g), torch.randn(19, 4 * CLASSES, generator=g)
    labels, targets = torch.randint(CLASSES + 1, (19,), generator=g), torch.randn(19, 4, generator=g)
    ours = head.loss(logits, deltas, labels, targets)
    theirs_logits = torch.cat([logits[:, -1:], logits[:, :-1]], 1)
    theirs_deltas = torch.cat([torch.zeros(19, 4), deltas], 1)
    theirs = fastrcnn_loss(theirs_logits, theirs_deltas, [(labels + 1) % (CLASSES + 1)], [targets])
    torch.testing.assert_close(ours["loss_cls"], theirs[0])
    torch.testing.assert_close(ours["loss_bbox"], theirs[1])
    assert ours["acc"].item() == pytest.approx((logits.argmax(1) == labels).double().mean().item() * 100)


def test_class_specific_detection_by_loops():
    head = tiny(MaskRCNN, score_threshold=0.2).roi_head.double().eval()
    levels, proposals = levels_of(dtype=torch.float64), [boxes_of(25, 1).double(), boxes_of(14, 2).double()]
    stages = head.test_stages(levels, proposals, SIZES)
    counts = [len(p) for p in proposals]
    for image, found in enumerate(head.detect(levels, proposals, SIZES)):
        logits, deltas = (t.split(counts)[image] for t in stages[0][1:])
        expected = []
        for k in range(CLASSES):
            scores = logits.softmax(1)[:, k]
            boxes = head.bbox_head.coder.decode(proposals[image], deltas[:, 4 * k : 4 * k + 4], SIZES[image])
            boxes, scores = boxes[scores > 0.2], scores[scores > 0.2]
            kept = torchvision.ops.nms(boxes, scores, 0.5)
            expected += [(s.item(), k, b.tolist()) for s, b in zip(scores[kept], boxes[kept], strict=True)]
        expected = sorted(expected, reverse=True)[:100]
        assert found[2].tolist() == [k for _, k, _ in expected]
        torch.testing.assert_close(found[0], torch.tensor([b for _, _, b in expected], dtype=torch.float64))


@pytest.mark.parametrize("kind", [CascadeMaskRCNN, MaskRCNN])
def test_learns_a_toy_image(kind):
    detector, levels, truth = tiny(kind), levels_of(images=1), truth_of((2,))
    optimizer = torch.optim.AdamW(detector.parameters(), 0.01)
    losses = []
    for step in range(30):
        loss = detector.loss(levels, truth, SIZES[:1], torch.Generator().manual_seed(step))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


def test_initial_weights():
    detector = CascadeMaskRCNN(80, 32, 32, 64, 32)
    box, mask = detector.roi_head.bbox_head[1], detector.roi_head.mask_head[2]
    for weight, std in (
        (detector.rpn_head.rpn_conv.weight, 0.01),
        (detector.rpn_head.rpn_reg.weight, 0.01),
        (box.fc_cls.weight, 0.01),
        (box.fc_reg.weight, 0.001),
        (box.shared_fcs[0].weight, math.sqrt(2 / (32 * 49 + 64))),
        (mask.convs[3].conv.weight, math.sqrt(2 / (32 * 9))),
        (mask.upsample.weight, math.sqrt(2 / (32 * 4))),
        (mask.conv_logits.weight, math.sqrt(2 / 80)),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.15)
    assert not any(p.any() for name, p in detector.named_parameters() if name.endswith("bias"))


def test_names_are_mmdets():
    names = {k for k, _ in tiny(MaskRCNN).named_parameters()}
    for name in ("rpn_head.rpn_reg.bias", "roi_head.bbox_head.shared_fcs.1.weight", "roi_head.bbox_head.fc_reg.bias",
                 "roi_head.mask_head.convs.3.conv.bias", "roi_head.mask_head.upsample.weight",
                 "roi_head.mask_head.conv_logits.weight"):  # fmt: skip
        assert name in names
    assert "roi_head.bbox_head.2.fc_cls.weight" in {k for k, _ in tiny(CascadeMaskRCNN).named_parameters()}


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"negative_iou=0\.8"):
        type(tiny(MaskRCNN).rpn_head)(negative_iou=0.8)
    with pytest.raises(ValueError, match=r"ious=\(0.5,\)"):
        type(tiny(CascadeMaskRCNN).roi_head)(CLASSES, ious=(0.5,))
    with pytest.raises(ValueError, match="3 levels"):
        tiny(MaskRCNN).predict(levels_of()[:3], SIZES, ORIGINAL)
