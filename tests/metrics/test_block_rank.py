"""Ranks of blocks against NumPy's, the lemmas on matrices of known rank and of real mixers, and what breaks them."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from backbones.ops import ssd_decay, ssd_log_decay, ssd_matrix
from metrics.block_rank import FIELDS, block_ranks, chunks, decay_block, pairs, triangle
from metrics.mixing_rank import numerical_rank, rank_threshold, singular_values
from metrics.rank_claims import rank_claims


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scan(length, n, scale=1.0, seed=0):
    """dt, A, B, C of one head, decays stronger by ``scale``."""
    dt = F.softplus(normal(1, length, 1, seed=seed) - 2) * scale
    return dt, -torch.ones(1, dtype=torch.float64) * 3, *(normal(1, length, 1, n, seed=seed + s) for s in (1, 2))


@pytest.mark.parametrize("shape", [(7, 7), (9, 7), (7, 20)])
def test_the_default_tolerance_is_numpys(shape):
    """Singular values from 1 to 1e-17: counted as NumPy counts them, in any scale."""
    size = min(shape)
    u, v = (torch.linalg.qr(normal(side, size, seed=side)).Q for side in shape)
    matrix = u * torch.logspace(0, -17, size, dtype=torch.float64) @ v.mT
    rank = np.linalg.matrix_rank(matrix.numpy())
    assert 1 < rank < size or shape == (9, 7)
    for scale in (1, 1e-200, 1e200):
        assert numerical_rank(singular_values(matrix * scale), size=max(shape)) == rank
    assert numerical_rank(singular_values(torch.zeros(shape)), size=max(shape)) == 0


def test_numbers_without_digits_count_as_zero():
    """A matrix of rank 1 whose entries lie below the smallest normal number: rounding gives it more, which is no rank."""
    a, b = normal(30, 1).abs(), normal(1, 30, seed=1).abs()
    tiny = (a @ b) * 1e-320
    assert np.linalg.matrix_rank(tiny.numpy() * 1e300) > 1 and numerical_rank(singular_values(tiny)) == 0
    assert rank_threshold(singular_values(torch.ones(30, 30))).item() == pytest.approx(900 * np.finfo(float).eps)


@pytest.mark.parametrize(
    ("length", "chunk", "side"), [(13, 4, "lower"), (13, 4, "upper"), (13, 4, "both"), (12, 4, "lower")]
)
def test_blocks_against_numpy(length, chunk, side):
    """Every field by a loop over NumPy's blocks; the last, smaller ones only in a field of their own."""
    matrix = triangle(normal(2, length, 3) @ normal(2, 3, length, seed=1), side)
    found = block_ranks(matrix, chunk, side, 3)
    assert set(found) == {*FIELDS, "values"}
    count, edges = length // chunk, [*range(0, length, chunk), length]
    for k, M in enumerate(matrix.numpy()):
        on, off, ragged = [], [], []
        for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False)):
            for j, (c, d) in enumerate(zip(edges, edges[1:], strict=False)):
                if {"lower": i < j, "upper": i > j, "both": False}[side]:
                    assert not M[a:b, c:d].any()
                    continue
                whole = i < count and j < count
                if whole or i != j:
                    (ragged if not whole else on if i == j else off).append(np.linalg.matrix_rank(M[a:b, c:d]))
        assert [found[f"diagonal_rank_{w}"][k].item() for w in ("min", "max")] == [min(on), max(on)]
        assert [found[f"block_rank_{w}"][k].item() for w in ("min", "max")] == [min(off), max(off)] == [3, 3]
        assert found["rank"][k] == np.linalg.matrix_rank(M)
        assert found["ragged_rank_max"][k].item() == max(ragged) if ragged else found["ragged_rank_max"].isnan().all()
        assert found["block_beyond"][k] < 1e-14
    assert found["lower_bound_slack"].isnan().all() == found["diagonal_nonzero"].isnan().all() == (side == "both")


