"""COCO's average precision of boxes and masks, counted by pycocotools.

Shapes: d detections and m boxes of the truth of an image, K classes, T IoU thresholds (0.5, 0.55, … 0.95), R recalls
(0, 0.01, … 1).

torchmetrics' own wrapper is not used: it counts the same, but needs bitmaps of the truth where data sets have run
lengths, knows no image by its number (so that ties would hang on how batches and processes share the images), and
gathers what a process without images does not have.
"""

import contextlib
import io
import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from pycocotools import mask as rle
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from common.collectives import gather_rows

Kind = Literal["bbox", "segm"]
KINDS: tuple[Kind, ...] = ("bbox", "segm")
NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
"""COCO's twelve numbers: areas are small below 32², large above 96² pixels; recalls with 1, 10, 100 detections."""


def run_lengths(masks: Tensor | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Masks as COCO's compressed run lengths with ``counts`` as text.

    Args:
        masks: (n, h, w) bitmaps; or run lengths already, compressed or as numbers.
    """
    if isinstance(masks, Tensor):
        bitmaps = (mask.mT.contiguous().cpu().numpy().astype(np.uint8).T for mask in masks)  # columns first, as COCO's
        found = [rle.encode(bitmap) for bitmap in bitmaps]
    else:
        found = [rle.frPyObjects(m, *m["size"]) if isinstance(m["counts"], list) else m for m in masks]
    text = [m["counts"].decode() if isinstance(m["counts"], bytes) else m["counts"] for m in found]
    return [{"size": list(map(int, m["size"])), "counts": t} for m, t in zip(found, text, strict=True)]


def bitmaps(masks: Tensor | Sequence[dict[str, Any]]) -> Tensor:
    """The same as (n, h, w) booleans; (0, 1, 1) of no run lengths."""
    if isinstance(masks, Tensor):
        return masks.bool()
    found = [rle.decode(mask) for mask in run_lengths(masks)]
    return torch.from_numpy(np.stack(found)).bool() if found else torch.zeros(0, 1, 1, dtype=torch.bool)


def _annotations(image: int, found: dict[str, Any]) -> list[dict[str, Any]]:
    """COCO's annotations, without numbers of their own, of what update was given for an image."""
    boxes = found["boxes"].detach().cpu().double()
    rows: list[dict[str, Any]] = [
        {"image_id": image, "category_id": label, "bbox": box}
        for label, box in zip(
            found["labels"].tolist(), torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).tolist(), strict=True
        )
    ]
    for name, key in (("score", "scores"), ("iscrowd", "crowd"), ("area", "areas")):
        if key in found:
            for row, value in zip(rows, torch.as_tensor(found[key]).tolist(), strict=True):
                row[name] = int(value) if name == "iscrowd" else float(value)
    if "masks" in found:
        for row, mask in zip(rows, run_lengths(found["masks"]), strict=True):
            row["segmentation"] = mask
    return rows


def _coco(images: Sequence[int], num_classes: int, rows: list[dict[str, Any]], kind: Kind, box_areas: bool) -> COCO:
    """An index of annotations, numbered from 1 (pycocotools reads 0 as unmatched), with areas where none is given."""
    data = COCO()
    numbered = []
    for i, row in enumerate(rows):
        area = row.get("area")
        if area is None:
            of_mask = kind == "segm" and not box_areas
            area = float(rle.area(row["segmentation"])) if of_mask else row["bbox"][2] * row["bbox"][3]
        numbered.append({"iscrowd": 0, **row, "id": i + 1, "area": area})
    data.dataset = {
        "images": [{"id": image, "height": 0, "width": 0} for image in images],  # sides are of use to polygons only
        "categories": [{"id": k} for k in range(num_classes)],
        "annotations": numbered,
    }
    data.createIndex()
    return data


