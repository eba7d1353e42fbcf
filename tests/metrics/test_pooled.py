"""The AUC of all images' cells at once, and of images drawn again, against sklearn and the slow reference."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from metrics import PooledAUC, binary_auc, bootstrap_counts, interval, sides


def make(images, cells, levels, seed=0):
    """Scores with ties, ids of which some are ignored, and one image of background alone."""
    rng = np.random.default_rng(seed)
    ids = rng.choice([0, 0, 5, 7, 1000], (images, cells))
    ids[1] = 0
    scores = np.round(rng.normal(size=(images, cells)) * levels) + (ids == 5)
    return scores, ids


@pytest.mark.parametrize(("images", "cells", "levels"), [(7, 35, 2), (3, 1, 1), (23, 12, 1000), (40, 9, 0)])
def test_every_draw_is_sklearns_with_the_counts_as_weights(images, cells, levels):
    scores, ids = make(images, cells, levels)
    pooled, kept = PooledAUC(scores, (ids != 0) & (ids != 1000), ids == 0), ids != 1000
    counts = np.concatenate([np.ones((1, images), int), *bootstrap_counts(images, 60)])
    found = pooled(counts)
    for draw, auc in zip(counts, found, strict=True):
        weights = np.repeat(draw[:, None], cells, 1)[kept]
        there = weights > 0
        if len(set((ids != 0)[kept][there])) < 2:
            assert np.isnan(auc)
            continue
        assert auc == pytest.approx(roc_auc_score((ids != 0)[kept], scores[kept], sample_weight=weights), abs=1e-12)
    if images > 3:
        one = torch.from_numpy(scores)[None, None], torch.from_numpy(ids)[None]  # all cells as one image's
        assert found[0] == binary_auc(*one).item()


def test_the_interval_is_that_of_brute_force():
    scores, ids = make(30, 20, 3)
    pooled = PooledAUC(scores, (ids != 0) & (ids != 1000), ids == 0)
    chosen = np.arange(30) % 5 != 2
    wanted = []
    for draw in np.concatenate([*bootstrap_counts(24, 300)]):
        again = np.repeat(np.flatnonzero(chosen), draw)  # an image as often as it was drawn
        kept = ids[again] != 1000
        wanted.append(roc_auc_score((ids[again] != 0)[kept], scores[again][kept]))
    found = pooled.bootstrap(chosen, 300)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
    low, high = interval(found)
    assert low < pooled(chosen[None].astype(int))[0] < high
    assert len(pooled.bootstrap(np.zeros(30, bool))) == 0


def test_the_order_of_images_does_not_change_a_bit():
    scores, ids = make(31, 17, 2)
    parts = scores, (ids != 0) & (ids != 1000), ids == 0
    order = np.random.default_rng(1).permutation(31)
    counts = np.concatenate([*bootstrap_counts(31, 20)])
    assert np.array_equal(PooledAUC(*parts)(counts), PooledAUC(*(part[order] for part in parts))(counts[:, order]))


def test_what_takes_no_part_is_on_neither_side():
    masks = torch.tensor([[[0, 3, 1000, 1]]])
    foreground, background = sides(masks, (1, 4), 1000, "grid")
    assert foreground.tolist() == [[False, True, False, True]] and background.tolist() == [[True, False, False, False]]
