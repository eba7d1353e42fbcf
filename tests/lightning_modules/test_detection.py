"""Detection behind any backbone: losses, detections, AP, pictures, and what is refused."""

import numpy as np
import pytest
import torch

from common.pictures import coloured, kept_pictures
from lightning_modules import InstanceSegmentation
from lightning_modules.detection import curves, draw_objects, mean_iou
from tests.lightning_modules.test_dense import FAMILIES

SMALL = {
    "num_classes": 3,
    "neck_channels": 8,
    "fc_channels": 8,
    "mask_channels": 4,
    "rpn_samples": 16,
    "roi_samples": 8,
}


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Tiny tensors."""


def build(family="vit", **options):
    torch.manual_seed(0)
    return InstanceSegmentation(FAMILIES[family](), **(SMALL | options))


def batch(empty=()):
    """Three images of two sizes; those named have no object."""
    g = torch.Generator().manual_seed(0)
    found = {"image": torch.randn(3, 3, 64, 96, generator=g), "valid": torch.tensor([[64, 96], [50, 96], [64, 70]])}
    found["original"] = found["valid"] * 2
    for name in ("boxes", "labels", "masks", "truth"):
        found[name] = []
    for i in range(3):
        count = 0 if i in empty else 2
        boxes = torch.tensor([[4.0, 6, 40, 44], [30, 10, 66, 48]])[:count]
        masks = torch.zeros(count, 64, 96, dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
            mask[y1:y2, x1:x2] = 1
        labels = torch.tensor([0, 2])[:count]
        height, width = found["original"][i].tolist()
        large = masks.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, :height, :width]
        found["boxes"].append(boxes)
        found["labels"].append(labels)
        found["masks"].append(masks)
        found["truth"].append({"boxes": 2 * boxes, "labels": labels, "masks": large})
    return found


@pytest.mark.parametrize("family", ["vit", "linear_vit", "vim", "mambar", "timm", "pyramid"])
@pytest.mark.parametrize("detector", ["cascade", "mask_rcnn"])
def test_every_family_trains_and_detects(family, detector):
    model = build(family, detector=detector, score_threshold=0.0, max_detections=5)
    for name in model._unused():
        model.backbone.get_parameter(name).requires_grad_(False)
    for empty in ((), (0, 1, 2)):
        model.zero_grad(set_to_none=True)
        loss, logged = model.training_loss(batch(empty))
        assert torch.isfinite(loss) and {"loss_rpn_cls", "loss_rpn_bbox"} <= set(logged)
        loss.backward()
        assert not [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    model.eval()
    given = batch()
    with torch.no_grad():
        found = model(given["image"], given["valid"].tolist(), given["original"].tolist())
    for one, (height, width) in zip(found, given["original"].tolist(), strict=True):
        assert len(one["boxes"]) <= 5 and one["masks"].shape[1:] == (height, width)
        assert (one["boxes"] >= 0).all() and (one["boxes"] <= torch.tensor([width, height, width, height])).all()


def test_levels_are_those_of_the_strides():
    model = build("vit")
    levels = model.levels(torch.randn(1, 3, 64, 96))
    assert model.neck.strides == [2, 4, 8, 16, 32]
    assert [tuple(x.shape[2:]) for x in levels] == [(32, 48), (16, 24), (8, 12), (4, 6), (2, 3)]
    assert model.detector.roi_head.finest_scale == 28  # 56 pixels of stride 4


def test_mean_iou_takes_the_best_box_of_the_class():
    truth = {"boxes": torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30]]), "labels": torch.tensor([1, 2])}
    found = {
        "boxes": torch.tensor([[0.0, 0, 10, 5], [0, 0, 10, 10], [20, 20, 30, 30]]), "labels": torch.tensor([1, 0, 2]),
    }  # fmt: skip
    assert mean_iou(found, truth) == pytest.approx((0.5 + 1) / 2)
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
    assert mean_iou(nothing, truth) == 0 and np.isnan(mean_iou(found, nothing))


def test_curves_leave_out_classes_that_are_not_there():
    precision = torch.full((10, 101, 3), -1.0)
    precision[..., 0], precision[..., 2] = 0.5, 1.0
    precision[5, :, 2] = 0.0
    found = curves(precision)
    assert found.shape == (3, 101)
    np.testing.assert_allclose(found[:, 0], [0.75, 0.25, (0.5 + 0.9) / 2], rtol=1e-6)


def test_objects_are_drawn_where_they_are():
    image = torch.zeros(3, 20, 30, dtype=torch.uint8)
    masks = torch.zeros(1, 40, 60, dtype=torch.bool)
    masks[0, 10:30, 10:50] = True
    drawn = draw_objects(image, masks, torch.tensor([[10.0, 10, 50, 30]]), torch.tensor([1]), 0.5, 3)
    assert drawn[:, 10, 15].sum() > 0 and drawn[:, 2, 2].sum() == 0
    assert torch.equal(draw_objects(image, masks[:0], torch.zeros(0, 4), torch.zeros(0).long(), 0.5, 3), image)


def test_label_maps_are_coloured_and_kept_pictures_are_found():
    labels = np.array([[0, 1], [255, 0]])
    colours = coloured(labels, 2)
    assert (colours[0, 0] == colours[1, 1]).all() and (colours[0, 0] != colours[0, 1]).any() and not colours[1, 0].any()
    arrays = {
        f"worst{i}_{name}": np.array(i) for i in range(2) for name in ("image", "target", "predicted", "score", "key")
    }
    assert [int(one["image"]) for one in kept_pictures(arrays, "worst")] == [0, 1] and not kept_pictures(arrays, "best")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"detector": "yolo"}, "detector='yolo'; allowed: cascade, mask_rcnn"),
        ({"neck": "fpn"}, "neck='fpn': the backbone's maps are all of one size"),
        ({"neck": "feature2pyramid", "taps": [0, 1, 2]}, "takes 4 maps, found 3"),
    ],
)
def test_wrong_options_are_named(options, said):
    with pytest.raises(ValueError, match=said.replace("[", r"\[").replace("=", "=")):
        build(**options)
