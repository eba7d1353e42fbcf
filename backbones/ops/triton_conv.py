"""Triton: depthwise causal convolution and SiLU along the tokens and against them, in one pass.

Shapes: n tokens (all sequences end to end), l tokens in a sequence, c channels, k taps. Direction 0 looks back from a
token, direction 1 ahead; both leave the tokens in their order, so nothing is ever flipped.

Reference: :func:`backbones.ops.causal_conv_reference`, then SiLU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 32, 64


@triton.jit
def _tile(start, tokens, length, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row and column of a tile's elements, each row's place in its sequence, and what lies in the tensor."""
    row = tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    position = ((start + row) % length).to(tl.int32)
    return row, column, position, (start + row < tokens), (column < CHANNELS)


@triton.jit
def _load(x, row, reach, column, position, length, row_ok, column_ok, STRIDE: tl.constexpr, BACK: tl.constexpr):
    """The tile ``reach`` tokens before (BACK) or after its rows, with zeros outside a token's own sequence."""
    inside = position >= reach if BACK else position + reach < length
    at = (row - reach if BACK else row + reach)[:, None] * STRIDE + column[None, :]
    return tl.load(x + at, mask=(row_ok & inside)[:, None] & column_ok[None, :], other=0.0).to(tl.float32)


@triton.jit
def _taps(weight, back, column, column_ok, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """What a token ``back`` steps away is weighed with, (1, COLUMNS); weight is (k, c)."""
    return tl.load(weight + (TAPS - 1 - back) * CHANNELS + column, mask=column_ok, other=0.0)[None, :]


@triton.jit
def _convolved(
    x, weight, bias, row, column, position, length, row_ok, column_ok,
    CHANNELS: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    y = tl.load(bias + column, mask=column_ok, other=0.0)[None, :]
    for k in tl.static_range(TAPS):
        tile = _load(x, row, k, column, position, length, row_ok, column_ok, STRIDE, BACK)
        y = y + _taps(weight, k, column, column_ok, CHANNELS, TAPS) * tile
    return y


@triton.jit
def _forward_kernel(
    x, weight, bias, out, tokens, length,
    CHANNELS: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * ROWS
    row, column, position, row_ok, column_ok = _tile(start, tokens, length, CHANNELS, ROWS, COLUMNS)
    x += start * STRIDE
    for direction in tl.static_range(2):
        w, b = weight + direction * TAPS * CHANNELS, bias + direction * CHANNELS
        y = _convolved(
            x, w, b, row, column, position, length, row_ok, column_ok, CHANNELS, STRIDE, TAPS, direction == 0
        )
        to = out + (direction * tokens + start) * CHANNELS
        mask = row_ok[:, None] & column_ok[None, :]
        tl.store(to + row[:, None] * CHANNELS + column[None, :], y * tl.sigmoid(y), mask=mask)


@triton.jit
def _pre_activation_kernel(
    x, weight, bias, grad, partial, tokens, length,
    CHANNELS: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient before SiLU, in place of the one after it, and this tile's part of weight's and bias's."""
    start = tl.program_id(0).to(tl.int64) * ROWS
    row, column, position, row_ok, column_ok = _tile(start, tokens, length, CHANNELS, ROWS, COLUMNS)
    x += start * STRIDE
    for direction in tl.static_range(2):
        w, b = weight + direction * TAPS * CHANNELS, bias + direction * CHANNELS
        y = _convolved(
            x, w, b, row, column, position, length, row_ok, column_ok, CHANNELS, STRIDE, TAPS, direction == 0
        )
        at = grad + (direction * tokens + start) * CHANNELS + row[:, None] * CHANNELS + column[None, :]
        mask = row_ok[:, None] & column_ok[None, :]
        sigmoid = tl.sigmoid(y)
        g = tl.load(at, mask=mask, other=0.0).to(tl.float32) * sigmoid * (1 + y * (1 - sigmoid))
        tl.store(at, g, mask=mask)
        to = partial + (tl.program_id(0).to(tl.int64) * 2 + direction) * (TAPS + 1) * CHANNELS + column
        for k in tl.static_range(TAPS):
            tile = _load(x, row, k, column, position, length, row_ok, column_ok, STRIDE, direction == 0)
            tl.store(to + (TAPS - 1 - k) * CHANNELS, tl.sum(g * tile, 0), mask=column_ok)
        tl.store(to + TAPS * CHANNELS, tl.sum(g, 0), mask=column_ok)


@triton.jit
def _input_kernel(
    grad, weight, dx, tokens, length,
    CHANNELS: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of x: each direction's convolution the other way round."""
    start = tl.program_id(0).to(tl.int64) * ROWS
    row, column, position, row_ok, column_ok = _tile(start, tokens, length, CHANNELS, ROWS, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for direction in tl.static_range(2):
        g, w = grad + (direction * tokens + start) * CHANNELS, weight + direction * TAPS * CHANNELS
        for k in tl.static_range(TAPS):
            tile = _load(g, row, k, column, position, length, row_ok, column_ok, CHANNELS, direction == 1)
            total += _taps(w, k, column, column_ok, CHANNELS, TAPS) * tile
    to = dx + start * STRIDE + row[:, None] * STRIDE + column[None, :]
    tl.store(to, total, mask=row_ok[:, None] & column_ok[None, :])


def _grid(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[0] * x.shape[1], ROWS), triton.cdiv(x.shape[2], COLUMNS)


def _sizes(x: Tensor, taps: int) -> dict[str, int]:
    """What is the model's, and so known when a kernel is compiled: addresses are then aligned for certain."""
    return {"CHANNELS": x.shape[2], "STRIDE": x.stride(1), "TAPS": taps, "ROWS": ROWS, "COLUMNS": COLUMNS}


def conv_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """SiLU of the convolution along the tokens, and against them.

    Args:
        x: (b,l,c), rows evenly spaced in memory; a slice of wider rows will do.
        weight: (2,k,c).
        bias: (2,c).

    Returns:
        (2,b,l,c) in the dtype of x.
    """
    b, length, channels = x.shape
    out = x.new_empty(2, b, length, channels)
    _forward_kernel[_grid(x)](x, weight, bias, out, b * length, length, **_sizes(x, weight.shape[1]))
    return out


def conv_silu_backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, dx: Tensor) -> tuple[Tensor, Tensor]:
    """Writes the gradient of x into ``dx`` (b,l,c; may be a slice) and spoils ``grad`` (2,b,l,c).

    Returns:
        The gradients of weight (2,k,c) and bias (2,c), float32.
    """
    b, length, channels = x.shape
    tokens, taps = b * length, weight.shape[1]
    grid = _grid(x)
    partial = torch.empty(grid[0], 2, taps + 1, channels, device=x.device)
    _pre_activation_kernel[grid](x, weight, bias, grad, partial, tokens, length, **_sizes(x, taps))
    _input_kernel[grid](grad, weight, dx, tokens, length, **_sizes(dx, taps))
    total = partial.sum(0)
    return total[:, :taps], total[:, taps]
