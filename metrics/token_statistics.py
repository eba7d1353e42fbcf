"""How long patch tokens are, and how far tokens mix: pure functions on norms and on token-mixing matrices.

Shapes: B images, N = h·w patches, L tokens.
"""

import math

import torch
from torch import Tensor

from common.precision import exact


def norm_statistics(norms: Tensor, factor: float = 4.0) -> tuple[dict[str, Tensor], Tensor]:
    """The patch norms of each image in numbers, and which of them are outliers.

    An outlier is longer than ``factor`` times the image's median. "Vision Transformers Need Registers" (Darcet et al.
    2024) calls a token so whose norm is above 150, which is made for DINOv2's scale; a share of the median is for any.

    Args:
        norms: (B, N).
        factor: of the median.

    Returns:
        ``median``, ``q99`` (quantiles with linear interpolation), ``max`` and ``outliers`` (a share), (B) each;
        and (B, N) booleans.
    """
    norms = exact(norms)
    median = norms.quantile(0.5, 1)
    outliers = norms > factor * median[:, None]
    found = {
        "median": median,
        "q99": norms.quantile(0.99, 1),
        "max": norms.amax(1),
        "outliers": exact(outliers).mean(1),
    }
    return found, outliers


def patch_distances(grid: tuple[int, int]) -> Tensor:
    """(N, N) distances between the patches of a grid in raster order, in patches."""
    h, w = grid
    places = torch.cartesian_prod(torch.arange(h), torch.arange(w)).double().view(h * w, 2)
    return torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")


def grid_diagonal(grid: tuple[int, int]) -> float:
    """Of the whole image, in patches."""
    return math.hypot(*grid)


def mixing_distance(M: Tensor, grid: tuple[int, int]) -> Tensor:
    """Mean over rows i of Σ_j abs(M_ij) d(i, j) / Σ_j abs(M_ij), in patches: the mean attention distance of
    Dosovitskiy et al. 2021 (appendix D.7), for matrices of any sign.

    Args:
        M: (..., N, N) a token-mixing matrix between patches.
        grid: (h, w).

    Returns:
        (...); rows without any weight take no part.
    """
    weight = M.abs()
    distance = patch_distances(grid).to(weight)
    return ((weight * distance).sum(-1) / weight.sum(-1)).nanmean(-1)


def uniform_distance(grid: tuple[int, int]) -> float:
    """What :func:`mixing_distance` gives a matrix that mixes all patches alike."""
    return float(patch_distances(grid).mean())


def row_entropy(rows: Tensor) -> Tensor:
    """(..., N) rows to (...): the entropy of abs(row), brought to a sum of 1, over that of N equal weights."""
    weight = rows.abs()
    weight = weight / weight.sum(-1, keepdim=True)
    return torch.special.entr(weight).sum(-1) / math.log(rows.shape[-1])
