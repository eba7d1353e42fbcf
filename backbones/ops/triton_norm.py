"""Triton: gate and RMS normalisation of both directions' outputs, and their mean, in one pass.

Shapes: n tokens, i inner width, g groups of i / g channels with statistics of their own.

Reference: the mean of two :func:`backbones.ops.gated_rms_norm`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Tokens that a program of the backward pass walks over; its sums for the weights' gradient leave it once."""


@triton.jit
def _forward_kernel(
    y, z, weight, out, tokens, eps,
    INNER: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    column += tl.program_id(1) * WIDTH
    gate = tl.load(z + row * STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    gate = gate * tl.sigmoid(gate)
    total = tl.zeros((BLOCK,), tl.float32)
    for direction in tl.static_range(2):
        v = tl.load(y + (direction * tokens + row) * INNER + column, mask=mask, other=0.0).to(tl.float32) * gate
        scale = tl.rsqrt(tl.sum(v * v, 0) / WIDTH + eps)
        total += v * scale * tl.load(weight + direction * INNER + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + column, total * 0.5, mask=mask)


@triton.jit
def _backward_kernel(
    grad, y, z, weight, dz, partial, tokens, eps,
    INNER: tl.constexpr, STRIDE: tl.constexpr, DZ_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    column += tl.program_id(1) * WIDTH
    w_0 = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    w_1 = tl.load(weight + INNER + column, mask=mask, other=0.0).to(tl.float32)
    sum_0 = tl.zeros((BLOCK,), tl.float32)
    sum_1 = tl.zeros((BLOCK,), tl.float32)
    for i in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + i
        here = mask & (row < tokens)
        g = tl.load(grad + row * INNER + column, mask=here, other=0.0).to(tl.float32) * 0.5
        raw = tl.load(z + row * STRIDE + column, mask=here, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(raw)
        gate = raw * sigmoid
        dgate = tl.zeros((BLOCK,), tl.float32)
        for direction in tl.static_range(2):
            at = y + (direction * tokens + row) * INNER + column
            value = tl.load(at, mask=here, other=0.0).to(tl.float32)
            v = value * gate
            scale = tl.rsqrt(tl.sum(v * v, 0) / WIDTH + eps)
            unit = v * scale
            gw = g * (w_0 if direction == 0 else w_1)
            dv = scale * (gw - unit * (tl.sum(gw * unit, 0) / WIDTH))
            tl.store(at, dv * gate, mask=here)
            dgate += dv * value
            if direction == 0:
                sum_0 += g * unit
            else:
                sum_1 += g * unit
        tl.store(dz + row * DZ_STRIDE + column, dgate * sigmoid * (1 + raw * (1 - sigmoid)), mask=here)
    to = partial + tl.program_id(0) * 2 * INNER + column
    tl.store(to, sum_0, mask=mask)
    tl.store(to + INNER, sum_1, mask=mask)


def _sizes(z: Tensor, groups: int) -> dict[str, int]:
    inner, width = z.shape[2], z.shape[2] // groups
    block = triton.next_power_of_2(width)
    return {
        "INNER": inner,
        "STRIDE": z.stride(1),
        "WIDTH": width,
        "BLOCK": block,
        "num_warps": min(max(block // 256, 1), 8),
    }


def mean_gated_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """(rms_norm(y_0 silu(z)) w_0 + rms_norm(y_1 silu(z)) w_1) / 2, statistics in float32.

    Args:
        y: (2,b,l,i).
        z: (b,l,i), rows evenly spaced in memory.
        weight: (2,i).

    Returns:
        (b,l,i) in the dtype of y.
    """
    _, b, length, inner = y.shape
    out = y.new_empty(b, length, inner)
    _forward_kernel[(b * length, groups)](y, z, weight, out, b * length, eps, **_sizes(z, groups))
    return out


def mean_gated_norm_backward(
    grad: Tensor, y: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int, dz: Tensor
) -> Tensor:
    """Writes the gradient of y over y itself, and that of z into ``dz`` (b,l,i; may be a slice).

    Returns:
        The gradient of weight (2,i), float32.
    """
    _, b, length, inner = y.shape
    programs = triton.cdiv(b * length, ROWS)
    partial = torch.empty(programs, 2, inner, device=y.device)
    _backward_kernel[(programs, groups)](
        grad, y, z, weight, dz, partial, b * length, eps, DZ_STRIDE=dz.stride(1), ROWS=ROWS, **_sizes(z, groups)
    )  # fmt: skip
    return partial.sum(0)