def test_ragged_chunk():
    """1,026 tokens in chunks of 256: four whole chunks and two tokens, which only the lower bound counts with them."""
    whole, rest = chunks(1026, 256)
    assert len(whole) == 4 and rest == slice(1024, 1026) and chunks(1024, 256)[1] is None
    assert len(pairs(whole, "lower")) == len(pairs(whole, "upper")) == 6 and len(pairs(whole, "both")) == 12
    assert all(rows.start > columns.start for rows, columns in pairs(whole, "lower"))
    found = block_ranks(torch.eye(9, dtype=torch.float64) * 2, 4, "lower", None)
    assert found["lower_bound_slack"] == 0 and found["rank"] == 9 and found["diagonal_rank_min"] == 4
    assert found["ragged_rank_max"] == 0
    with pytest.raises(ValueError, match=r"chunk=10: the matrix has 9 tokens, allowed are 1\.\.9"):
        block_ranks(torch.eye(9), 10, "lower", None)
    alone = block_ranks(torch.eye(9), 9, "both", None)
    assert alone["block_rank_max"].isnan() and alone["ragged_rank_max"].isnan() and alone["diagonal_rank_max"] == 9


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_decay_blocks_have_rank_one_in_any_scale(scale):
    """Also where decays fall below float64's smallest number: the mask's block by itself has lost its rank there."""
    length, n, chunk = 96, 3, 24
    dt, A, B, C = scan(length, n, scale)
    a = ssd_log_decay(dt, A)
    decay, M = ssd_decay(dt, A), ssd_matrix(dt, A, B, C)
    whole, _ = chunks(length, chunk)
    for rows, columns in pairs(whole, "lower"):
        block = decay_block(a, rows, columns)
        assert block.max() == 1 and numerical_rank(singular_values(block)).eq(1).all()
        factor = (a[..., rows].max() - a[..., columns].min()).exp()
        torch.testing.assert_close(block * factor, decay[..., rows, columns], rtol=1e-10, atol=1e-300)
        torch.testing.assert_close(decay_block(a, rows, rows), decay[..., rows, rows], rtol=1e-12, atol=0)
    scores = torch.einsum("brgn,blgn->bgrl", C, B) * dt.transpose(1, 2)[:, :, None, :]

    def off(rows, columns):
        return scores[..., rows, columns] * decay_block(a, rows, columns)

    found = block_ranks(M, chunk, "lower", n, off, lambda r, c: decay_block(a, r, c))
    assert found["decay_rank_min"] == found["decay_rank_max"] == 1 and found["decay_diagonal_rank_min"] == chunk
    assert 1 <= found["block_rank_min"] <= found["block_rank_max"] <= n and found["block_beyond"] < 1e-15
    if scale == 30.0:
        assert (decay[..., whole[3], whole[0]] == 0).any()
        assert block_ranks(M, chunk, "lower", n)["block_rank_min"] == 0  # cut from M, a block is lost
    # the other direction: the same tokens in reverse
    flipped = block_ranks(
        M.flip(-1, -2),
        chunk,
        "upper",
        n,
        lambda r, c: decay_block(a.flip(-1), r, c, "upper") * scores.flip(-1, -2)[..., r, c],
    )
    assert flipped["block_rank_max"] == found["block_rank_max"] and flipped["rank"] == found["rank"]


def test_softmax_with_a_causal_mask_is_full_on_the_diagonal():
    """And full off it: nothing but C bounds it. Bringing its rows back to a sum of 1 changes no rank."""
    q, k = normal(1, 48, 4), normal(1, 48, 4, seed=1)
    M = triangle((q @ k.mT / 2).softmax(-1), "lower")
    for matrix in (M, M / M.sum(-1, keepdim=True)):
        found = block_ranks(matrix, 16, "lower", None)
        assert found["diagonal_rank_min"] == found["block_rank_min"] == found["block_rank_max"] == 16
        assert found["diagonal_nonzero"] == 48 and found["lower_bound_slack"] == 0
    linear = q.softmax(-1) @ k.softmax(-2).mT
    assert block_ranks(linear, 16, "both", 4)["diagonal_rank_max"] == 4
    masked = block_ranks(triangle(linear, "lower"), 16, "lower", 4)
    assert masked["diagonal_rank_min"] == 16 and masked["block_rank_max"] == 4 and masked["rank"] == 48


