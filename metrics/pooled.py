"""Binary-AUC over the cells of all images at once, each image counted as often as a draw of the bootstrap holds it.

Shapes: n images, N cells an image, S draws.
"""

import numpy as np

from metrics.intervals import bootstrap_counts

POOLED_DRAWS = 500
"""Of an interval: each is a pass over all cells."""


class PooledAUC:
    """The exact area under the ROC curve of one map's cells of all images, with one threshold for all.

    Cells are sorted once. What a foreground cell wins is the number of background cells below it, ties counted half
    (Mann–Whitney); with images counted several times both sides are weighed by their counts. Sums are of integers, so
    neither batches nor the order of images changes a bit.

    Args:
        scores: (n, N) without NaN.
        foreground, background: (n, N) booleans; cells that take no part are neither.
    """

    def __init__(self, scores: np.ndarray, foreground: np.ndarray, background: np.ndarray) -> None:
        images = np.broadcast_to(np.arange(len(scores))[:, None], scores.shape)
        values, belongs = [], []
        for side in (foreground, background):
            order = np.argsort(scores[side], kind="stable")
            values.append(scores[side][order])
            belongs.append(images[side][order])
        self._foreground, self._background = belongs
        self._below, self._up_to = (np.searchsorted(values[1], values[0], end) for end in ("left", "right"))

    def __call__(self, counts: np.ndarray) -> np.ndarray:
        """(S, n) integers, how often each draw holds each image, to (S); NaN where a draw lacks one of the sides."""
        return np.array([self._weighed(draw) for draw in counts])

    def _weighed(self, counts: np.ndarray) -> float:
        foreground, background = counts[self._foreground], counts[self._background]
        ends = np.append(0, np.cumsum(background))
        wins = int(foreground @ (ends[self._below] + ends[self._up_to]))  # twice
        pairs = 2 * int(foreground.sum()) * int(background.sum())
        return wins / pairs if pairs else float("nan")

    def bootstrap(self, chosen: np.ndarray, draws: int = POOLED_DRAWS, seed: int = 0) -> np.ndarray:
        """(S) draws of the images that ``chosen`` (n) names, by :func:`bootstrap_counts`; no draw of none."""
        parts = [np.empty(0)]
        if not chosen.any():
            return parts[0]
        for counts in bootstrap_counts(int(chosen.sum()), draws, seed):
            every = np.zeros((len(counts), len(chosen)), counts.dtype)
            every[:, chosen] = counts
            parts.append(self(every))
        return np.concatenate(parts)
