"""Correlation of two scores over points, with intervals over points or over runs.

Points that share a run, such as the layers of a network, are not independent of each other: what is said of them is
told run by run (:func:`mean_correlation`). Shapes: n points, S draws.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata

from metrics.effects import mean_interval
from metrics.intervals import DRAWS, LEVEL

FEWEST = 4
"""Points that an interval wants."""


class Coefficient(NamedTuple):
    """One coefficient with its interval; what cannot be told is None."""

    value: float | None
    low: float | None = None
    high: float | None = None


class Correlation(NamedTuple):
    """How two scores go together."""

    n: int
    pearson: Coefficient
    spearman: Coefficient


def pearson(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(..., n) twice to Pearson's r (...); NaN where one of them does not vary."""
    x, y = (np.asarray(v, dtype=np.float64) for v in (x, y))
    flat = (np.ptp(x, -1) == 0) | (np.ptp(y, -1) == 0)
    x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
    scale = np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    return np.where(flat, np.nan, (x * y).sum(-1) / np.where(scale > 0, scale, 1))


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The same of the ranks: Spearman's ρ."""
    return pearson(rankdata(x, axis=-1), rankdata(y, axis=-1))


def centred(values: np.ndarray, groups: Sequence[Hashable]) -> np.ndarray:
    """(n) less the mean of each value's group."""
    values, found = np.asarray(values, dtype=np.float64), np.empty(len(values))
    for group in dict.fromkeys(groups):
        mine = np.array([g == group for g in groups])
        found[mine] = values[mine] - values[mine].mean()
    return found


def correlation(
    x: np.ndarray,
    y: np.ndarray,
    groups: Sequence[Hashable] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> Correlation:
    """Pearson's r and Spearman's ρ over n independent points, each with a percentile interval over resampled points.

    With ``groups`` it is the correlation within: both are centred in each group first, and a group of one point, which
    says nothing then, takes no part. Draws in which a score does not vary are left out.

    Args:
        x, y: (n).
        groups: of each point, or None.
        draws: S; 0 for no interval.
        seed: of the draws.
        level: of the interval.

    Returns:
        With fewer than FEWEST free points (n less the groups and one) no interval, and with fewer than 3, or where a
        score does not vary, no coefficient.

    Raises:
        ValueError: where the numbers of points differ, or a score is NaN.
    """
    x, y = _scores(x, y)
    free = len(x)
    if groups is not None:
        sizes = {group: sum(g == group for g in groups) for group in groups}
        kept = [size > 1 for size in map(sizes.__getitem__, groups)]
        x, y, groups = x[kept], y[kept], [g for g, keep in zip(groups, kept, strict=True) if keep]
        x, y = centred(x, groups), centred(y, groups)
        free = len(x) - len(set(groups)) + 1 if len(x) else 0
    told = free >= FEWEST and draws > 0
    rows = np.random.default_rng([seed, len(x)]).integers(len(x), size=(draws, len(x))) if told else None

    def coefficient(of: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Coefficient:
        value = float(of(x, y)) if free >= 3 else np.nan
        if np.isnan(value):
            return Coefficient(None)
        if rows is None:
            return Coefficient(value)
        found = np.concatenate([of(x[part], y[part]) for part in np.array_split(rows, 20)])
        low, high = np.nanquantile(found, [(1 - level) / 2, (1 + level) / 2])
        return Coefficient(value, float(low), float(high))

    return Correlation(len(x), coefficient(pearson), coefficient(spearman))


def mean_correlation(
    x: np.ndarray,
    y: np.ndarray,
    runs: Sequence[Hashable],
    groups: Sequence[Hashable] | None = None,
    level: float = LEVEL,
) -> Correlation:
    """The coefficients of each run's points by themselves; their mean over runs, with an interval by Student's t.

    Points of one run may hang together as they like. The interval holds for other runs of the same kind, so what all
    runs have in common, such as the models that were compared, is taken as given.

    Args:
        x, y: (n).
        runs: of each point the run, such as its seed.
        groups: of each point; both scores are centred in each group of a run first.
        level: of the interval.

    Returns:
        With fewer than two runs that have a coefficient no interval, and without any no coefficient.

    Raises:
        ValueError: as :func:`correlation`.
    """
    x, y = _scores(x, y)
    found = []
    for run in dict.fromkeys(runs):
        mine = np.array([one == run for one in runs])
        of = None if groups is None else [group for group, keep in zip(groups, mine, strict=True) if keep]
        found.append(correlation(x[mine], y[mine], of, draws=0))

    def coefficient(values: list[float]) -> Coefficient:
        if not values:
            return Coefficient(None)
        mean = float(np.mean(values))
        if len(values) < 2:
            return Coefficient(mean)
        low, high = mean_interval(values, level)
        return Coefficient(mean, max(low, -1.0), min(high, 1.0))

    pearsons, spearmans = (
        [c.value for c in kind if c.value is not None] for kind in zip(*(f[1:] for f in found), strict=True)
    )
    return Correlation(sum(one.n for one in found), coefficient(pearsons), coefficient(spearmans))


def _scores(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"correlation wants two scores (n) of the same points; found {x.shape} and {y.shape}")
    if np.isnan(x).any() or np.isnan(y).any():
        raise ValueError("correlation: a score is NaN; leave out points that were not scored")
    return x, y
