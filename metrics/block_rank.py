"""Ranks of a token-mixing matrix in blocks of C x C, and what holds of them.

Shapes: ... any leading axes, L tokens, C tokens in a chunk, n inner size (a head's channels, or a scan's state).

M of Y = MX is cut into chunks of C tokens. What algebra says:

- *Softmax attention* has blocks of any rank up to C.
- *Product.* Linear attention's block is ψ(Q)_I ψ(K)_J^T, a product through a head's d channels: rank at most d.
- *Hadamard product.* A scan's block off the diagonal is L_IJ ∘ (C_I B_J^T), and rank(X ∘ Y) <= rank(X) rank(Y) (Horn &
  Johnson, Topics in Matrix Analysis, theorem 5.1.7): at most rank(L_IJ) · n. Of one decay a head the mask's entry is
  exp(a_i - a_j) = exp(a_i) exp(-a_j), and off the diagonal every entry of a block is one of these: an outer product, so
  rank(L_IJ) = 1 and the bound is n. Of one decay a state (Mamba-1) the same factors, state by state, give n again.
- *Lower bound.* A block triangular M has rank(M) >= the sum of its diagonal blocks' ranks. Proof: take rank(M_kk)
  independent rows of each M_kk, and the rows of M that they are part of. Suppose a combination of these is zero,
  and let k be the last chunk with a part in it (the first, if M is upper triangular): in the columns of chunk k only
  rows of M_kk are left, which are independent, so k has no part in it after all. (Horn & Johnson, Matrix Analysis,
  0.9.4.) With chunks of one token: a triangular M without a zero on its diagonal has rank L, and its diagonal blocks
  rank C.

Numerical ranks are of numbers in float64. There a block can be small without being of small rank: a scan's entries fall
by exp(a_i - a_j) to below the smallest number there is. A rank does not depend on scale, so :func:`decay_block` gives
the mask in units of its block's largest entry. And there a triangular matrix of full rank can count as less: random
ones have condition numbers that grow exponentially with their size (Viswanath & Trefethen 1998). The lower bound, which
holds of ranks, can so fail of numerical ranks by a few; zeros on the diagonal are counted without any rounding.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from metrics.mixing_rank import effective_rank, numerical_rank, rank_bound, rank_threshold, singular_values

Side = Literal["lower", "upper", "both"]
"""Where a matrix has blocks off the diagonal: below it, above it, or on either side."""
Blocks = Callable[[slice, slice], Tensor]
"""Rows and columns to that block of a matrix (..., R, S), in any scale of its own."""

FIELDS = (
    "rank", "effective_rank", "diagonal_rank_min", "diagonal_rank_max", "diagonal_effective_rank", "block_rank_min",
    "block_rank_max", "block_effective_rank", "block_beyond", "ragged_rank_max", "decay_rank_min", "decay_rank_max",
    "decay_diagonal_rank_min", "lower_bound_slack", "diagonal_nonzero",
)  # fmt: skip
"""What :func:`block_ranks` measures of a matrix."""


def triangle(matrix: Tensor, side: Side) -> Tensor:
    """The matrix with zeros beyond the diagonal, on the side that it does not have."""
    return matrix if side == "both" else matrix.tril() if side == "lower" else matrix.triu()


def decay_block(log_decay: Tensor, rows: slice, columns: slice, side: Side = "lower") -> Tensor:
    """A block of the decay mask exp(a_i - a_j), a (..., L) falling in the order of the scan; (..., R, S).

    Off the diagonal, in units of its largest entry, which may be below the smallest number there is; on it, as it is,
    with zeros on the side that ``side`` says the scan does not read.
    """
    a, b = log_decay[..., rows], log_decay[..., columns]
    if rows == columns:
        return triangle((a[..., :, None] - b[..., None, :]).clamp(max=0).exp(), side)
    a, b = a - a.amax(-1, keepdim=True), b - b.amin(-1, keepdim=True)
    return (a[..., :, None] - b[..., None, :]).exp()


def chunks(length: int, chunk: int) -> tuple[list[slice], slice | None]:
    """The whole chunks of C tokens, and what is left of the tokens after them, if anything.

    Raises:
        ValueError: unless 1 <= chunk <= length.
    """
    if not 1 <= chunk <= length:
        raise ValueError(f"chunk={chunk}: the matrix has {length} tokens, allowed are 1..{length}")
    whole = [slice(i, i + chunk) for i in range(0, length - chunk + 1, chunk)]
    rest = len(whole) * chunk
    return whole, slice(rest, length) if rest < length else None


def pairs(of: Sequence[slice], side: Side) -> list[tuple[slice, slice]]:
    """Rows and columns of the blocks off the diagonal."""
    every = [(rows, columns) for rows in of for columns in of if rows != columns]
    return [(r, c) for r, c in every if side == "both" or (side == "lower") == (r.start > c.start)]


def block_ranks(
    matrix: Tensor,
    chunk: int,
    side: Side,
    width: int | None,
    off_diagonal: Blocks | None = None,
    decay: Blocks | None = None,
    tolerance: float | None = None,
) -> dict[str, Tensor]:
    """Ranks of M (..., L, L) and of its blocks; FIELDS, each (...) in float64, NaN where there is no such block; and
    ``values`` (..., L), M's singular values.

    - ``rank``, ``effective_rank`` of M.
    - ``diagonal_…`` of its C x C blocks on the diagonal: least and largest rank, mean effective rank.
    - ``block_…`` of those off the diagonal, with ``block_beyond``: the first singular value after :func:`rank_bound`
      over the first of all, the largest of any block; rounding alone where the bound holds.
    - ``ragged_rank_max``: of the blocks off the diagonal of the last L mod C tokens, which count in no other field, but
      for ``rank`` and ``lower_bound_slack``.
    - ``decay_…``: ranks of the decay mask's blocks.
    - ``lower_bound_slack``, of a block triangular M: rank(M) less the sum of its diagonal blocks' ranks. What counts as
      zero in M is a number, and the same one in its blocks: each by its own would compare unlike ranks.
    - ``diagonal_nonzero``, of a triangular M: how many entries of its diagonal are not zero.

    Args:
        matrix: M.
        chunk: C.
        side: where M has blocks off the diagonal.
        width: n; see :func:`rank_bound`.
        off_diagonal: gives those blocks, where they can be had better than by cutting M.
        decay: gives the decay mask's blocks.
        tolerance: see :func:`rank_threshold`.

    Raises:
        ValueError: for a chunk that is not 1..L, or a tolerance that is not 0 to 1.
    """
    whole, rest = chunks(matrix.shape[-1], chunk)
    off = off_diagonal or (lambda rows, columns: matrix[..., rows, columns])
    nothing = matrix.new_full(matrix.shape[:-2], torch.nan, dtype=torch.float64)
    found = dict.fromkeys(FIELDS, nothing)

    values = singular_values(matrix)
    found |= {"rank": numerical_rank(values, tolerance), "effective_rank": effective_rank(values)}

    diagonal = _spectra(lambda rows, columns: matrix[..., rows, columns], [(s, s) for s in whole])
    ranks = numerical_rank(diagonal, tolerance)
    found |= {"diagonal_rank_min": ranks.amin(0), "diagonal_rank_max": ranks.amax(0)}
    found["diagonal_effective_rank"] = effective_rank(diagonal).mean(0)
    if side != "both":
        zero = rank_threshold(values, tolerance)
        total = (diagonal > zero[..., None]).sum((0, -1))
        if rest is not None:
            total = total + (singular_values(matrix[..., rest, rest]) > zero[..., None]).sum(-1)
        found["lower_bound_slack"] = found["rank"] - total
        found["diagonal_nonzero"] = (matrix.diagonal(dim1=-2, dim2=-1) != 0).sum(-1)

    if beside := pairs(whole, side):
        spectra = _spectra(off, beside)
        ranks, bound = numerical_rank(spectra, tolerance), rank_bound((chunk, chunk), width)
        found |= {"block_rank_min": ranks.amin(0), "block_rank_max": ranks.amax(0)}
        found["block_effective_rank"] = effective_rank(spectra).mean(0)
        if bound < chunk:
            found["block_beyond"] = (spectra[..., bound] / spectra[..., 0].clamp(min=_TINY)).amax(0)
        if decay is not None:
            ranks = numerical_rank(_spectra(decay, beside), tolerance)
            found |= {"decay_rank_min": ranks.amin(0), "decay_rank_max": ranks.amax(0)}
    if decay is not None:
        ranks = numerical_rank(_spectra(decay, [(s, s) for s in whole]), tolerance)
        found["decay_diagonal_rank_min"] = ranks.amin(0)
    if rest is not None:
        ragged = [singular_values(off(r, c)) for r, c in pairs([*whole, rest], side) if rest in (r, c)]
        found["ragged_rank_max"] = torch.stack([numerical_rank(v, tolerance, chunk) for v in ragged]).amax(0)
    return {name: value.double() for name, value in found.items()} | {"values": values}


_TINY = torch.finfo(torch.float64).tiny


def _spectra(blocks: Blocks, where: Sequence[tuple[slice, slice]]) -> Tensor:
    """Singular values of blocks of one shape; (blocks, ..., C)."""
    return torch.stack([singular_values(blocks(rows, columns)) for rows, columns in where])
