"""Differences between means of a few independent runs: intervals by Student's t, effect sizes by Hedges.

A run is a seed; n runs of each of two models.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95


class Effect(NamedTuple):
    """By how much a mean is above another."""

    difference: float
    low: float
    high: float
    """Ends of its interval; NaN where a side has a single run."""
    g: float
    """Hedges' g: the difference in units of the runs' standard deviation (the root of the mean of both variances),
    corrected for their small number (Hedges 1981); infinite or NaN where runs do not differ."""


def mean_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """The ends of the interval of a mean of n runs by Student's t; NaN for one run."""
    n = len(values)
    if n < 2:
        return float("nan"), float("nan")
    mean = float(np.mean(values))
    half = float(np.std(values, ddof=1) / n**0.5 * stats.t.ppf((1 + level) / 2, n - 1))
    return mean - half, mean + half


def effect(a: Sequence[float], b: Sequence[float], paired: bool, level: float = LEVEL) -> Effect:
    """How far the mean of ``a`` is above that of ``b``.

    Args:
        a, b: a value a run.
        paired: whether run i of both belong together, as one model before and after training do: the interval is that
            of the mean of the differences. Else it is Welch's (1947), for two variances that need not be equal.
        level: of the interval.

    Raises:
        ValueError: there is no run, or paired runs are not equally many.
    """
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if not len(a) or not len(b) or (paired and len(a) != len(b)):
        raise ValueError(
            f"effect wants runs of both sides, equally many where they are pairs; found {len(a)}, {len(b)}"
        )
    difference = float(a.mean() - b.mean())
    if min(len(a), len(b)) < 2:
        return Effect(difference, float("nan"), float("nan"), float("nan"))
    variances = a.var(ddof=1), b.var(ddof=1)
    low, high = mean_interval((a - b).tolist(), level) if paired else _welch(a, b, level)
    deviation = float(np.sqrt(sum(variances) / 2))
    correction = 1 - 3 / (4 * (len(a) + len(b) - 2) - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        g = float(correction * np.float64(difference) / deviation)
    return Effect(difference, low, high, g)


def _welch(a: np.ndarray, b: np.ndarray, level: float) -> tuple[float, float]:
    """Ends of Welch's interval of the difference of two means."""
    parts = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    difference, total = float(a.mean() - b.mean()), float(sum(parts))
    if total == 0:
        return difference, difference
    freedom = total**2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
    half = float(total**0.5 * stats.t.ppf((1 + level) / 2, freedom))
    return difference - half, difference + half
