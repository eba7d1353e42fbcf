"""The scans and the convolution in plain operations that any tracer can write down, for sizes that it does not know.

No autograd function, no loop over tokens or chunks whose number is free, no branch on a free size. Their references are
those of ssd.py, selective_scan.py and causal_conv.py, which take them where :func:`~backbones.ops.tracing.is_traced`.

Shapes: b batch, l tokens, h heads, p headdim, g groups, k = h / g, d channels, n state, c chunks, q tokens in a chunk.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.ops.tracing import fixed, is_free

CHUNK = 32
"""Tokens in a chunk where the length is free: up to twice as many more than there are may be computed."""


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (b,l,d), weight (d,taps) to (b,l,d), by a grouped convolution of what is padded in front."""
    taps, channels = fixed(weight.shape[1]), fixed(weight.shape[0])
    bias = None if bias is None else bias.to(x.dtype)
    padded = F.pad(x.transpose(1, 2), (taps - 1, 0))
    return F.conv1d(padded, weight.unsqueeze(1).to(x.dtype), bias, groups=channels).transpose(1, 2)


def _chunks(length: Any, q: int) -> Any:
    """How many chunks of q hold the tokens, and one more where the length is free: sizes of 1 are no free sizes."""
    return (length + q - 1) // q + int(is_free(length))


def _in_chunks(t: Tensor, pad: Any, *shape: Any) -> Tensor:
    """(b,l,...) to the shape (b,c,q,...), with ``pad`` zeros behind the last token."""
    if is_free(pad) or pad:
        t = F.pad(t, (0, 0) * (t.ndim - 2) + (0, pad))
    return t.reshape(shape)


def _entering(after: Tensor) -> Tensor:
    """States (b,c,...) after each chunk to those before it: zero before the first."""
    return F.pad(after, (0, 0) * (after.ndim - 2) + (1, 0))[:, : after.shape[1]]


def _elapsed(steps: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of steps (b,c,h) from the end of chunk j to that of chunk i, (b,c,c,h), and where j > i, (c,c).

    Each sum is made by itself: differences of long ones would cancel.
    """
    chunk = torch.arange(steps.shape[1], device=steps.device)
    behind = (chunk[:, None] > chunk)[..., None]
    return (steps[:, :, None] * behind.to(steps.dtype)).cumsum(1), chunk > chunk[:, None]


def _inside(xdt: Tensor, cum: Tensor, B: Tensor, C: Tensor, q: Any) -> Tensor:
    """A chunk's outputs of its own inputs: xdt (…,g,k,q,p), cum (…,g,k,q), B and C (…,g,q,n) to (…,g,k,q,p)."""
    index = torch.arange(q, device=xdt.device)
    decay = (cum[..., :, None] - cum[..., None, :]).masked_fill(index > index[:, None], -math.inf).exp()
    scores = (C @ B.transpose(-1, -2)).unsqueeze(-3)  # … g 1 q q
    return (decay * scores).to(xdt.dtype) @ xdt


def masked_product(x: Tensor, dt: Tensor, cum: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> Tensor:
    """One chunk, with cum the sums of dt A: x (b,h,l,p), dt and cum (b,h,l), B and C (b,g,l,n), D (h) to (b,h,l,p)."""
    heads = (B.shape[1], -1)
    xdt = (x * dt[..., None]).to(x.dtype).unflatten(1, heads)
    y = _inside(xdt, cum.unflatten(1, heads), B, C, x.shape[2]).flatten(1, 2)
    return y if D is None else y + x * D[:, None, None].to(x.dtype)


def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, chunk_size: int) -> Tensor:
    """:func:`backbones.ops.ssd` by chunks: a masked product inside each and, between them, one of their states.

    The arguments are in the dtypes that ssd computes in.
    """
    b, length = dt.shape[:2]  # not x's, which are constants to the TorchScript exporter of ONNX
    (h, p), (g, n) = map(fixed, x.shape[2:]), map(fixed, B.shape[2:])
    k = h // g
    q = min(chunk_size, CHUNK) if is_free(length) else min(chunk_size, length)
    c = _chunks(length, q)
    pad = c * q - length
    dtc = _in_chunks(dt, pad, b, c, q, h)
    cum = torch.cumsum(dtc * A, 2).transpose(2, 3).reshape(b, c, g, k, q)
    xdt = (_in_chunks(x, pad, b, c, q, h, p) * dtc[..., None]).to(x.dtype)
    xdt = xdt.transpose(2, 3).reshape(b, c, g, k, q, p)
    Bc, Cc = (_in_chunks(t, pad, b, c, q, g, n).transpose(2, 3) for t in (B, C))  # b c g q n

    y = _inside(xdt, cum, Bc, Cc, q)

    if is_free(length) or length > q:
        total = cum[..., -1:]
        states = (xdt * (total - cum).exp()[..., None]).to(x.dtype).transpose(-1, -2) @ Bc.unsqueeze(3)  # b c g k p n
        elapsed, later = _elapsed(total.reshape(b, c, h))
        between = elapsed.masked_fill(later[..., None], -math.inf).exp().permute(0, 3, 1, 2)  # b h c c
        flat = states.reshape(b, c, h, p * n).transpose(1, 2).to(between.dtype)
        after = (between @ flat).transpose(1, 2)  # b c h pn
        before = _entering(after).reshape(b, c, g, k, p, n).to(x.dtype)
        y = y + (Cc.unsqueeze(3) @ before.transpose(-1, -2)) * cum.exp()[..., None]
    y = y.reshape(b, c, h, q, p).transpose(2, 3).reshape(b, c * q, h, p)[:, :length]
    return y if D is None else y + x * D[:, None].to(x.dtype)


def prefix(decay: Tensor, state: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """All prefixes of h_t = decay_t h_{t-1} + state_t along axis 1 of ``size`` in log2 steps (Hillis & Steele 1986)."""
    step = 1
    while step < size:
        state = torch.cat([state[:, :step], state[:, step:] + decay[:, step:] * state[:, :-step]], 1)
        decay = torch.cat([decay[:, :step], decay[:, step:] * decay[:, :-step]], 1)
        step *= 2
    return decay, state


def selective_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, chunk_size: int) -> Tensor:
    """:func:`backbones.ops.selective_scan`, all chunks at a time, so that states of all tokens (b,l,d,n) are held.

    The arguments are in the dtypes that selective_scan computes in.
    """
    b, length = x.shape[:2]
    d, n = map(fixed, A.shape)
    q = 2 * CHUNK if is_free(length) else min(chunk_size, length)
    c = _chunks(length, q)
    pad = c * q - length
    xq, dtq = (_in_chunks(t, pad, b, c, q, d) for t in (x, dt))
    Bq, Cq = (_in_chunks(t, pad, b, c, q, n) for t in (B, C))
    decay = torch.exp(dtq[..., None] * A)  # b c q d n
    state = (dtq * xq)[..., None] * Bq[..., None, :]
    through, states = prefix(decay.flatten(0, 1), state.flatten(0, 1), q)
    through, states = (t.reshape(b, c, q, d, n) for t in (through, states))
    if is_free(length) or length > q:
        elapsed, later = _elapsed(dtq.sum(2))
        between = (elapsed[..., None] * A).masked_fill(later[..., None, None], -math.inf).exp()  # b c c d n
        after = (between * states[:, None, :, -1]).sum(2)
        states = states + through * _entering(after)[:, :, None]
    y = (states @ Cq[..., None]).reshape(b, c * q, d)[:, :length]
    return y if D is None else y + D * x
