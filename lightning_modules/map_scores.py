"""What the maps on one grid score against the masks, by each way of comparing them.

Shapes: B images, n images of all processes, K maps an image, h x w their grid, N = h·w.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from common.collectives import gather_rows
from common.precision import exact
from lightning_modules.maps import SCORES
from metrics import BinaryAUC, Comparison, PooledAUC, bootstrap_means, difference_of, interval, sides

POOLED = "pooled"
Way = Comparison | Literal["pooled"]
"""``grid``, ``area``, ``mask``: the mean over images of :func:`metrics.binary_auc`; ``pooled``: all images' cells at
once, :class:`metrics.PooledAUC`."""
WAYS: tuple[Way, ...] = ("grid", "area", "mask", "pooled")

DIFFERENCE = ("difference", "difference_low", "difference_high", "difference_p", "difference_images")

Scores = list[dict[str, Any]]
"""Of each map."""


def check_ways(ways: Sequence[Way]) -> None:
    """ValueError for unknown ways, repeated ones, none, or a first one without a score of each image."""
    if not ways or any(way not in WAYS for way in ways) or len(set(ways)) < len(ways):
        raise ValueError(f"model.init_args.compare={list(ways)}; allowed: some of {', '.join(WAYS)}, each once")
    if ways[0] == POOLED:
        raise ValueError(
            f"model.init_args.compare={list(ways)}: {POOLED} has no score of each image; name another first"
        )


class GridScores(nn.Module):
    """Scores of K maps on one grid, each in several ways.

    Args:
        grid: (h, w).
        num_maps: K.
        ignore_index: id in the masks that takes no part.
        ways: the first is what the others are compared with.
    """

    def __init__(self, grid: tuple[int, int], num_maps: int, ignore_index: int, ways: Sequence[Way]) -> None:
        super().__init__()
        self.grid, self.num_maps, self.ignore_index, self.ways = grid, num_maps, ignore_index, tuple(ways)
        self.metrics = nn.ModuleDict(
            {way: BinaryAUC(num_maps, ignore_index, cast(Comparison, way)) for way in ways if way != POOLED}
        )
        self._reset()

    def _reset(self) -> None:
        self._aucs: dict[str, list[Tensor]] = {way: [] for way in self.metrics}  # (B, K) of each batch
        self._cells: list[Tensor] = []  # (B, K, N) of each batch
        self._sides: list[Tensor] = []  # (B, N): 1 foreground, 0 background, -1 neither

    def update(self, scores: Tensor, masks: Tensor) -> None:
        """Scores (B, K, h, w) and masks (B, H, W), as :func:`metrics.binary_auc`."""
        for way, metric in self.metrics.items():
            metric.update(scores, masks)
            self._aucs[way].append(metric.last)
        if POOLED in self.ways:
            foreground, background = sides(masks, self.grid, self.ignore_index, "grid")
            self._cells.append(exact(scores.flatten(2)))
            self._sides.append(foreground.to(torch.int8) - (~foreground & ~background).to(torch.int8))

    @property
    def _device(self) -> torch.device:
        return cast(BinaryAUC, self.metrics[self.ways[0]]).device

    def _gathered(self, parts: list[Tensor], *shape: int, dtype: torch.dtype = torch.float64) -> np.ndarray:
        """Rows of all batches and processes; a process may have none."""
        empty = exact(torch.zeros(0, *shape, device=self._device)).to(dtype)
        return gather_rows(torch.cat(parts or [empty])).cpu().numpy()

    def compute(self, order: np.ndarray) -> tuple[dict[Way, Scores], dict[Way, np.ndarray]]:
        """Scores of each way, and AUC (n, K) of every image by those that have one, NaN where skipped; starts anew.

        Args:
            order: (n) which of the images of all processes comes first, and so on; the draws of intervals go by it.
        """
        images = {way: self._gathered(self._aucs[way], self.num_maps)[order] for way in self.ways if way != POOLED}
        first = images[self.ways[0]]
        found: dict[Way, Scores] = {}
        for way in self.ways:
            found[way] = self._of_cells(order, first) if way == POOLED else self._of_images(way, images[way], first)
        self._reset()
        return found, images

    def _of_images(self, way: Way, aucs: np.ndarray, first: np.ndarray) -> Scores:
        """The metric's three forms, the interval of the mean, and how the mean differs from the first way's."""
        metric = self.metrics[way]
        values = {k: v.reshape(-1) for k, v in metric.compute().items()}  # torchmetrics squeezes a single map's
        metric.reset()
        draws = _draws(aucs)
        rows: Scores = [
            {kind: values[kind][k].item() for kind in SCORES}
            | _ends(draws[:, k])
            | {"images": int(values["images"]), "skipped": int(values["skipped"]), "compare": way}
            for k in range(self.num_maps)
        ]
        if way != self.ways[0]:
            beside = aucs - first
            both, apart = ~np.isnan(beside[:, 0]), _draws(beside)
            for k, row in enumerate(rows):
                row |= _difference(_mean(beside[both, k]), apart[:, k], both)
        elif len(self.ways) > 1:  # tables have the same columns in every row
            rows = [row | dict.fromkeys(DIFFERENCE) for row in rows]
        return rows

    def _of_cells(self, order: np.ndarray, first: np.ndarray) -> Scores:
        """Of all images' cells at once, and how it differs from the mean of those images that the first way scored."""
        cells = math.prod(self.grid)
        scores = self._gathered(self._cells, self.num_maps, cells)[order]
        side = self._gathered(self._sides, cells, dtype=torch.int8)[order]
        there = (side >= 0).any(1)
        both = there & ~np.isnan(first[:, 0])
        found: Scores = []
        for k in range(self.num_maps):
            pooled = PooledAUC(scores[:, k], side == 1, side == 0)
            auc, auc_of_both = pooled(np.stack([there, both]).astype(np.int64)).tolist()
            draws = pooled.bootstrap(there)
            of_both = draws if both.sum() == there.sum() else pooled.bootstrap(both)
            means = bootstrap_means(first[both, k], len(of_both))[:, 0] if both.any() else of_both
            found.append(
                {"auc": auc, "auc_normalized": None, "auc_of_mean_normalized": max(auc, 1 - auc), **_ends(draws)}
                | {"images": int(there.sum()), "skipped": int((~there).sum()), "compare": POOLED}
                | _difference(auc_of_both - _mean(first[both, k]), of_both - means, both)
            )
        return found


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _draws(values: np.ndarray) -> np.ndarray:
    """(S, K) means of values (n, K) of images, without those that have none; no draw where none has."""
    there = ~np.isnan(values[:, 0])
    return bootstrap_means(values[there]) if there.any() else np.empty((0, values.shape[1]))


def _ends(draws: np.ndarray) -> dict[str, float]:
    """Columns of the interval of a map's mean AUC, from its draws (S), NaN where one of a few images has no AUC."""
    draws = draws[~np.isnan(draws)]
    low, high = interval(draws) if len(draws) else (np.nan, np.nan)
    return {"auc_low": float(low), "auc_high": float(high)}


def _difference(mean: float, draws: np.ndarray, both: np.ndarray) -> dict[str, Any]:
    """Columns of a way's difference from the first, from its draws over the images that both scored."""
    draws = draws[~np.isnan(draws)]
    found = difference_of(mean, draws) if len(draws) else [float("nan")] * 4
    return dict(zip(DIFFERENCE, (*found, int(both.sum())), strict=True))
