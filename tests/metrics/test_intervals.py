"""Intervals against scipy's bootstrap, and how often they hold the true value."""

import numpy as np
import pytest
import torch
from scipy import stats

from metrics import binary_auc, bootstrap_means, interval, paired_difference


def test_means_are_those_of_images_drawn_again():
    values = np.random.default_rng(0).uniform(size=(40, 3))
    means = bootstrap_means(values, 3000)
    assert means.shape == (3000, 3)
    np.testing.assert_allclose(means.mean(0), values.mean(0), atol=5e-3)
    np.testing.assert_allclose(means.std(0), values.std(0) / np.sqrt(40), rtol=0.06)
    low, high = interval(means)
    peer = stats.bootstrap(
        (values[:, 0],), np.mean, n_resamples=3000, method="percentile", rng=np.random.default_rng(1)
    )
    np.testing.assert_allclose((low[0], high[0]), peer.confidence_interval, atol=5e-3)


def test_columns_are_drawn_together():
    values = np.random.default_rng(0).uniform(size=50)
    both = bootstrap_means(np.stack([values, 1 - values], 1), 300)
    np.testing.assert_allclose(both.sum(1), 1)
    np.testing.assert_allclose(
        both[:, :1], bootstrap_means(values, 300), rtol=1e-12
    )  # by the same images in another call


def test_a_paired_difference():
    rng = np.random.default_rng(0)
    base = rng.normal(size=200)
    better = base + 0.1 + rng.normal(scale=0.05, size=200)
    found = paired_difference(better, base)
    assert found.low < found.mean < found.high and found.low > 0.08 and found.p == 1 / 2000
    apart = interval(bootstrap_means(better))[0] < interval(bootstrap_means(base))[1]
    assert apart.all()  # though the two intervals overlap
    same = paired_difference(base, base + rng.normal(scale=0.05, size=200))
    assert same.low < 0 < same.high and same.p > 0.05
    with pytest.raises(ValueError, match="of the same images"):
        paired_difference(base, base[:-1])
    with pytest.raises(ValueError, match="NaN"):
        bootstrap_means(np.array([0.5, np.nan]))


def synthetic(sets, images, cells, foreground, rng):
    """AUC (sets, images) of maps of independent normal scores, foreground higher by an image's own shift.

    The true mean is that of Phi(shift / sqrt 2) over shifts from N(0.6, 0.5).
    """
    shift = rng.normal(0.6, 0.5, (sets, images, 1))
    scores = rng.normal(size=(sets, images, cells))
    scores[..., :foreground] += shift
    masks = torch.zeros(sets * images, 1, cells, dtype=torch.int64)
    masks[..., :foreground] = 1
    auc = binary_auc(torch.from_numpy(scores).view(sets * images, 1, 1, cells), masks)
    return auc.view(sets, images).numpy()


@pytest.mark.parametrize("images", [60, 200])
def test_intervals_cover_the_true_value(images):
    """In 92 to 98 % of 1,000 sets with known AUC."""
    rng = np.random.default_rng(images)
    true = stats.norm.cdf(0.6 / np.sqrt(2 + 0.5**2))  # E Phi(s / sqrt 2) for normal s
    aucs = np.concatenate([synthetic(100, images, 36, 9, rng) for _ in range(10)])
    low, high = interval(bootstrap_means(aucs.T, 1000))
    assert 0.92 <= ((low <= true) & (true <= high)).mean() <= 0.98
