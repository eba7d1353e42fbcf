"""Intervals by the bootstrap over images (Efron 1979): how far a mean would move with other images of the same kind.

Shapes: n images, K maps or models scored on the same images, S draws.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

DRAWS = 2000
LEVEL = 0.95
_PART = 256
"""Draws whose counts are held at once."""


def bootstrap_counts(n: int, draws: int = DRAWS, seed: int = 0) -> Iterator[np.ndarray]:
    """How often each of n images is in each of ``draws`` samples of n drawn with replacement: parts (s, n) of all S.

    A function of n and the seed alone, so whatever is made of them on the same images is paired.
    """
    rng = np.random.default_rng([seed, n])
    for start in range(0, draws, _PART):
        yield rng.multinomial(n, np.full(n, 1 / n), min(_PART, draws - start))


def bootstrap_means(values: np.ndarray, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """Means (S, K) of ``draws`` samples of n images, drawn with replacement; every column by the same images.

    The draws are those of :func:`bootstrap_counts`, so columns of several calls on the same images are paired too.

    Args:
        values: (n, K) or (n), without NaN.
        draws: S.
        seed: of the draws.

    Raises:
        ValueError: where there is no image, or a value is NaN.
    """
    values = np.asarray(values, dtype=np.float64)
    values = values[:, None] if values.ndim == 1 else values
    if not len(values):
        raise ValueError("bootstrap_means: there is no image to draw from")
    if np.isnan(values).any():
        raise ValueError("bootstrap_means: values hold NaN; leave out images that were not scored")
    return np.concatenate([counts @ values / len(values) for counts in bootstrap_counts(len(values), draws, seed)])


def interval(means: np.ndarray, level: float = LEVEL) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper ends (K) of the percentile interval of draws (S, K)."""
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return low, high


def folded(low: np.ndarray | float, high: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the interval of max(m, 1 - m) from those of m."""
    low, high = np.asarray(low), np.asarray(high)
    inside = (low <= 0.5) & (high >= 0.5)
    nearer, farther = np.minimum(abs(low - 0.5), abs(high - 0.5)), np.maximum(abs(low - 0.5), abs(high - 0.5))
    return 0.5 + np.where(inside, 0, nearer), 0.5 + farther


class Difference(NamedTuple):
    """What a paired bootstrap says of "A scores higher than B"."""

    mean: float
    low: float
    high: float
    p: float
    """Two-sided: twice the smaller share of draws on one side of 0, at least 1 / S."""


def difference_of(mean: float, draws: np.ndarray, level: float = LEVEL) -> Difference:
    """Of a difference and its draws (S)."""
    low, high = interval(draws[:, None], level)
    share = min((draws <= 0).mean(), (draws >= 0).mean())
    return Difference(mean, float(low[0]), float(high[0]), float(min(1.0, max(2 * share, 1 / len(draws)))))


def paired_difference(
    a: np.ndarray, b: np.ndarray, draws: int = DRAWS, seed: int = 0, level: float = LEVEL
) -> Difference:
    """Of the means of two scores (n) of the same images, in the same order.

    Raises:
        ValueError: as :func:`bootstrap_means`, or where the numbers of images differ.
    """
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"paired_difference wants scores (n) of the same images; found {a.shape} and {b.shape}")
    return difference_of(float((a - b).mean()), bootstrap_means(a - b, draws, seed)[:, 0], level)
