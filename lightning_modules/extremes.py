"""The images of an evaluation that scored least and most, for pictures."""

import math
from collections.abc import Callable

import numpy as np

from common.collectives import gather_objects

Picture = dict[str, np.ndarray]
SIDE = 320
"""Longest side of a picture, pixels."""


class Extremes:
    """Keeps what is shown of the images with the lowest and the highest scores, over all processes.

    Args:
        count: of each.
    """

    def __init__(self, count: int = 4) -> None:
        self.count = count
        self._kept: dict[str, list[tuple[float, str, Picture]]] = {"worst": [], "best": []}

    def offer(self, score: float, key: str, picture: Callable[[], Picture]) -> None:
        """An image, whose picture is made if it is kept. One without a score (NaN) is not."""
        if math.isnan(score):
            return
        made = None
        for kind, kept in self._kept.items():
            if len(kept) == self.count and not _order(kind, score, key) < _order(kind, *kept[-1][:2]):
                continue
            made = picture() if made is None else made
            kept.append((score, key, made))
            kept.sort(key=lambda one: _order(kind, *one[:2]))
            del kept[self.count :]

    def arrays(self) -> dict[str, np.ndarray]:
        """``worst0_image`` and so on, each with ``worst0_score`` and ``worst0_key``; the most extreme is 0."""
        found: dict[str, np.ndarray] = {}
        parts = gather_objects(self._kept)
        for kind in self._kept:
            every = sorted((one for part in parts for one in part[kind]), key=lambda one: _order(kind, *one[:2]))
            for number, (score, key, picture) in enumerate(every[: self.count]):
                about = {"score": np.float64(score), "key": np.array(key, np.str_)}
                found |= {f"{kind}{number}_{name}": value for name, value in (picture | about).items()}
        return found


def _order(kind: str, score: float, key: str) -> tuple[float, str]:
    return (score if kind == "worst" else -score), key
