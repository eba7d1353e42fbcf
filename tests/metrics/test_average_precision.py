"""COCO's numbers against pycocotools' own run over its files, however images are shared."""

import copy
import json

import pytest
import torch
from pycocotools import mask as rle
from pycocotools.coco import COCO

from metrics import DetectionAP
from metrics.average_precision import NAMES, run_lengths
from tests.golden_files import golden_files, present
from tests.processes import run_ranks


def images_of(data):
    """What update takes of COCO's two lists: numbers, predictions, targets; and the number of classes."""
    gt = COCO()
    gt.dataset = copy.deepcopy(data["gt"])
    gt.createIndex()
    classes = {c["id"]: k for k, c in enumerate(sorted(data["gt"]["categories"], key=lambda c: c["id"]))}
    numbers = [image["id"] for image in data["gt"]["images"]]

    def entry(rows, masks):
        xywh = torch.tensor([row["bbox"] for row in rows], dtype=torch.float64).reshape(-1, 4)
        return {
            "boxes": torch.cat([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], 1),
            "labels": torch.tensor([classes[row["category_id"]] for row in rows], dtype=torch.int64),
            "masks": masks,
        }

    predictions, targets = [], []
    for number in numbers:
        rows = [row for row in data["dt"] if row["image_id"] == number]
        scores = torch.tensor([row["score"] for row in rows], dtype=torch.float64)
        predictions.append({**entry(rows, [row["segmentation"] for row in rows]), "scores": scores})
        rows = [row for row in gt.dataset["annotations"] if row["image_id"] == number]
        targets.append({
            **entry(rows, [gt.annToRLE(row) for row in rows]),
            "crowd": torch.tensor([row["iscrowd"] for row in rows]),
            "areas": torch.tensor([row["area"] for row in rows], dtype=torch.float64),
        })  # fmt: skip
    return numbers, predictions, targets, len(classes)


def metric_of(given, rows=None, step=1, **settings):
    *lists, classes = given
    metric = DetectionAP(classes, **settings)
    rows = list(range(len(lists[0]))) if rows is None else rows
    for first in range(0, len(rows), step):
        metric.update(*([each[i] for i in rows[first : first + step]] for each in lists))
    return metric


def data_of(path):
    return json.loads(present(path).read_text())


@golden_files("dense/coco_metric*.json")
def test_golden(path):
    data = data_of(path)
    given, names = images_of(data), data["config"]["names"]
    assert sorted(names) == sorted(NAMES)
    found, kept = metric_of(given).compute(), metric_of(given, kinds=["segm"], box_areas=True).compute()
    results = data["results"]
    for kind, ours, expected in (
        ("bbox", found, "bbox"),
        ("segm", found, "segm"),
        ("segm", kept, "segm_with_bbox_kept"),
    ):
        if expected not in results:
            continue
        for name in names:
            assert ours[f"{kind}_{name}"].item() == pytest.approx(results[expected][name], abs=1e-12), (expected, name)
        classes = [-1 if value is None else value for value in results[f"{expected}_per_class_AP"]]  # None: no truth
        assert ours[f"{kind}_per_class"].tolist() == pytest.approx(classes, abs=1e-12)


@golden_files("dense/coco_metric*.json")
@pytest.mark.parametrize("step", [2, 100])
def test_batches_and_order(path, step):
    given = images_of(data_of(path))
    one_by_one = metric_of(given).compute()
    for rows in (range(len(given[0])), reversed(range(len(given[0])))):
        again = metric_of(given, list(rows), step).compute()
        assert all(torch.equal(again[name], value) for name, value in one_by_one.items())


@golden_files("dense/coco_metric*.json")
def test_curves(path):
    """Their mean over recalls and thresholds is the AP; they fall."""
    found = metric_of(images_of(data_of(path))).compute()
    for kind in ("bbox", "segm"):
        curves = found[f"{kind}_precision"]
        there = curves[curves > -1]
        assert curves.shape == (10, 101, len(found[f"{kind}_per_class"]))
        assert there.mean().item() == pytest.approx(found[f"{kind}_AP"].item())
        assert curves[0][curves[0] > -1].mean().item() == pytest.approx(found[f"{kind}_AP50"].item())
        assert (curves.diff(dim=1) <= 0).all()


def _rank(rank, path, shares):
    metric = metric_of(images_of(data_of(path)), shares[rank], step=2)
    found = metric.compute()
    assert len(metric.records) == len(shares[rank])  # the state is this process's own again
    return {name: value.tolist() for name, value in found.items()}


