"""Effects of a few runs against scipy's tests, and how often their intervals hold the truth."""

import math

import numpy as np
import pytest
from scipy import stats

from metrics.effects import effect, mean_interval


@pytest.mark.parametrize(("n", "m"), [(5, 5), (3, 7), (2, 2)])
def test_intervals_are_those_of_the_t_tests(n, m):
    rng = np.random.default_rng([n, m])
    a, b = rng.normal(3, 1, n), rng.normal(2, 4, m)
    found = effect(a, b, paired=False)
    wanted = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), rel=1e-9)
    assert found.difference == pytest.approx(a.mean() - b.mean())
    c = rng.normal(0, 1, n)
    wanted = stats.ttest_rel(a, c).confidence_interval(0.9)
    found = effect(a, c, paired=True, level=0.9)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), rel=1e-9)
    wanted = stats.ttest_1samp(a, 0).confidence_interval(0.95)
    assert mean_interval(a.tolist()) == pytest.approx((wanted.low, wanted.high), rel=1e-9)


def test_hedges_g():
    """The worked numbers: means 5 and 2, variances 2.5 and 10, ten runs, correction 1 - 3 / 31."""
    a, b = [3.0, 4, 5, 6, 7], [-2.0, 0, 2, 4, 6]
    assert effect(a, b, paired=False).g == pytest.approx((1 - 3 / 31) * 3 / math.sqrt(6.25))
    assert effect(b, a, paired=True).g == pytest.approx(-(1 - 3 / 31) * 3 / math.sqrt(6.25))


def test_what_one_run_can_tell():
    found = effect([2.0], [1.0], paired=True)
    assert found.difference == 1 and all(math.isnan(v) for v in found[1:])
    assert all(math.isnan(v) for v in mean_interval([1.0]))
    same = effect([1.0, 1.0], [1.0, 1.0], paired=False)
    assert same[:3] == (0, 0, 0) and math.isnan(same.g)
    for a, b in (([], [1.0]), ([1.0], [])):
        with pytest.raises(ValueError, match=f"found {len(a)}, {len(b)}"):
            effect(a, b, paired=False)
    with pytest.raises(ValueError, match="equally many where they are pairs; found 2, 3"):
        effect([1.0, 2.0], [1.0, 2.0, 3.0], paired=True)


def test_intervals_hold_the_truth():
    rng = np.random.default_rng(0)
    held = [
        found.low <= 1 <= found.high
        for found in (effect(rng.normal(1, 1, 5), rng.normal(0, 3, 5), paired=False) for _ in range(1000))
    ]
    assert 0.93 <= np.mean(held) <= 0.97
