"""Detection heads against the published implementations' tensors, in float64; sizes and names come from the files.

Tolerance is 1e-5 absolute, and 1e-6 relative where the reference has single precision inside (anchors, box encoding,
binary cross entropy); choices (labels, matches, levels, kept boxes) are exact, pasted masks within a few pixels.
"""

import json

import pytest
import torch
from safetensors import safe_open

from heads import CascadeRoIHead, RPNHead
from heads.boxes import DeltaCoder
from heads.mask_head import paste_masks
from heads.roi_align import level_of, roi_features, with_image
from tests.golden_files import golden_files, present

pytestmark = pytest.mark.usefixtures("one_thread")
PASTED_PIXELS = 5  # of a mask that single precision may tip


class Golden:
    """A file's configuration, inputs and outputs.

    Floating inputs are in float64 but proposals, which the reference had in float32 and adds up so at the first stage.
    """

    def __init__(self, path):
        with safe_open(present(path), "pt") as f:
            self.config = json.loads(f.metadata()["config"])
            everything = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
        self.out = {k.removeprefix("out."): v for k, v in everything.items() if k.startswith("out.")}
        inputs = {k.removeprefix("in."): v for k, v in everything.items() if k.startswith("in.")}
        self.inputs = {
            k: v.double() if v.is_floating_point() and not k.startswith("proposals") else v for k, v in inputs.items()
        }
        self.compared = set()

    def levels(self, prefix="", grad=False):
        names = sorted(k for k in self.inputs if k.startswith(f"{prefix}p") and k[len(prefix) + 1 :].isdigit())
        return [self.inputs[name].clone().requires_grad_(grad) for name in names], names

    def state(self, prefix):
        return {k.removeprefix(prefix): v for k, v in self.inputs.items() if k.startswith(prefix)}

    def per_image(self, name):
        return [self.inputs[f"{name}{b}"] for b in range(len(self.config["img"]))]

    def same(self, name, ours, atol=1e-5, rtol=0.0):
        expected = self.out[name]
        self.compared.add(name)
        assert ours.shape == expected.shape, name
        if expected.is_floating_point():
            torch.testing.assert_close(
                ours.detach().double(), expected.double(), atol=atol, rtol=rtol, msg=lambda m: f"{name}: {m}"
            )
        else:
            assert torch.equal(ours.to(expected.dtype), expected), name

    def gradients(self, module, prefix, maps):
        """Those of the module's parameters and of the maps, as far as the file has them."""
        for name, parameter in module.named_parameters():
            if f"grad.{prefix}{name}" in self.out:
                self.same(f"grad.{prefix}{name}", parameter.grad, rtol=1e-6)
        for name, tensor in maps.items():
            self.same(f"grad.{name}", tensor.grad, rtol=1e-6)

    def nothing_left(self):
        left = [name for name in self.out if name not in self.compared]
        assert not left, f"not compared: {left}"


@golden_files("dense/delta_coder*.safetensors")
def test_delta_coder(path):
    g = Golden(path)
    boxes, truth, deltas = (g.inputs[k] for k in ("boxes", "gts", "deltas"))
    for n, stds in enumerate(g.config["stds"]):
        coder = DeltaCoder(stds)
        given = deltas / deltas.new_tensor(stds)
        g.same(f"encode.{n}", coder.encode(boxes, truth), rtol=1e-6)
        g.same(f"decode.{n}", coder.decode(boxes, given), rtol=1e-6)
        g.same(f"decode_clipped.{n}", coder.decode(boxes, given, g.config["img"]), rtol=1e-6)
    g.nothing_left()


def rpn_of(g, border=None):
    rules, sampler = g.config["rpn"]["assigner"], g.config["rpn"]["sampler"]
    _, names = g.levels()
    head = RPNHead(
        g.config["dim"], g.inputs["rpn_head.rpn_conv.weight"].shape[0], strides_of(names),
        positive_iou=rules["pos_iou_thr"], negative_iou=rules["neg_iou_thr"],
        best_iou=rules["min_pos_iou"] if rules["match_low_quality"] else None, num_samples=sampler["num"],
        positive_fraction=sampler["pos_fraction"],
        allowed_border=g.config["rpn"]["allowed_border"] if border is None else border,
    )  # fmt: skip
    head.double().load_state_dict(g.state("rpn_head."))
    return head


