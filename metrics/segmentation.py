"""Intersection over union of label maps, mmsegmentation's.

Shapes: B images, H x W pixels, C classes.
"""

import torch
from torch import Tensor
from torchmetrics import Metric

from common.precision import exact


def segmentation_areas(predicted: Tensor, labels: Tensor, num_classes: int, ignore_index: int = 255) -> Tensor:
    """Pixels (B, 3, C) int64 of each image and class: found rightly, found, and there.

    Args:
        predicted: (B, H, W) classes.
        labels: (B, H, W) classes, or ``ignore_index`` where a pixel counts for neither.
        num_classes: C.
        ignore_index: no class.

    Raises:
        ValueError: for a class that is none of the C, or shapes that differ.
    """
    if predicted.shape != labels.shape:
        raise ValueError(f"predicted {tuple(predicted.shape)} and labels {tuple(labels.shape)} must be of one shape")
    counted = labels != ignore_index
    for name, of in (("predicted", predicted), ("labels", labels)):
        wrong = of[counted & ((of < 0) | (of >= num_classes))]
        if len(wrong):
            raise ValueError(f"{name} holds the class {int(wrong[0])}; allowed are 0 to {num_classes - 1}")
    image = torch.arange(len(labels), device=labels.device)[:, None, None].expand_as(labels)[counted]
    found, there = predicted[counted].long(), labels[counted].long()
    return torch.stack([_count(image[found == there], there[found == there], len(labels), num_classes),
                        _count(image, found, len(labels), num_classes),
                        _count(image, there, len(labels), num_classes)], 1)  # fmt: skip


def _count(image: Tensor, of: Tensor, images: int, num_classes: int) -> Tensor:
    return torch.bincount(image * num_classes + of, minlength=images * num_classes).view(images, num_classes)


def segmentation_scores(areas: Tensor) -> dict[str, Tensor]:
    """Scores (...) as shares in 1 of areas (..., 3, C) summed over images.

    ``IoU`` and ``Acc`` (..., C): intersection over union, and the share of a class's pixels that are found. A class
    that is neither there nor found has none (NaN); one that is found without being there has IoU 0 and no Acc.
    ``mIoU``, ``mAcc``: means over the classes that have one. ``aAcc``: share of all labelled pixels.
    """
    right, found, there = exact(areas).unbind(-2)
    iou, acc = right / (found + there - right), right / there
    every = right.sum(-1) / there.sum(-1)
    return {"IoU": iou, "Acc": acc, "mIoU": iou.nanmean(-1), "mAcc": acc.nanmean(-1), "aAcc": every}


class SegmentationScores(Metric):
    """:func:`segmentation_scores` over a data set, with ``pixels`` (C) of each class that are there, and ``images``.

    Areas are summed over all images before any is divided; as integers, so neither batches nor the number of processes
    changes a bit.

    Args:
        num_classes: C.
        ignore_index: in labels, of pixels that take no part.
    """

    full_state_update = False
    higher_is_better = True
    areas: Tensor
    images: Tensor

    def __init__(self, num_classes: int, ignore_index: int = 255) -> None:
        super().__init__()
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.last = torch.zeros(0, 3, num_classes, dtype=torch.int64)
        """(B, 3, C) of the images of the latest update."""
        self.add_state("areas", torch.zeros(3, num_classes, dtype=torch.int64), "sum")
        self.add_state("images", torch.tensor(0), "sum")

    def update(self, predicted: Tensor, labels: Tensor) -> None:
        """Classes (B, H, W), as :func:`segmentation_areas`; images of other sizes in calls of their own."""
        self.last = segmentation_areas(predicted, labels, self.num_classes, self.ignore_index)
        self.areas += self.last.sum(0)
        self.images += len(labels)

    def compute(self) -> dict[str, Tensor]:
        return segmentation_scores(self.areas) | {"pixels": self.areas[2], "images": self.images}
