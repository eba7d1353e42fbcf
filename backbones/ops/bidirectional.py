"""What a bidirectional Mamba-2 block does between its two projections: in Triton kernels, or in C on the CPU.

Shapes: b batch, l tokens, d inner width, h heads of p = d / h channels, g groups, n state, k taps.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.ops.causal_conv import causal_conv
from backbones.ops.norm import gated_rms_norm
from backbones.ops.ssd import ssd
from backbones.ops.tracing import counted
from common import native
from common.derivatives import differentiated_again, gradients

DTYPES = {"triton": (torch.float32, torch.bfloat16, torch.float16), "c": (torch.float32,)}
"""Of the input, for each kind of kernels."""


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


def _plain(sizes: tuple[int, int, int], eps: float) -> Callable[..., Tensor]:
    """:func:`bidirectional_ssd` of the input and the parameters, one of PyTorch's operations after the other."""
    headdim, state, groups = sizes

    def computed(zxBCdt: Tensor, *parameters: Tensor) -> Tensor:
        p = Directions(*parameters)
        z, xBC, dt = p.parts(zxBCdt)
        dt, total = dt.to(p.dt_bias.dtype), zxBCdt.new_zeros(())
        for i, ends in enumerate((lambda t: t, lambda t: t.flip(1))):
            convolved = F.silu(causal_conv(ends(xBC), p.conv_weight[i].t(), p.conv_bias[i]))
            x, B, C = convolved.split([z.shape[2], groups * state, groups * state], -1)
            x, (B, C) = x.unflatten(-1, (-1, headdim)), (t.unflatten(-1, (groups, state)) for t in (B, C))
            y = ssd(x, F.softplus(ends(dt) + p.dt_bias[i]), -p.A_log[i].exp(), B, C, p.D[i], backend="torch")
            total = total + gated_rms_norm(ends(y.flatten(2)), z, p.norm_weight[i], eps, groups)
        return (total / 2).to(zxBCdt.dtype)

    return computed


class _InTriton(torch.autograd.Function):
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
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        from backbones.ops import triton_conv, triton_norm, triton_ssd

        if differentiated_again(grad):
            dinput, *dparameters = gradients(_plain(ctx.sizes, ctx.eps), ctx.saved_tensors, grad)
            return dinput, None, None, *dparameters
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


class _Mixer(ctypes.Structure):
    """``mixer`` of bidirectional.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "length", "heads", "headdim", "groups", "state", "taps")),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("input", *Directions._fields, "y", "out")),
        *((name, ctypes.c_void_p) for name in ("grad", "dinput", "dparameters")),
        ("threads", ctypes.c_int64),
    ]


def c_kernels() -> ctypes.CDLL | None:
    """``forward`` and ``backward`` of bidirectional.c, or None where it cannot be compiled."""
    return native.library(Path(__file__).with_suffix(".c"), "-fopenmp", "-ffp-contract=fast")


def _run_c(
    name: str, zxBCdt: Tensor, p: Directions, sizes: tuple[int, int, int], eps: float, **tensors: Tensor
) -> None:
    """Calls bidirectional.c on contiguous float32 tensors."""
    kernels = c_kernels()
    assert kernels is not None
    headdim, state, groups = sizes
    batch, length, _ = zxBCdt.shape
    pointers = {"input": zxBCdt, **p._asdict(), **tensors}
    assert all(t.is_contiguous() and t.dtype == torch.float32 for t in pointers.values())
    mixer = _Mixer(
        batch=batch, length=length, heads=p.D.shape[1], headdim=headdim, groups=groups, state=state,
        taps=p.conv_weight.shape[1], eps=eps, threads=max(1, min(batch, torch.get_num_threads())),
        **{key: t.data_ptr() for key, t in pointers.items()},
    )  # fmt: skip
    if getattr(kernels, name)(ctypes.byref(mixer)):
        raise MemoryError(f"bidirectional_ssd: no memory for the scratch of {length} tokens")


class _InC(torch.autograd.Function):
    """Keeps its input and the scans' outputs for the backward pass, which convolves again."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, zxBCdt: Tensor, sizes: tuple[int, int, int], eps: float, *parameters: Tensor
    ) -> Tensor:
        p, (b, length, _) = Directions(*parameters), zxBCdt.shape
        y, out = (zxBCdt.new_empty(*shape, length, p.norm_weight.shape[1]) for shape in ((b, 2), (b,)))
        _run_c("forward", zxBCdt, p, sizes, eps, y=y, out=out)
        ctx.sizes, ctx.eps = sizes, eps
        ctx.save_for_backward(zxBCdt, y, *parameters)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        zxBCdt, y, *parameters = ctx.saved_tensors
        if differentiated_again(grad):
            dinput, *dparameters = gradients(_plain(ctx.sizes, ctx.eps), (zxBCdt, *parameters), grad)
            return dinput, None, None, *dparameters
        dinput, counts = torch.empty_like(zxBCdt), [t.numel() for t in parameters]
        each = zxBCdt.new_empty(len(zxBCdt), sum(counts))  # of every sequence, so that their sum has one order
        filled = {"grad": grad.contiguous(), "dinput": dinput, "dparameters": each}
        _run_c("backward", zxBCdt, Directions(*parameters), ctx.sizes, ctx.eps, y=y, **filled)
        pieces = zip(each.sum(0).split(counts), parameters, strict=True)
        return dinput, None, None, *(piece.view_as(t) for piece, t in pieces)