def strides_of(names):
    """Of levels named p2, p3, …"""
    return [2 ** int(name.rpartition("p")[2]) for name in names]


@golden_files("dense/rpn_train*.safetensors")
def test_rpn_train(path):
    g = Golden(path)
    levels, names = g.levels(grad=True)
    for prefix, border in (("", None), ("border-1.", -1)):
        if f"{prefix}avg_factor" not in g.out:
            continue
        head = rpn_of(g, border)
        logits, deltas = head(levels)
        targets = head.targets(levels, g.per_image("gt_boxes"), g.config["img"], g.config["pad_each"])
        losses = head.loss(logits, deltas, targets)
        g.same(f"{prefix}labels", ~targets.positive)
        g.same(f"{prefix}label_weights", targets.sampled)
        g.same(f"{prefix}pos_image_anchor", torch.nonzero(targets.positive))
        g.same(f"{prefix}pos_targets", targets.deltas, rtol=1e-6)
        g.same(f"{prefix}avg_factor", torch.tensor(targets.avg_factor))
        for name, value in losses.items():
            g.same(f"{prefix}{name}_per_level", value, rtol=1e-6)
            g.same(f"{prefix}{name}", value.sum(), rtol=1e-6)
        if border is None:
            for b, assigned in enumerate(targets.assigned):
                g.same(f"assigned{b}", assigned)
            for name, anchors, logit, delta in zip(names, head.anchors(levels), logits, deltas, strict=True):
                g.same(f"anchors.{name}", anchors, rtol=1e-6)
                g.same(f"cls.{name}", logit)
                g.same(f"reg.{name}", delta)
            sum(value.sum() for value in losses.values()).backward()
            g.gradients(head, "rpn_head.", dict(zip(names, levels, strict=True)))
    g.nothing_left()


@golden_files("dense/rpn_proposals*.safetensors")
def test_rpn_proposals(path):
    g = Golden(path)
    (logits, names), (deltas, _) = g.levels("cls."), g.levels("reg.")
    test = g.config["test"]
    assert test["min_bbox_size"] == 0
    head = RPNHead(g.config["dim"], g.config["dim"], strides_of(names), nms_iou=test["nms"]["iou_threshold"])
    found = head.proposals(logits, deltas, g.config["img"], test["nms_pre"], test["max_per_img"])
    for b, (boxes, scores) in enumerate(found):
        g.same(f"boxes{b}", boxes, rtol=1e-6)
        g.same(f"scores{b}", scores)
    g.nothing_left()


@golden_files("dense/roi_align*.safetensors")
def test_roi_align(path):
    g = Golden(path)
    levels, names = g.levels(grad=True)
    rois, strides, finest = g.inputs["rois"], g.config["strides"], g.config["finest_scale"]
    g.same("level", level_of(rois, len(levels), finest))
    feats7, feats14 = (roi_features(levels, rois, size, strides, finest) for size in (7, 14))
    g.same("feats7", feats7)
    g.same("feats14", feats14)
    upstream = (torch.arange(feats7.numel()) % 7 - 3).double().view_as(feats7)
    (feats7 * upstream).sum().backward()
    for name, level in zip(names, levels, strict=True):
        g.same(f"grad.{name}", level.grad)
    g.nothing_left()


def cascade_of(g, **settings):
    stages = len(g.config["stds"])
    head = CascadeRoIHead(
        g.config["classes"], g.config["dim"], g.config["fc"],
        g.inputs["roi_head.mask_head.0.conv_logits.weight"].shape[1],
        stds=g.config["stds"], strides=strides_of(g.levels()[1]), finest_scale=g.config["finest_scale"],
        **{"ious": [0.5] * stages, "loss_weights": [1.0] * stages, **settings},
    )  # fmt: skip
    head.double().load_state_dict(g.state("roi_head."))
    return head


