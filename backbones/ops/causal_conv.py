"""Depthwise causal convolution along tokens.

Shapes: b batch, l tokens, d channels, k taps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.ops import traceable
from backbones.ops.tracing import counted, is_traced
from common.derivatives import differentiated_again, gradients


def causal_conv_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same as :func:`causal_conv` by torch's convolution: padded on both sides, cut to length."""
    k = weight.shape[-1]
    y = F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=k - 1, groups=x.shape[-1])
    return y[..., : x.shape[1]].transpose(1, 2)


class _ShiftedSum(torch.autograd.Function):
    """The convolution as k shifted multiply-adds, and its gradient the same way."""

    @staticmethod
    def forward(ctx, x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        """x (b, l, d), taps (k, d), bias (d)."""
        ctx.save_for_backward(x, taps, bias)
        k, length = len(taps), x.shape[1]
        y = torch.addcmul(bias, x, taps[k - 1])
        for back in range(1, min(k, length)):
            y[:, back:].addcmul_(x[:, :-back], taps[k - 1 - back])
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        x, taps, bias = ctx.saved_tensors
        if differentiated_again(dy):
            return tuple(gradients(lambda x, taps, bias: traceable.causal_conv(x, taps.t(), bias), (x, taps, bias), dy))
        k, length = len(taps), x.shape[1]
        dy = dy.contiguous()
        dx = dy * taps[k - 1]
        dtaps = torch.zeros_like(taps)
        dtaps[k - 1] = (dy * x).sum((0, 1))
        for back in range(1, min(k, length)):
            dx[:, :-back].addcmul_(dy[:, back:], taps[k - 1 - back])
            dtaps[k - 1 - back] = (dy[:, back:] * x[:, :-back]).sum((0, 1))
        return dx, dtaps, dy.sum((0, 1))


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y_t = bias + sum_i weight_i x_{t-k+1+i}, with zeros before the first token.

    On the CPU it is k shifted multiply-adds in (b,l,d) layout (timed in benchmarks/causal_conv.py against a grouped
    convolution, which works in (b,d,l) and needs two transposes); on a GPU it is the grouped convolution.

    Args:
        x: (b,l,d).
        weight: (d,k).
        bias: (d) or None.

    Returns:
        (b,l,d).
    """
    if is_traced():
        return traceable.causal_conv(x, weight, bias)
    return counted(_causal_conv, 2 * x.numel() * weight.shape[1], x, weight, bias)


def _causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.device.type != "cpu":
        return causal_conv_reference(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    d = len(weight)
    if x.shape[-1] != d:
        raise ValueError(f"causal_conv: x has {x.shape[-1]} channels, weight {d}")
    bias = weight.new_zeros(d) if bias is None else bias
    return _ShiftedSum.apply(x, weight.t().to(x.dtype).contiguous(), bias.to(x.dtype))
