"""The images that score least and most, one process or several."""

import math

import numpy as np

from lightning_modules.extremes import Extremes
from tests.processes import run_ranks

SCORES = {f"image{i}": score for i, score in enumerate([0.5, 0.9, 0.1, math.nan, 0.5, 0.7, 0.2, 0.95, 0.3])}
WORST, BEST = ["image2", "image6", "image8"], ["image7", "image1", "image5"]


def kept(rank, shares):
    extremes, made = Extremes(3), []
    for key in shares[rank]:
        extremes.offer(SCORES[key], key, lambda key=key: made.append(key) or {"image": np.array(int(key[5:]))})
    found = extremes.arrays()
    return made, {name: value.tolist() for name, value in found.items()}


def test_worst_and_best_are_kept_and_only_their_pictures_are_made():
    made, found = kept(0, [list(SCORES)])
    assert [found[f"worst{i}_key"] for i in range(3)] == WORST and [found[f"best{i}_key"] for i in range(3)] == BEST
    assert found["worst0_score"] == 0.1 and found["best0_image"] == 7 and "worst3_key" not in found
    assert "image3" not in made and made.count("image7") == 1


def test_processes_do_not_matter():
    """Three, one of them without images."""
    alone = kept(0, [list(SCORES)])[1]
    shares = [[*SCORES][:4], [], [*SCORES][4:]]
    assert all(found == alone for _, found in run_ranks(kept, 3, shares))