@golden_files("dense/cascade_train*.safetensors")
def test_cascade_train(path):
    g = Golden(path)
    levels, names = g.levels(grad=True)
    head = cascade_of(
        g, ious=g.config["iou"], loss_weights=g.config["stage_loss_weights"], num_samples=10**6, positive_fraction=0.5
    )
    targets = [
        {"boxes": boxes, "labels": labels, "masks": masks}
        for boxes, labels, masks in zip(*(g.per_image(f"gt_{k}") for k in ("boxes", "labels", "masks")), strict=True)
    ]
    total = torch.zeros((), dtype=torch.float64)
    for s, stage in enumerate(head.train_stages(levels, g.per_image("proposals"), targets, g.config["img"])):
        positive = stage.labels < g.config["classes"]
        g.same(f"s{s}.rois", stage.rois)
        g.same(f"s{s}.labels", stage.labels)
        g.same(f"s{s}.is_positive", positive)
        g.same(f"s{s}.num_per_image", torch.tensor([len(c.boxes) for c in stage.candidates]))
        g.same(f"s{s}.num_pos_per_image", torch.tensor([len(c.matched) for c in stage.candidates]))
        g.same(f"s{s}.matched_gt_of_pos", torch.cat([c.matched for c in stage.candidates]))
        g.same(f"s{s}.pos_is_gt", torch.cat([c.is_truth for c in stage.candidates])[positive])
        g.same(f"s{s}.bbox_targets", stage.targets, rtol=1e-6)
        g.same(f"s{s}.cls_score", stage.logits)
        g.same(f"s{s}.bbox_pred", stage.deltas)
        g.same(f"s{s}.mask_targets", stage.mask_targets)
        g.same(f"s{s}.mask_preds_first3", stage.mask_logits[:3])
        for b, boxes in enumerate(stage.refined):
            g.same(f"s{s}.refined{b}", boxes)
        for name, value in stage.losses.items():
            g.same(f"loss.s{s}.{name}", value.view_as(g.out[f"loss.s{s}.{name}"]), rtol=1e-6)
        total = total + sum(value for name, value in stage.losses.items() if "loss" in name)
    g.same("loss.total", total.view_as(g.out["loss.total"]), rtol=1e-6)
    total.backward()
    g.gradients(head, "roi_head.", dict(zip(names, levels, strict=True)))
    g.nothing_left()
    collected = head.loss(levels, g.per_image("proposals"), targets, g.config["img"])
    torch.testing.assert_close(sum(v for k, v in collected.items() if "loss" in k), total)


@golden_files("dense/cascade_test*.safetensors")
def test_cascade_test(path):
    g = Golden(path)
    levels, _ = g.levels()
    config, proposals = g.config, g.per_image("proposals")
    head = cascade_of(
        g, score_threshold=config["score_thr"], nms_iou=config["nms_iou"], max_detections=config["max_per_img"]
    )
    counts, stages = [len(p) for p in proposals], head.test_stages(levels, proposals, config["img"])
    for s, (boxes, logits, deltas) in enumerate(stages):
        g.same(f"s{s}.rois", with_image(boxes))
        g.same(f"s{s}.cls_score", logits)
        g.same(f"s{s}.bbox_pred", deltas)
    mean = sum(logits for _, logits, _ in stages) / len(stages)
    rois = with_image(stages[-1][0])
    for b, (m, r, d) in enumerate(
        zip(mean.split(counts), rois.split(counts), stages[-1][2].split(counts), strict=True)
    ):
        g.same(f"mean_logits{b}", m)
        g.same(f"stage3_rois{b}", r)
        g.same(f"stage3_deltas{b}", d)

    detected = head.detect(levels, proposals, config["img"])
    results = head.predict(levels, proposals, config["img"], config["ori"])
    few = [[part[: config["max_masks"]] for part in image] for image in detected]
    probabilities = head.mask_probabilities(levels, [f[0] for f in few], [f[2] for f in few])
    for b, (image, result) in enumerate(zip(detected, results, strict=True)):
        for name, value in zip(("boxes", "scores", "labels"), image, strict=True):
            g.same(f"det.{name}{b}", value)
        for name in ("boxes", "scores", "labels"):
            g.same(f"det_rescaled.{name}{b}", result[name])
            g.same(f"mask.{name}{b}", result[name][: config["max_masks"]])
        g.same(f"mask.prob28_of_label{b}", probabilities[b])
        pasted = g.out[f"mask.pasted{b}"]
        g.compared.add(f"mask.pasted{b}")
        for ours in (
            result["masks"][: config["max_masks"]],
            paste_masks(g.out[f"mask.prob28_of_label{b}"], g.out[f"mask.boxes{b}"], config["ori"][b]),
        ):
            assert ours.shape == pasted.shape
            assert (ours != pasted.bool()).sum((1, 2)).max() <= PASTED_PIXELS
    g.nothing_left()
