"""Ranks of token-mixing matrices: numerical, effective, and of the blocks off the diagonal.

Shapes: ... any leading axes, L tokens, C tokens in a chunk.

What algebra says of Y = MX, and what the functions here measure (see ``rank_bound``):

- softmax attention: M = softmax(Q K^T) may have any rank up to L.
- linear attention: M = ψ(Q) ψ(K)^T has rank at most d, the channels of a head, and so has every block of it.
- a scan in one direction: M is triangular, mostly of full rank, but a block that lies wholly to one side of the
  diagonal is C_i^T exp(sum of decays from j to i) B_j. The decay factors at any token between the block's columns and
  its rows, so with a scalar decay the decay mask's block is an outer product, of rank exactly 1, and M's block has
  rank at most 1 · n, the state's size. With Mamba-1's decays, one a state, the same factorisation gives n again.
- both directions summed: above the diagonal one scan's blocks, below it the other's, each of rank at most n, while
  the whole may have any rank up to L.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = 1e-10
"""Singular values up to this share of the largest count as zero; in float64, with room for the error of long sums."""


def singular_values(matrix: Tensor) -> Tensor:
    """(..., R, S) to (..., min(R, S)) in float64, largest first."""
    return torch.linalg.svdvals(matrix.double())


def numerical_rank(values: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """How many singular values (..., K) exceed ``tolerance`` times the largest; 0 for a matrix of zeros.

    Raises:
        ValueError: unless 0 <= tolerance < 1.
    """
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance={tolerance} must be at least 0 and below 1")
    return (values > tolerance * values.amax(-1, keepdim=True)).sum(-1)


def effective_rank(values: Tensor) -> Tensor:
    """exp of the entropy of the normalised singular values (..., K) (Roy & Vetterli 2007); 0 for a matrix of zeros.

    1 for an outer product, K where all are equal.
    """
    total = values.sum(-1, keepdim=True)
    share = values / torch.where(total > 0, total, 1)
    rank = torch.special.entr(share).sum(-1).exp()
    return torch.where(total.squeeze(-1) > 0, rank, 0)


class Block(NamedTuple):
    """One block of a matrix cut into chunks of C rows and C columns; the last ones may be smaller."""

    row: int
    column: int
    matrix: Tensor


def partition(matrix: Tensor, chunk: int) -> Iterator[Block]:
    """The ⌈L/C⌉ x ⌈L/C⌉ blocks of (..., L, L), row by row.

    Raises:
        ValueError: unless 1 <= chunk <= L.
    """
    length = matrix.shape[-1]
    if not 1 <= chunk <= length:
        raise ValueError(f"chunk={chunk}: the matrix has {length} tokens, allowed are 1..{length}")
    for i, rows in enumerate(matrix.split(chunk, -2)):
        for j, block in enumerate(rows.split(chunk, -1)):
            yield Block(i, j, block)


def rank_bound(shape: tuple[int, int], width: int | None) -> int:
    """The largest rank algebra allows a block off the diagonal: its sides, and the mixer's inner size if it has one.

    Args:
        shape: rows and columns.
        width: channels of a head (linear attention) or state size (scans); None for softmax attention.
    """
    return min(shape) if width is None else min(*shape, width)