def bidirectional_ssd(
    zxBCdt: Tensor, directions: Directions, headdim: int, state: int, groups: int = 1, eps: float = 1e-5,
    kernels: str = "triton",
) -> Tensor:  # fmt: skip
    """Convolution and SiLU, scan, gate, RMS norm of both directions, and their mean.

    With z, xBC and dt the parts of the input and, for the second direction, all tokens in reverse order:
    x, B, C = silu(conv(xBC)); y = ssd(x, softplus(dt + dt_bias), -exp(A_log), B, C, D); rms_norm(y silu(z)).
    Linear in l. Sums, exponentials and statistics are float32. For the backward pass Triton's kernels keep the input
    alone, C's the scans' outputs besides.

    Args:
        zxBCdt: (b,l,2d+2gn+h), what the first projection gives; float32, or with Triton bfloat16 or float16.
        directions: what :class:`backbones.mixers.BidirectionalMamba2` holds, one direction on the other.
        headdim, state, groups: p, n and g.
        eps: of the norm.
        kernels: ``triton`` on a GPU, ``c`` on the CPU.

    Returns:
        (b,l,d) in the dtype of the input: what the second projection takes.

    Raises:
        ValueError: for a dtype that the kernels do not take, or shapes that do not fit.
        RuntimeError: for Triton without a GPU (for tests, TRITON_INTERPRET=1 runs its kernels on the CPU), for C on
            another device than the CPU or where it cannot be compiled.
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
    if kernels not in DTYPES:
        raise ValueError(f"bidirectional_ssd: kernels={kernels!r}; allowed: {', '.join(DTYPES)}")
    if zxBCdt.dtype not in DTYPES[kernels]:
        raise ValueError(f"bidirectional_ssd: {zxBCdt.dtype} is not among {', '.join(map(str, DTYPES[kernels]))}")
    if kernels == "triton" and not zxBCdt.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(f"backend='triton' needs a GPU, found {zxBCdt.device}; use backend='auto' or 'torch'")
    if kernels == "c" and (zxBCdt.device.type != "cpu" or c_kernels() is None):
        raise RuntimeError(
            f"backend='c' needs a CPU, found {zxBCdt.device}, and a C compiler; use backend='auto' or 'torch'"
        )
    function = _InTriton if kernels == "triton" else _InC
    sizes = headdim, state, groups

    def computed(zxBCdt: Tensor, *parameters: Tensor) -> Tensor:
        return function.apply(zxBCdt.contiguous(), sizes, eps, *(t.float().contiguous() for t in parameters))

    tokens, taps = zxBCdt.shape[0] * zxBCdt.shape[1], directions.conv_weight.shape[1]
    flops = 2 * tokens * (2 * taps * channels + 4 * inner * state)  # of the convolutions and scans, as they count
    return counted(computed, flops, zxBCdt, *directions)
