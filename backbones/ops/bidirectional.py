"""What a bidirectional Mamba-2 block does between its two projections, in Triton kernels.

Shapes: b batch, l tokens, d inner width, h heads of p = d / h channels, g groups, n state, k taps.
"""

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Directions(NamedTuple):
    """The parameters of both directions, forward first."""

    conv_weight: Tensor  # (2,k,d+2gn)
    conv_bias: Tensor  # (2,d+2gn)
    dt_bias: Tensor  # (2,h)
    A_log: Tensor  # (2,h)
    D: Tensor  # (2,h)
    norm_weight: Tensor  # (2,d)

    def parts(self, zxBCdt: Tensor) -> list[Tensor]:
        """z (b,l,d), xBC (b,l,d+2gn) and dt (b,l,h) as slices."""
        return list(zxBCdt.split([self.norm_weight.shape[1], self.conv_bias.shape[1], self.D.shape[1]], -1))


class _Bidirectional(torch.autograd.Function):
    """Keeps its input alone for the backward pass, which convolves and scans again."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, zxBCdt: Tensor, sizes: tuple[int, int, int], eps: float, *parameters: Tensor
    ) -> Tensor:
        from backbones.ops import triton_conv, triton_norm, triton_ssd

        ctx.sizes, ctx.eps = sizes, eps
        ctx.save_for_backward(zxBCdt, *parameters)
        p = Directions(*parameters)
        z, xBC, dt = p.parts(zxBCdt)
        xBC = triton_conv.conv_silu(xBC, p.conv_weight, p.conv_bias)
        y = triton_ssd.scan(xBC, dt, p.dt_bias, p.A_log, p.D, *sizes)
        return triton_norm.mean_gated_norm(y, z, p.norm_weight, eps, sizes[2])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        from backbones.ops import triton_conv, triton_norm, triton_ssd

        zxBCdt, *parameters = ctx.saved_tensors
        p = Directions(*parameters)
        z, xBC, dt = p.parts(zxBCdt)
        convolved = triton_conv.conv_silu(xBC, p.conv_weight, p.conv_bias)
        scan = (convolved, dt, p.dt_bias, p.A_log, p.D, *ctx.sizes)
        y = triton_ssd.scan(*scan)
        out = torch.empty_like(zxBCdt)
        dz, dxBC, ddt = p.parts(out)
        # y becomes its own gradient
        dnorm = triton_norm.mean_gated_norm_backward(grad.contiguous(), y, z, p.norm_weight, ctx.eps, ctx.sizes[2], dz)
        dconvolved, dsteps, dA_log, dD = triton_ssd.scan_backward(y, *scan)
        dweight, dbias = triton_conv.conv_silu_backward(dconvolved, xBC, p.conv_weight, p.conv_bias, dxBC)
        ddt.copy_(dsteps.sum(0))
        return out, None, None, dweight, dbias, dsteps.sum((1, 2)), dA_log, dD, dnorm


def bidirectional_ssd(
    zxBCdt: Tensor, directions: Directions, headdim: int, state: int, groups: int = 1, eps: float = 1e-5
) -> Tensor:
    """Convolution and SiLU, scan, gate, RMS norm of both directions, and their mean.

    With z, xBC and dt the parts of the input and, for the second direction, all tokens in reverse order:
    x, B, C = silu(conv(xBC)); y = ssd(x, softplus(dt + dt_bias), -exp(A_log), B, C, D); rms_norm(y silu(z)).
    Linear in l. Sums, exponentials and statistics are float32; the input alone is kept for the backward pass.

    Args:
        zxBCdt: (b,l,2d+2gn+h), what the first projection gives; float32, bfloat16 or float16.
        directions: what :class:`backbones.mixers.BidirectionalMamba2` holds, one direction on the other.
        headdim, state, groups: p, n and g.
        eps: of the norm.

    Returns:
        (b,l,d) in the dtype of the input: what the second projection takes.

    Raises:
        ValueError: for a dtype that the kernels do not take, or shapes that do not fit.
        RuntimeError: without a GPU (for tests, TRITON_INTERPRET=1 runs the kernels on the CPU).
    """
    heads, inner = directions.D.shape[1], directions.norm_weight.shape[1]
    channels = inner + 2 * groups * state
    wanted = {
        "conv_weight": (2, directions.conv_weight.shape[1], channels), "conv_bias": (2, channels),
        "dt_bias": (2, heads), "A_log": (2, heads), "D": (2, heads), "norm_weight": (2, heads * headdim),
    }  # fmt: skip
    for name, shape in wanted.items():
        if (found := tuple(getattr(directions, name).shape)) != shape:
            raise ValueError(f"bidirectional_ssd: {name} has shape {found}, wants {shape}")
    if zxBCdt.ndim != 3 or zxBCdt.shape[2] != inner + channels + heads:
        raise ValueError(
            f"bidirectional_ssd: zxBCdt has shape {tuple(zxBCdt.shape)}, wants (b, l, {inner + channels + heads})"
        )
    if heads % groups:
        raise ValueError(f"bidirectional_ssd: {heads} heads cannot share {groups} groups evenly")
    if zxBCdt.dtype not in DTYPES:
        raise ValueError(f"bidirectional_ssd: {zxBCdt.dtype} is not among {', '.join(map(str, DTYPES))}")
    if not zxBCdt.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(f"backend='triton' needs a GPU, found {zxBCdt.device}; use backend='auto' or 'torch'")
    parameters = (t.float().contiguous() for t in directions)
    return _Bidirectional.apply(zxBCdt.contiguous(), (headdim, state, groups), eps, *parameters)
