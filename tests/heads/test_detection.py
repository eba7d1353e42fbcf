"""Detectors: what must hold for any sizes, images without boxes and number formats."""

import math

import pytest
import torch
import torchvision
from torchvision.models.detection.roi_heads import fastrcnn_loss

from heads import CascadeMaskRCNN, MaskRCNN
from heads.boxes import clip
from tests.heads.scenes import CHANNELS, CLASSES, ORIGINAL, SIZES, STRIDES, boxes_of, levels_of, truth_of

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(kind, **settings):
    torch.manual_seed(0)
    few = {"train_proposals": (200, 100), "test_proposals": (100, 60), "roi_samples": 64}
    return kind(CLASSES, CHANNELS, CHANNELS, 16, CHANNELS, **{**few, **settings})


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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [CascadeMaskRCNN, MaskRCNN])
def test_devices_choose_alike(kind):
    detector, levels, truth = tiny(kind, score_threshold=0.2).double(), levels_of(dtype=torch.float64), truth_of((3, 2))
    found = []
    for device in ("cpu", "cuda"):
        detector, there = detector.to(device), [level.to(device) for level in levels]
        losses = detector.loss(there, truth, SIZES, torch.Generator().manual_seed(0))
        found.append((losses, detector.predict(there, SIZES, ORIGINAL)))
    torch.testing.assert_close(found[1], found[0], check_device=False)


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
