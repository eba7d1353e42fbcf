"""RMS normalisation with float32 statistics."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.precision import at_least_float32


def _unit_rms(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, in the dtype of x."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.rsqrt(norm.square() / x.shape[-1] + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; statistics in float32 at least."""
    x = at_least_float32(x)
    return _unit_rms(x, eps).to(weight.dtype) * weight


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """rms_norm(x * silu(gate)) with statistics over each of ``groups`` equal parts of the last axis (Mamba-2)."""
    x = at_least_float32(x)
    x = x * F.silu(gate.to(x.dtype))
    return _unit_rms(x.unflatten(-1, (groups, -1)), eps).flatten(-2).to(weight.dtype) * weight


class RMSNorm(nn.Module):
    """:func:`rms_norm` with a learned weight and no bias."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class GatedRMSNorm(nn.Module):
    """:func:`gated_rms_norm` with a learned weight and no bias."""

    def __init__(self, dim: int, groups: int = 1, eps: float = 1e-5) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, self.weight, self.eps, self.groups)
