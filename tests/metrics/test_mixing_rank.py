"""Ranks on matrices whose ranks are known, and the bounds on the matrices of real mixers."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from backbones.ops import ssd_decay, ssd_matrix
from metrics.block_rank import chunks
from metrics.mixing_rank import effective_rank, numerical_rank, rank_bound, singular_values


@pytest.mark.parametrize("rank", [0, 1, 3, 7])
@pytest.mark.parametrize("shape", [(7, 7), (9, 7), (7, 20)])
def test_known_ranks(rank, shape):
    g = torch.Generator().manual_seed(rank)
    a, b = (torch.randn(4, side, rank, generator=g, dtype=torch.float64) for side in shape)
    matrix = a @ b.mT
    values = singular_values(matrix)
    np.testing.assert_allclose(values, np.linalg.svd(matrix.numpy(), compute_uv=False), atol=1e-12)
    assert (numerical_rank(values) == rank).all()
    assert [np.linalg.matrix_rank(m) for m in matrix.numpy()] == [rank] * 4


def test_effective_rank():
    assert effective_rank(singular_values(torch.eye(5))).item() == pytest.approx(5)
    assert effective_rank(singular_values(torch.ones(5, 6))).item() == pytest.approx(1, abs=1e-6)
    assert effective_rank(singular_values(torch.zeros(3, 3))).item() == 0
    p = np.array([0.5, 0.3, 0.2])
    assert effective_rank(torch.tensor(p * 7)).item() == pytest.approx(math.exp(-(p * np.log(p)).sum()))


def test_tolerance_is_relative():
    values = torch.tensor([100.0, 2.0, 0.5, 0.0])
    assert [numerical_rank(values, t).item() for t in (0.0, 0.01, 0.03)] == [3, 2, 1]
    with pytest.raises(ValueError, match=r"tolerance=1.0"):
        numerical_rank(values, 1.0)


@pytest.mark.parametrize(("length", "chunk"), [(12, 4), (13, 4), (5, 5), (3, 1)])
def test_chunks_are_the_whole(length, chunk):
    whole, rest = chunks(length, chunk)
    tokens = list(range(length))
    assert [tokens[part] for part in whole] == [tokens[i : i + chunk] for i in tokens[::chunk] if i + chunk <= length]
    assert (tokens[rest] if rest else []) == tokens[len(whole) * chunk :]
    for wrong in (0, length + 1):
        with pytest.raises(ValueError, match=rf"chunk={wrong}.*1\.\.{length}"):
            chunks(length, wrong)


@pytest.mark.parametrize("n", [2, 5])
def test_decay_blocks_are_outer_products(n):
    """Off the diagonal the decay mask has rank exactly 1, and M's blocks at most n: not n times something."""
    g = torch.Generator().manual_seed(n)
    b, length, h, chunk = 2, 33, 3, 8
    dt = F.softplus(torch.randn(b, length, h, generator=g, dtype=torch.float64) - 2)
    A = -torch.rand(h, generator=g, dtype=torch.float64) * 3 - 1
    B, C = (torch.randn(b, length, 1, n, generator=g, dtype=torch.float64) for _ in range(2))
    decay, matrix = ssd_decay(dt, A), ssd_matrix(dt, A, B, C)
    whole, rest = chunks(length, chunk)
    for rows, columns in itertools.product([*whole, rest], repeat=2):
        block = matrix[..., rows, columns]
        ranks = numerical_rank(singular_values(decay[..., rows, columns])), numerical_rank(singular_values(block))
        shape = tuple(block.shape[-2:])
        if rows.start > columns.start:
            assert (ranks[0] == 1).all()
            assert (ranks[1] == rank_bound(shape, n)).all()  # random inputs reach the bound
        elif rows.start < columns.start:
            assert (ranks[0] == 0).all() and (ranks[1] == 0).all()
        else:
            assert (ranks[0] == min(shape)).all() and (ranks[1] <= min(shape)).all()


def test_rank_bound():
    assert rank_bound((8, 5), None) == 5 and rank_bound((8, 5), 3) == 3 and rank_bound((8, 5), 64) == 5