def average_precision(
    images: Sequence[int], truth: list[dict[str, Any]], detections: list[dict[str, Any]], num_classes: int, kind: Kind,
    box_areas: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """COCO's numbers over images; all are -1 where nothing of the kind is in the truth, as COCO has it.

    At most 100 detections of an image and class are counted, the highest. What matches a crowd is neither hit nor
    error.

    Args:
        images: their numbers.
        truth, detections: COCO's annotations, labels from 0; of equal scores the earlier counts first.
        num_classes: K.
        kind: IoU of boxes or of masks.
        box_areas: for masks, whether a detection is small or large is told by its box, as in pycocotools where results
            carry boxes too, rather than by its mask.

    Returns:
        :data:`NAMES`, ``per_class`` (K) the AP of each, and ``precision`` (T, R, K) over recalls.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # it prints as it goes
        truth_index = _coco(images, num_classes, truth, kind, box_areas)
        evaluation = COCOeval(truth_index, _coco(images, num_classes, detections, kind, box_areas), kind)
        if not images:
            stats, precision = -np.ones(len(NAMES)), -np.ones((10, 101, num_classes))
        else:
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            stats, precision = evaluation.stats, evaluation.eval["precision"][:, :, :, 0, -1]
    # summed as COCO sums: over the flat numbers of a class
    classes = [float(np.mean(p[p > -1])) if (p > -1).any() else -1.0 for p in np.moveaxis(precision, 2, 0)]
    return {
        **{name: torch.tensor(value, dtype=torch.float64) for name, value in zip(NAMES, stats.tolist(), strict=True)},
        "per_class": torch.tensor(classes, dtype=torch.float64),
        "precision": torch.from_numpy(np.ascontiguousarray(precision)),
    }


def _gather(rows: Tensor, group: Any = None) -> list[Tensor]:
    """torchmetrics' exchange, for processes with any number of bytes or none."""
    return [gather_rows(rows.to(torch.uint8))]


class DetectionAP(Metric):
    """COCO's average precision of all images, over all processes.

    State is a line of JSON for each image, masks as run lengths; what is computed does not depend on how images are
    shared among batches and processes, of which some may have none. Images go by their numbers.

    ``compute`` returns :func:`average_precision`'s values as ``bbox_AP``, ``segm_per_class`` and so on.

    Args:
        num_classes: K.
        kinds: ``bbox``, ``segm`` or both; ``segm`` needs masks.
        box_areas: see :func:`average_precision`.
    """

    full_state_update = False
    records: list[Tensor]

    def __init__(self, num_classes: int, kinds: Sequence[Kind] = KINDS, box_areas: bool = False) -> None:
        super().__init__(dist_sync_fn=_gather)
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise ValueError(f"average precision: kinds={list(kinds)}: {unknown[0]!r} is not one of {', '.join(KINDS)}")
        self.num_classes, self.kinds, self.box_areas = num_classes, tuple(kinds), box_areas
        self.add_state("records", [], "cat")

    def update(
        self, images: Sequence[int], predictions: Sequence[dict[str, Any]], targets: Sequence[dict[str, Any]]
    ) -> None:
        """Some images.

        Args:
            images: their numbers, each once over all processes.
            predictions: of each image: ``boxes`` (d, 4) x1, y1, x2, y2, ``scores`` (d), ``labels`` (d) below K and, for
                masks, ``masks`` as :func:`run_lengths` takes them, all in the original frame.
            targets: of each image: the same without scores; ``crowd`` (m) where there are crowds; ``areas`` (m) in
                pixels where they are not those of the masks, or of boxes without masks.
        """
        for image, predicted, target in zip(images, predictions, targets, strict=True):
            for found in (predicted, target):
                labels = torch.as_tensor(found["labels"])
                if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes:
                    raise ValueError(
                        f"average precision: image {image}: labels {int(labels.min())}..{int(labels.max())}; allowed: "
                        f"0..{self.num_classes - 1}"
                    )
                if "segm" in self.kinds and "masks" not in found:
                    raise ValueError(f"average precision: image {image}: no masks; kinds={list(self.kinds)} needs them")
            record = [int(image), _annotations(int(image), predicted), _annotations(int(image), target)]
            line = np.frombuffer((json.dumps(record) + "\n").encode(), np.uint8)
            self.records.append(torch.from_numpy(line.copy()).to(self.device))

    def compute(self) -> dict[str, Tensor]:
        text = dim_zero_cat(self.records).cpu().numpy().tobytes() if len(self.records) else b""
        records = sorted((json.loads(line) for line in text.splitlines()), key=lambda record: record[0])
        images = [image for image, _, _ in records]
        if twice := [a for a, b in zip(images[:-1], images[1:], strict=True) if a == b]:
            raise ValueError(f"average precision: image {twice[0]} was given twice; each counts once")
        detections, truth = ([row for record in records for row in record[i]] for i in (1, 2))
        return {
            f"{kind}_{name}": value
            for kind in self.kinds
            for name, value in average_precision(
                images, truth, detections, self.num_classes, kind, self.box_areas
            ).items()
        }
