"""Arithmetic of boxes (x1, y1, x2, y2) in pixels, without a +1 anywhere, as pure functions.

Shapes: n boxes or anchors, m boxes of the ground truth, K classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import nms

from common.precision import at_least_float32, exact

Sizes = Sequence[tuple[int, int]]
"""(h, w) of each image."""
LARGEST_LOG_RATIO = abs(math.log(16 / 1000))
"""Of widths and heights in decoding, both ways (mmdet's ``wh_ratio_clip``)."""


def areas(boxes: Tensor) -> Tensor:
    """(n, 4) to (n) square pixels."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Boxes (n, 4) and (m, 4) to (n, m) intersection over union; 0 where both have no area."""

    def along(axis: int) -> Tensor:
        low, high = torch.maximum(a[:, None, axis], b[:, axis]), torch.minimum(a[:, None, axis + 2], b[:, axis + 2])
        return (high - low).clamp(min=0)

    shared = along(0) * along(1)
    return shared / (areas(a)[:, None] + areas(b) - shared).clamp(min=1e-6)  # mmdet's floor


def clip(boxes: Tensor, size: Sequence[int]) -> Tensor:
    """Boxes (..., 4) clipped to [0, w] and [0, h] of a size (h, w)."""
    x, y = boxes[..., 0::2].clamp(0, size[1]), boxes[..., 1::2].clamp(0, size[0])
    return torch.stack([x[..., 0], y[..., 0], x[..., 1], y[..., 1]], -1)


@dataclass(frozen=True)
class DeltaCoder:
    """Boxes as shifts and log ratios against others (Girshick et al. 2014), divided by standard deviations.

    Args:
        stds: of x, y, w, h.
    """

    stds: Sequence[float] = (1.0, 1.0, 1.0, 1.0)

    def encode(self, boxes: Tensor, targets: Tensor) -> Tensor:
        """Deltas (n, 4) from boxes (n, 4) to their targets (n, 4), in float32 as mmdet's, whatever comes."""
        boxes, targets = boxes.float(), targets.float()
        size, wanted = boxes[:, 2:] - boxes[:, :2], targets[:, 2:] - targets[:, :2]
        shift = ((targets[:, 2:] + targets[:, :2]) * 0.5 - (boxes[:, 2:] + boxes[:, :2]) * 0.5) / size
        return torch.cat([shift, (wanted / size).log()], -1) / boxes.new_tensor(self.stds)

    def decode(self, boxes: Tensor, deltas: Tensor, size: Sequence[int] | None = None) -> Tensor:
        """Boxes (n, 4) moved by deltas (n, 4), or (n, 4·K) for K results (n, 4·K), clipped to ``size`` (h, w)."""
        deltas = at_least_float32(deltas)
        boxes = at_least_float32(boxes)[:, None]
        found = deltas.unflatten(-1, (deltas.shape[-1] // 4, 4)) * deltas.new_tensor(self.stds)
        extent = boxes[..., 2:] - boxes[..., :2]
        centre = (boxes[..., 2:] + boxes[..., :2]) * 0.5 + extent * found[..., :2]
        half = extent * found[..., 2:].clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp() * 0.5
        moved = torch.cat([centre - half, centre + half], -1)
        return (moved if size is None else clip(moved, size)).flatten(1)


def assign(boxes: Tensor, truth: Tensor, positive: float, negative: float, best: float | None = None) -> Tensor:
    """Which box of the ground truth each box stands for (mmdet's MaxIoUAssigner).

    Args:
        boxes: (n, 4).
        truth: (m, 4), possibly none.
        positive: a box is positive from this IoU on, for the box of the truth where it is highest (the first of ties).
        negative: it is background below this IoU.
        best: after that, for each box of the truth in order, all boxes tied at its best IoU stand for it, if that IoU
            is at least this; None for no such rule.

    Returns:
        (n) integers: k for the k-th box of the truth, from 1; 0 background; -1 neither.
    """
    if not len(truth):
        return torch.zeros(len(boxes), dtype=torch.int64, device=boxes.device)
    overlaps = iou(boxes, truth.to(boxes.device))
    highest, which = overlaps.max(1)
    assigned = torch.full_like(which, -1)
    assigned[highest < negative] = 0
    assigned = torch.where(highest >= positive, which + 1, assigned)
    if best is not None and len(boxes):
        top = overlaps.amax(0)
        tied = (overlaps == top) & (top >= best)
        last = (tied * torch.arange(1, len(truth) + 1, device=boxes.device)).amax(1)  # later boxes overwrite
        assigned = torch.where(last > 0, last, assigned)
    return assigned


def sample(
    assigned: Tensor, number: int, fraction: float, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """A random choice of positives and of background (mmdet's RandomSampler), each in their order.

    Args:
        assigned: (n) of :func:`assign`.
        number: to choose in all; where there are no more, everything is taken and nothing drawn.
        fraction: of positives at most; background fills the rest.
        generator: of the CPU, where draws are made so that every device chooses alike; None is torch's own.

    Returns:
        Indices of the positives and of the background.
    """

    def some(chosen: Tensor, most: int) -> Tensor:
        if len(chosen) <= most:
            return chosen
        drawn = torch.randperm(len(chosen), generator=generator)[:most].sort().values
        return chosen[drawn.to(chosen.device)]

    positives = some(torch.nonzero(assigned > 0)[:, 0], int(number * fraction))
    return positives, some(torch.nonzero(assigned == 0)[:, 0], number - len(positives))


def smooth_l1(predictions: Tensor, targets: Tensor, beta: float) -> Tensor:
    """Sum of Huber losses divided by ``beta``, below which they are quadratic; beta 0 is L1."""
    difference = (predictions - targets).abs()
    if beta == 0:
        return difference.sum()
    return torch.where(difference < beta, 0.5 * difference**2 / beta, difference - 0.5 * beta).sum()


def grouped_nms(boxes: Tensor, scores: Tensor, groups: Tensor, threshold: float) -> Tensor:
    """Non-maximum suppression within each group: an IoU strictly over the threshold suppresses.

    Args:
        boxes: (n, 4).
        scores: (n).
        groups: (n) integers from 0: level or class.
        threshold: IoU.

    Returns:
        Indices of the boxes kept, by falling score, ties in their order.
    """
    if not len(boxes):
        return torch.zeros(0, dtype=torch.int64, device=boxes.device)
    # groups apart from each other; in float64 the shift costs float32 coordinates no bit that a threshold could hang on
    wide = exact(boxes)
    apart = wide - wide.min() + groups.to(wide)[:, None] * (wide.max() - wide.min() + 1)
    return nms(apart, exact(scores), threshold).to(boxes.device)
