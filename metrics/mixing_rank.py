"""Numerical and effective ranks.

Shapes: ... any leading axes, K = min(R, S) singular values of R x S.
"""

import torch
from torch import Tensor


def singular_values(matrix: Tensor) -> Tensor:
    """(..., R, S) to (..., min(R, S)) in float64, largest first."""
    return torch.linalg.svdvals(matrix.double())


def rank_threshold(values: Tensor, tolerance: float | None = None, size: int | None = None) -> Tensor:
    """Up to what singular values (..., K) count as zero; (...).

    ``tolerance`` times the largest of them, and by default max(R, S) · eps of it, eps being float64's, in which
    :func:`singular_values` computes: the rule of NumPy's and MATLAB's rank. At least max(R, S) times the smallest
    normal number, since what is smaller than that has no digits left to speak of.

    Args:
        values: singular values.
        tolerance: a share of the largest, in place of the rule.
        size: max(R, S); K, as of a square matrix, unless given.

    Raises:
        ValueError: unless 0 <= tolerance < 1.
    """
    size, float64 = values.shape[-1] if size is None else size, torch.finfo(torch.float64)
    share = size * float64.eps if tolerance is None else tolerance
    if not 0 <= share < 1:
        raise ValueError(f"tolerance={tolerance} must be at least 0 and below 1")
    return (share * values.amax(-1)).clamp(min=size * float64.tiny)


def numerical_rank(values: Tensor, tolerance: float | None = None, size: int | None = None) -> Tensor:
    """How many singular values (..., K) exceed :func:`rank_threshold`, whose arguments it takes; (...)."""
    return (values > rank_threshold(values, tolerance, size)[..., None]).sum(-1)


def effective_rank(values: Tensor) -> Tensor:
    """exp of the entropy of the normalised singular values (..., K) (Roy & Vetterli 2007); 0 for a matrix of zeros.

    1 for an outer product, K where all are equal.
    """
    total = values.sum(-1, keepdim=True)
    share = values / torch.where(total > 0, total, 1)
    rank = torch.special.entr(share).sum(-1).exp()
    return torch.where(total.squeeze(-1) > 0, rank, 0)


def rank_bound(shape: tuple[int, int], width: int | None) -> int:
    """The largest rank algebra allows a block off the diagonal: its sides, and the mixer's inner size if it has one.

    Args:
        shape: rows and columns.
        width: channels of a head (linear attention) or state size (scans); None for softmax attention.
    """
    return min(shape) if width is None else min(*shape, width)
