"""Binary-AUC as a pure function.

Shapes: B images, K maps an image, h x w the maps' grid, H x W the masks' pixels, N = h·w.
"""

from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.precision import exact


def masks_to_grid(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, H, W) integer masks to (B, h, w): the pixel nearest to the centre of each cell."""
    if tuple(masks.shape[-2:]) == size:
        return masks
    # float64 holds every id exactly
    return F.interpolate(exact(masks[:, None]), size=size, mode="nearest-exact")[:, 0].to(masks)


Comparison = Literal["grid", "area", "mask"]
"""Where maps and masks meet: see :func:`binary_auc`."""


def sides(masks: Tensor, size: tuple[int, int], ignore_index: int, compare: Comparison) -> tuple[Tensor, Tensor]:
    """(B, N) booleans: foreground and background, on a grid of that size; cells that take no part are neither."""
    if compare != "area" or tuple(masks.shape[-2:]) == size:
        ids = masks_to_grid(masks, size).flatten(1)
        return (ids != 0) & (ids != ignore_index), ids == 0
    parts = torch.stack([(masks != 0) & (masks != ignore_index), masks == 0], 1)
    foreground, background = F.interpolate(exact(parts), size=size, mode="area").flatten(2).unbind(1)
    counted = foreground + background > 0
    return counted & (foreground >= background), counted & (foreground < background)


def binary_auc(scores: Tensor, masks: Tensor, ignore_index: int = 1000, compare: Comparison = "grid") -> Tensor:
    """Area under the ROC curve of each map's values as scores for foreground against background.

    It is the probability that a foreground pixel scores above a background pixel, ties counted half
    (Mann–Whitney), which is what the trapezoid over every threshold gives. Computed from one sort a map.

    Args:
        scores: (B, K, h, w) raw values, any range; infinite values are ordered as such.
        masks: (B, H, W) integers: 0 background, ``ignore_index`` takes no part, anything else foreground. Another
            size than the maps' is brought to their grid, nearest pixel.
        ignore_index: the ignored id.
        compare: ``grid``, as the paper: the mask on the maps' grid, nearest pixel. ``area``: a cell of the grid is
            foreground where at least half of its pixels that take part are. ``mask``: the map, made as large as the
            mask (bilinear), against every pixel; scores must be finite.

    Returns:
        (B, K) float64, on the CPU where the device has none; NaN where the mask has only one class on the grid.

    Raises:
        ValueError: for shapes or dtypes that do not fit, or NaN scores (naming image and map).
    """
    if scores.ndim != 4 or masks.ndim != 3 or len(scores) != len(masks):
        raise ValueError(
            f"binary_auc wants scores (B,K,h,w) and masks (B,H,W); found {tuple(scores.shape)}, {tuple(masks.shape)}"
        )
    if compare not in get_args(Comparison):
        raise ValueError(f"binary_auc: compare={compare!r}; allowed: {', '.join(get_args(Comparison))}")
    if masks.is_floating_point() or masks.dtype == torch.bool:
        raise ValueError(f"binary_auc wants integer masks with ids; found {masks.dtype}")
    nan = scores.isnan().flatten(2).any(-1)
    if nan.any():
        image, index = nan.nonzero()[0].tolist()
        raise ValueError(f"binary_auc: scores of image {image}, map {index} hold NaN")

    if compare == "mask" and scores.shape[-2:] != masks.shape[-2:]:
        scores = F.interpolate(exact(scores), size=masks.shape[-2:], mode="bilinear", align_corners=False)
    both = sides(masks, (scores.shape[-2], scores.shape[-1]), ignore_index, compare)
    foreground, background = (side[:, None] for side in both)  # B 1 N
    values, order = scores.flatten(2).sort(-1)
    positive = foreground.expand_as(order).gather(-1, order)
    negative = background.expand_as(order).gather(-1, order).to(torch.int32)

    # negatives strictly below, and up to the end of, each run of equal values
    up_to = negative.cumsum(-1, dtype=torch.int32)
    new_run = torch.ones_like(positive)
    new_run[..., 1:] = values[..., 1:] != values[..., :-1]
    run_end = torch.ones_like(positive)
    run_end[..., :-1] = new_run[..., 1:]
    below = torch.where(new_run, up_to - negative, 0).cummax(-1).values
    within = torch.where(run_end, up_to, values.shape[-1]).flip(-1).cummin(-1).values.flip(-1)

    # twice the wins, in integers: exact
    wins = torch.where(positive, below + within, 0).sum(-1, dtype=torch.int64)
    pairs = foreground.sum(-1, dtype=torch.int64) * background.sum(-1, dtype=torch.int64)
    return exact(wins) / exact(2 * pairs)


def position_map(size: tuple[int, int]) -> Tensor:
    """(h, w): minus the distance to the centre, in cells; what a map scores that knows nothing of the image."""
    h, w = size
    y, x = torch.arange(h) - (h - 1) / 2, torch.arange(w) - (w - 1) / 2
    return -torch.hypot(y[:, None], x[None, :])


def roc_curve(scores: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rates over every threshold, from (0, 0) to (1, 1); equal scores are one step.

    The trapezoid under it is :func:`binary_auc`.

    Args:
        scores: (n) of one map.
        positive: (n) whether foreground; both kinds must occur.
    """
    order = np.argsort(-scores, kind="stable")
    values, hits = scores[order], positive[order].astype(np.int64)
    ends = np.append(np.flatnonzero(np.diff(values)), len(values) - 1)
    true, false = np.cumsum(hits)[ends], np.cumsum(1 - hits)[ends]
    return np.append(0, false) / false[-1], np.append(0, true) / true[-1]
