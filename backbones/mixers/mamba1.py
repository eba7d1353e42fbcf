"""Bidirectional Mamba-1."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.mixers.base import Mixing, convolved, initial_dt_bias, spread, untouched
from backbones.ops import selective_scan, selective_scan_matrix
from common.precision import at_least_float32


class SelectiveInputs(NamedTuple):
    """What one Mamba-1 scan takes: the arguments of :func:`backbones.ops.selective_scan`."""

    x: Tensor  # (b,l,d)
    dt: Tensor  # (b,l,d)
    A: Tensor  # (d,n)
    B: Tensor  # (b,l,n)
    C: Tensor  # (b,l,n)
    D: Tensor  # (d)

    def of_channels(self, some: Tensor) -> "SelectiveInputs":
        """The same of some channels."""
        return SelectiveInputs(self.x[..., some], self.dt[..., some], self.A[some], self.B, self.C, self.D[some])


class BidirectionalMamba1(nn.Module):
    """Mamba-1 over the sequence and over its reverse, as the supervised Vim and Mamba-Reg are published.

    Parameter names are Vim's; ``_b`` marks the backward scan. Every one of the ``dim * expand`` channels has its own
    token-mixing matrix.

    Args:
        dim: D.
        d_state: n, the state's size.
        expand: inner width over D.
        d_conv: taps of the causal convolution.
        dt_min, dt_max: range of the initial step sizes.
        chunk_size: see :func:`backbones.ops.selective_scan`.
    """

    def __init__(
        self, dim: int, d_state: int = 16, expand: int = 2, d_conv: int = 4, dt_min: float = 0.001,
        dt_max: float = 0.1, chunk_size: int = 32,
    ) -> None:  # fmt: skip
        super().__init__()
        self.head_shape = None
        inner, rank = dim * expand, math.ceil(dim / 16)
        self.inner, self.d_state, self.rank, self.chunk_size = inner, d_state, rank, chunk_size
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)  # x, z
        for end in ("", "_b"):
            setattr(self, f"conv1d{end}", nn.Conv1d(inner, inner, d_conv, groups=inner, padding=d_conv - 1))
            setattr(self, f"x_proj{end}", nn.Linear(inner, rank + 2 * d_state, bias=False))  # dt, B, C
            dt_proj = nn.Linear(rank, inner)
            nn.init.uniform_(dt_proj.weight, -(rank**-0.5), rank**-0.5)
            with torch.no_grad():
                dt_proj.bias.copy_(initial_dt_bias(inner, dt_min, dt_max))
            setattr(self, f"dt_proj{end}", dt_proj)
            steps = torch.arange(1, d_state + 1, dtype=torch.float32).repeat(inner, 1)
            setattr(self, f"A{end}_log", nn.Parameter(steps.log()))
            setattr(self, f"D{end}", nn.Parameter(torch.ones(inner)))
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def _scan_inputs(self, u: Tensor) -> tuple[Tensor, SelectiveInputs, SelectiveInputs]:
        """The gate z (b,l,inner) and each direction's inputs, the second one's tokens reversed."""
        x, z = self.in_proj(u).chunk(2, -1)
        return z, self._direction(x, ""), self._direction(x.flip(1), "_b")

    def _direction(self, x: Tensor, end: str) -> SelectiveInputs:
        conv, x_proj, dt_proj = (getattr(self, f"{name}{end}") for name in ("conv1d", "x_proj", "dt_proj"))
        x = F.silu(convolved(x, conv))
        low, B, C = x_proj(x).split([self.rank, self.d_state, self.d_state], -1)
        if untouched(dt_proj, nn.Linear):  # under autocast the bias, which sets the scale of dt, stays float32
            dt = at_least_float32(F.linear(low, dt_proj.weight)) + dt_proj.bias
        else:
            dt = at_least_float32(dt_proj(low))
        A = -at_least_float32(getattr(self, f"A{end}_log")).exp()
        return SelectiveInputs(x, F.softplus(dt), A, B, C, getattr(self, f"D{end}"))

    def scan(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gate z and the outputs of both scans before gating, (B, L, inner) each and in the order of u."""
        z, *both = self._scan_inputs(u)
        y, y_b = (selective_scan(*inputs, self.chunk_size) for inputs in both)
        return z, y, y_b.flip(1)

    def forward(self, u: Tensor) -> Tensor:
        z, forward, backward = self.scan(u)
        return self.out_proj((forward + backward) / 2 * F.silu(z))

    def mixing(self, u: Tensor, rows: Tensor | None = None) -> Tensor:
        """Rows of (M_forward + M_backward) / 2 with their skips D, channel by channel, before gating."""
        _, forward, backward = self._scan_inputs(u)
        length = u.shape[1]
        rows = torch.arange(length, device=u.device) if rows is None else rows
        M = selective_scan_matrix(*forward[1:5], rows)
        M = (M + selective_scan_matrix(*backward[1:5], length - 1 - rows).flip(-1)) / 2
        skip = ((forward.D + backward.D) / 2)[:, None, None] * F.one_hot(rows, length).to(M.dtype)
        return M + skip

    def decompose(self, u: Tensor, max_heads: int | None = None) -> list[Mixing]:
        _, *both = self._scan_inputs(u)
        some = spread(both[0].x.shape[2], max_heads, u)
        both = [inputs.of_channels(some) for inputs in both]
        forward, backward = (  # a channel is a head of width 1
            Mixing(
                direction, selective_scan_matrix(*inputs[1:5]), inputs.x.transpose(1, 2)[..., None],
                selective_scan(*inputs[:5], None, self.chunk_size).transpose(1, 2)[..., None], width=self.d_state,
            )
            for direction, inputs in zip(("forward", "backward"), both, strict=True)
        )  # fmt: skip
        return [forward, backward.reversed()]