@golden_files("dense/coco_metric*.json")
@pytest.mark.parametrize("world", [2, 3])
def test_processes(path, world):
    """The last of three processes has no image and calls no update."""
    given = images_of(data_of(path))
    alone = {name: value.tolist() for name, value in metric_of(given).compute().items()}
    shares = [list(range(len(given[0])))[i::2] for i in range(2)] + [[]]
    assert run_ranks(_rank, world, path, shares) == [alone] * world


def square(x, y, side, size=(90, 110)):
    mask = torch.zeros(size, dtype=torch.bool)
    mask[y : y + side, x : x + side] = True
    return mask


def entry(*squares, **more):
    boxes = torch.tensor([[x, y, x + s, y + s] for x, y, s in squares], dtype=torch.float32).reshape(-1, 4)
    masks = torch.stack([square(*s) for s in squares]) if squares else torch.zeros(0, 90, 110)
    return {"boxes": boxes, "labels": torch.zeros(len(squares), dtype=torch.int64), "masks": masks, **more}


def test_by_hand():
    """A hit, a miss of a higher score: precision 1/2 at every recall."""
    metric = DetectionAP(2)
    prediction = entry((60, 10, 8), (10, 10, 20), scores=torch.tensor([0.9, 0.8]))
    metric.update([7], [prediction], [entry((10, 10, 20))])
    found = metric.compute()
    for kind in ("bbox", "segm"):
        assert found[f"{kind}_AP"].item() == pytest.approx(0.5)
        assert found[f"{kind}_AR1"].item() == 0 and found[f"{kind}_AR10"].item() == 1
        assert found[f"{kind}_APs"].item() == pytest.approx(0.5) and found[f"{kind}_APl"].item() == -1
        assert found[f"{kind}_per_class"].tolist() == [pytest.approx(0.5), -1]


def test_crowds_are_neither_hits_nor_errors():
    metric = DetectionAP(1)
    prediction = entry((60, 10, 8), (62, 12, 8), (10, 10, 20), scores=torch.tensor([0.9, 0.85, 0.8]))
    metric.update([7], [prediction], [entry((10, 10, 20), (55, 5, 30), crowd=torch.tensor([False, True]))])
    found = metric.compute()
    assert found["bbox_AP"].item() == found["segm_AP"].item() == pytest.approx(1)


def test_without_anything():
    nothing = DetectionAP(3)
    with pytest.warns(UserWarning, match="before the ``update``"):
        found = nothing.compute()
    assert {found[f"{kind}_{name}"].item() for kind in ("bbox", "segm") for name in NAMES} == {-1.0}
    nothing = DetectionAP(3)
    nothing.update([1, 2], [entry(scores=torch.zeros(0)), entry((1, 2, 9), scores=torch.ones(1))], [entry(), entry()])
    found = nothing.compute()
    assert found["bbox_AP"].item() == -1 and found["segm_per_class"].tolist() == [-1] * 3
    missed = DetectionAP(1)
    missed.update([1], [entry(scores=torch.zeros(0))], [entry((1, 2, 9))])
    assert missed.compute()["segm_AP"].item() == 0
    missed.reset()
    assert not len(missed.records)


def test_run_lengths():
    g = torch.Generator().manual_seed(0)
    masks = torch.rand(3, 17, 23, generator=g) > 0.4
    found = run_lengths(masks)
    assert torch.equal(torch.from_numpy(rle.decode(found)).permute(2, 0, 1).bool(), masks)
    columns = masks[0].T.flatten().int()
    changes = torch.nonzero(torch.cat([torch.ones(1), columns.diff().abs(), torch.ones(1)]))[:, 0].diff().tolist()
    numbers = [0, *changes] if columns[0] else changes
    assert run_lengths([{"size": [17, 23], "counts": numbers}]) == found[:1]
    assert run_lengths([{"size": [17, 23], "counts": found[0]["counts"].encode()}]) == found[:1]


def test_errors():
    with pytest.raises(ValueError, match="'keypoints' is not one of bbox, segm"):
        DetectionAP(2, kinds=["keypoints"])
    metric = DetectionAP(1)
    with pytest.raises(ValueError, match=r"image 4: labels 1..1; allowed: 0..0"):
        metric.update([4], [{**entry((1, 1, 5), scores=torch.ones(1)), "labels": torch.ones(1).long()}], [entry()])
    with pytest.raises(ValueError, match="image 4: no masks"):
        metric.update([4], [{k: v for k, v in entry(scores=torch.ones(0)).items() if k != "masks"}], [entry()])
    for _ in range(2):
        metric.update([4], [entry(scores=torch.ones(0))], [entry()])
    with pytest.raises(ValueError, match="image 4 was given twice"):
        metric.compute()