def test_the_lower_bound_can_be_exceeded_and_needs_the_triangle():
    """Rank 1 on neither diagonal block but rank 2 in all; and a full matrix of rank 1 whose blocks add up to more."""
    M = torch.zeros(4, 4, dtype=torch.float64)
    M[2, 0] = M[3, 1] = M[0, 0] = 1
    found = block_ranks(M, 2, "lower", None)
    assert found["rank"] == 2 and found["lower_bound_slack"] == 1 and found["diagonal_nonzero"] == 1
    assert block_ranks(torch.ones(4, 4), 2, "both", None)["lower_bound_slack"].isnan()
    full = block_ranks(torch.ones(4, 4), 2, "lower", None)  # a wrong claim of a triangle is seen
    assert full["lower_bound_slack"] == -1


def row(**changes):
    """A line of TokenMixingRanks that all algebra holds of."""
    return {
        "direction": "forward", "tokens": 18, "chunk": 8, "inner_size": 3, "rank_min": 17, "rank_max": 18, "rank_bound": 18,
        "diagonal_rank_min": 7, "diagonal_rank_max": 8, "diagonal_rank_bound": 8, "block_rank_min": 2,
        "block_rank_max": 3, "block_rank_bound": 3, "decay_block_rank_min": 1, "decay_block_rank_max": 1,
        "lower_bound_slack_min": -1, "lower_bound_slack_max": 0, "diagonal_nonzero_min": 18, "ragged_tokens": 2,
        "ragged_rank_max": 2, "ragged_rank_bound": 2,
    } | changes  # fmt: skip


def broken(**changes):
    return {(claim.of, claim.by) for claim in rank_claims(row(**changes)) if not claim.holds}


def test_claims():
    """What a numerical rank falls short of by conditioning is not a broken theorem; what exceeds a bound is."""
    always = {("M", "algebra, of numerical ranks"), ("decay mask's block", "paper")}
    assert broken() == always
    assert broken(block_rank_max=4) == always | {("block off the diagonal", "algebra")}
    assert broken(decay_block_rank_max=2) == always | {("decay mask's block", "algebra")}
    assert broken(ragged_rank_max=3) == always | {("largest block off the diagonal with the last 2", "algebra")}
    assert broken(rank_max=19) == always | {("M", "algebra")}
    assert broken(diagonal_nonzero_min=17) == always | {("diagonal block", "paper")}
    said = {claim.says for claim in rank_claims(row(direction="causal", decay_block_rank_max=None))}
    assert "<= min(C, D_QK) = 3" in said and not any("rank(L)" in words for words in said)
    softmax = row(direction="causal", inner_size=None, block_rank_min=8, block_rank_max=8, block_rank_bound=8)
    assert {c.says for c in rank_claims(softmax) if c.of == "block off the diagonal"} == {"<= C = 8", "= C = 8"}
    none = row(block_rank_max=None, ragged_rank_max=None, lower_bound_slack_min=None, decay_block_rank_max=None)
    assert {claim.of for claim in rank_claims(none)} == {"M", "diagonal block"}


def test_entropy_of_a_block():
    """The effective rank of equal singular values is their number, whatever the block's scale."""
    M = torch.zeros(8, 8, dtype=torch.float64)
    M[4:, :4] = torch.linalg.qr(normal(4, 4)).Q * 1e-9
    found = block_ranks(M, 4, "lower", None)
    assert found["block_effective_rank"].item() == pytest.approx(4) and math.isfinite(found["effective_rank"])
