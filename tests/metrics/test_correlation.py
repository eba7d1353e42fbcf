"""Correlations against scipy, and their intervals."""

import numpy as np
import pytest
from scipy import stats

from metrics import correlation, mean_correlation
from metrics.correlation import centred, pearson, spearman


@pytest.mark.parametrize("n", [4, 9, 31])
@pytest.mark.parametrize("ties", [False, True])
def test_coefficients(n, ties):
    rng = np.random.default_rng(n)
    x, y = rng.normal(size=n), rng.normal(size=n)
    x, y = (np.round(x), np.round(y + x)) if ties else (x, y + x)
    x[0] += 1  # neither is one value alone
    found = correlation(x, y)
    assert found.n == n
    assert found.pearson.value == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-12)
    assert found.spearman.value == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    both = np.stack([x, y]), np.stack([y, y])
    np.testing.assert_allclose(pearson(*both), [found.pearson.value, 1])
    np.testing.assert_allclose(spearman(*both), [found.spearman.value, 1])


def test_interval_is_that_of_resampled_points():
    rng = np.random.default_rng(1)
    x = rng.normal(size=25)
    y = x + rng.normal(size=25)
    found = correlation(x, y, draws=4000)
    for of, ours in ((stats.pearsonr, found.pearson), (stats.spearmanr, found.spearman)):
        theirs = stats.bootstrap(
            (x, y), lambda a, b, of=of: of(a, b).statistic, paired=True, vectorized=False, n_resamples=1500,
            method="percentile", rng=np.random.default_rng(2),
        ).confidence_interval  # fmt: skip
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.05)
    assert correlation(x, y, draws=4000) == found  # the draws are a function of n and the seed


def test_interval_covers_the_truth():
    """Of 300 sets of 40 points with r = 0.6, in about 95 %."""
    rng, hits = np.random.default_rng(3), 0
    for _ in range(300):
        x = rng.normal(size=40)
        y = 0.6 * x + 0.8 * rng.normal(size=40)
        found = correlation(x, y, draws=300).pearson
        hits += found.low <= 0.6 <= found.high
    assert 0.89 <= hits / 300 <= 0.98


def test_a_mean_over_runs_is_students():
    rng = np.random.default_rng(4)
    runs = np.repeat(np.arange(5), 7).tolist()
    x = rng.normal(size=35)
    y = x + rng.normal(size=35)
    each = [stats.spearmanr(x[i : i + 7], y[i : i + 7]).statistic for i in range(0, 35, 7)]
    found = mean_correlation(x, y, runs)
    low, high = stats.ttest_1samp(each, 0).confidence_interval(0.95)
    assert found.n == 35 and found.spearman == pytest.approx((np.mean(each), low, min(high, 1)))
    assert mean_correlation(x[:7], y[:7], runs[:7]).spearman == (pytest.approx(each[0]), None, None)
    groups = np.tile([0, 0, 0, 1, 1, 1, 1], 5).tolist()
    inside = [
        stats.pearsonr(centred(x[i : i + 7], groups[:7]), centred(y[i : i + 7], groups[:7])).statistic
        for i in range(0, 35, 7)
    ]
    assert mean_correlation(x, y, runs, groups).pearson.value == pytest.approx(np.mean(inside))


def test_points_of_one_run_may_hang_together():
    """Scores that have nothing to do with each other, points of a run that walk: one in twenty is told, not more."""
    rng, told = np.random.default_rng(5), 0
    runs = np.repeat(np.arange(5), 12).tolist()
    for _ in range(400):
        x, y = rng.normal(size=(2, 5, 12)).cumsum(-1).reshape(2, 60)
        found = mean_correlation(x, y, runs).spearman
        told += found.low > 0 or found.high < 0
    assert 0.02 <= told / 400 <= 0.08


def test_within_groups():
    """Two groups apart: together they rise, within each they fall."""
    x = np.array([0.0, 1, 2, 10, 11, 12, 40])
    y = np.array([2.0, 1, 0, 12, 11, 10, -90])
    groups = ["a", "a", "a", "b", "b", "b", "alone"]
    assert centred(x, groups).tolist() == [-1, 0, 1, -1, 0, 1, 0]
    assert correlation(x[:6], y[:6]).pearson.value > 0.9
    found = correlation(x, y, groups)
    assert found.n == 6 and found.pearson == pytest.approx((-1, -1, -1)) and found.spearman.value == pytest.approx(-1)


def test_what_cannot_be_told():
    nothing = (None, None, None)
    three = correlation(np.array([1.0, 2, 3]), np.array([2.0, 4, 5]))
    assert three.spearman == (1.0, None, None) and three.pearson.low is None
    assert correlation(np.array([1.0, 2]), np.array([2.0, 4])).pearson == nothing
    assert correlation(np.ones(9), np.arange(9)).pearson == nothing
    pairs = correlation(np.arange(6.0), np.array([0.0, 1, 1, 2, 5, 6]), [0, 0, 1, 1, 2, 2])
    assert pairs.n == 6 and pairs.pearson.value is not None
    assert correlation(np.arange(4.0), np.arange(4.0), [0, 0, 1, 1]).pearson.low is None  # three free points
    assert correlation(np.arange(3.0), np.arange(3.0), [0, 1, 2]) == (0, nothing, nothing)
    with pytest.raises(ValueError, match="a score is NaN"):
        correlation(np.array([1.0, np.nan]), np.array([1.0, 2.0]))
    with pytest.raises(ValueError, match=r"found \(2,\) and \(3,\)"):
        correlation(np.ones(2), np.ones(3))
