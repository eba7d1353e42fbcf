"""Depthwise causal convolution along tokens.

Shapes: b batch, l tokens, d channels, k taps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same as :func:`causal_conv` by torch's convolution: padded on both sides, cut to length."""
    k = weight.shape[-1]
    y = F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=k - 1, groups=x.shape[-1])
    return y[..., : x.shape[1]].transpose(1, 2)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y_t = bias + sum_i weight_i x_{t-k+1+i}, with zeros before the first token.

    On the CPU it is k shifted multiply-adds in (b,l,d) layout, several times faster there than a grouped
    convolution, which works in (b,d,l) and needs two transposes; on a GPU it is the grouped convolution.

    Args:
        x: (b,l,d).
        weight: (d,k).
        bias: (d) or None.

    Returns:
        (b,l,d).
    """
    if x.device.type != "cpu":
        return causal_conv_reference(x, weight, bias)
    d, k = weight.shape
    if x.shape[-1] != d:
        raise ValueError(f"causal_conv: x has {x.shape[-1]} channels, weight {d}")
    length = x.shape[1]
    taps = weight.t().to(x.dtype)  # k d
    padded = F.pad(x, (0, 0, k - 1, 0))
    y = padded[:, k - 1 :] * taps[k - 1]
    for i in range(k - 1):
        y = torch.addcmul(y, padded[:, i : i + length], taps[i])
    return y if bias is None else y + bias.to(y.dtype)
