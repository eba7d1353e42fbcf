"""Norms of patches and distances of mixing, against loops over patches."""

import math

import numpy as np
import pytest
import torch

from metrics import grid_diagonal, mixing_distance, norm_statistics, patch_distances, row_entropy, uniform_distance

GRID = (3, 5)


def matrices(*shape, seed=0):
    return torch.randn(*shape, 15, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_distances_by_hand():
    found = patch_distances(GRID)
    for i in range(15):
        for j in range(15):
            assert found[i, j] == pytest.approx(math.dist(divmod(i, 5), divmod(j, 5)), abs=1e-14)
    assert grid_diagonal((3, 4)) == 5


def test_mixing_distance_by_hand():
    M = matrices(2, 3)
    found = mixing_distance(M, GRID)
    for image in range(2):
        for head in range(3):
            means = []
            for i in range(15):
                weights = [abs(float(M[image, head, i, j])) for j in range(15)]
                far = sum(w * math.dist(divmod(i, 5), divmod(j, 5)) for j, w in enumerate(weights))
                means.append(far / sum(weights))
            assert found[image, head].item() == pytest.approx(np.mean(means), abs=1e-12)


def test_mixing_distance_at_its_ends():
    ones = torch.ones(15, 15, dtype=torch.float64)
    assert mixing_distance(ones, GRID).item() == pytest.approx(uniform_distance(GRID), abs=1e-12)
    assert mixing_distance(torch.eye(15), GRID) == 0
    scaled = matrices() * torch.rand(15, 1, dtype=torch.float64)  # how strong a row is does not matter
    torch.testing.assert_close(mixing_distance(scaled, GRID), mixing_distance(-matrices(), GRID))
    empty = matrices()
    empty[4] = 0
    rest = torch.tensor([i for i in range(15) if i != 4])
    weight = empty.abs()
    wanted = ((weight * patch_distances(GRID)).sum(-1) / weight.sum(-1))[rest].mean()
    torch.testing.assert_close(mixing_distance(empty, GRID), wanted)


def test_entropy():
    assert row_entropy(torch.ones(2, 7)).tolist() == pytest.approx([1, 1])
    assert row_entropy(torch.tensor([0.0, -3.0, 0.0])).item() == 0
    weights = np.array([1.0, 2.0, 5.0]) / 8
    wanted = -(weights * np.log(weights)).sum() / math.log(3)
    assert row_entropy(torch.tensor([-1.0, 2.0, 5.0])).item() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("patches", [7, 12])
def test_norms(patches):
    norms = np.random.default_rng(0).gamma(2.0, size=(3, patches)).astype(np.float32)
    norms[1, 2] = 5 * np.median(norms[1])
    found, outliers = norm_statistics(torch.from_numpy(norms), 4.0)
    for name, wanted in {
        "median": np.median(norms.astype(float), 1),
        "q99": np.quantile(norms.astype(float), 0.99, axis=1),
        "max": norms.max(1),
        "outliers": [np.mean([x > 4 * np.median(row.astype(float)) for x in row]) for row in norms],
    }.items():
        np.testing.assert_allclose(found[name].numpy(), wanted, rtol=1e-12)
    assert outliers[1, 2]
