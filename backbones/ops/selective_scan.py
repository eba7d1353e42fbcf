"""The selective scan of Mamba-1: as a recurrence, in parallel over chunks, and as matrices.

Shapes: b batch, l tokens, d channels, n state, q tokens in a chunk.

All paths compute, per channel with its own decays, with state h of shape (n),

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t,      y_t = C_t·h_t + D x_t

(Gu & Dao 2023, eq. 2 and algorithm 2, A discretised exactly and B by Euler's rule, as published weights are trained).
"""

import torch
from torch import Tensor

from backbones.ops import traceable
from backbones.ops.tracing import counted, is_traced, without_autocast
from common.precision import at_least_float32


def _check(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> None:
    if x.ndim != 3 or A.ndim != 2:
        raise ValueError(f"selective_scan wants x (b,l,d) and A (d,n); found x {tuple(x.shape)}, A {tuple(A.shape)}")
    b, length, d = x.shape
    n = A.shape[1]
    wanted = {"dt": (dt, (b, length, d)), "A": (A, (d, n)), "B": (B, (b, length, n)), "C": (C, (b, length, n))}
    if D is not None:
        wanted["D"] = (D, (d,))
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"selective_scan: {name} has shape {tuple(tensor.shape)}, wanted {shape}")


def selective_scan_recurrent(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, chunk_size: int = 32
) -> Tensor:
    """The scan by its definition, one token at a time: the slow reference of :func:`selective_scan`.

    ``chunk_size`` is taken for the sake of one signature and has no effect.
    """
    _check(x, dt, A, B, C, D)
    compute = torch.promote_types(at_least_float32(x).dtype, dt.dtype)
    xf, dtf, Bf, Cf = (t.to(compute) for t in (x, dt, B, C))
    state = xf.new_zeros(x.shape[0], x.shape[2], A.shape[1])
    ys = []
    for t in range(x.shape[1]):
        decay = torch.exp(dtf[:, t, :, None] * A)
        state = decay * state + (dtf[:, t] * xf[:, t])[..., None] * Bf[:, t, None, :]
        ys.append((state @ Cf[:, t, :, None]).squeeze(-1))
    y = torch.stack(ys, 1)
    if D is not None:
        y = y + D * xf
    return y.to(x.dtype)


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, chunk_size: int = 32
) -> Tensor:
    """The selective scan of Mamba-1, for any length and device, with gradients; linear in time and memory.

    Decays and states are float32 at least, whatever autocast says.

    Args:
        x: (b,l,d) inputs.
        dt: (b,l,d) step sizes, after softplus.
        A: (d,n) negative.
        B: (b,l,n) input maps.
        C: (b,l,n) output maps.
        D: (d) skip, or None.
        chunk_size: tokens scanned in parallel; states of so many tokens, (b,q,d,n), are held at a time.

    Returns:
        (b,l,d) in the dtype of x.

    Raises:
        ValueError: for shapes that do not fit, naming the argument.
    """
    if not torch.jit.is_tracing():  # whose sizes are tensors
        _check(x, dt, A, B, C, D)
    if chunk_size < 1:
        raise ValueError(f"selective_scan: chunk_size={chunk_size} must be positive")
    traced = is_traced()
    scan = traceable.selective_scan if traced else _chunked

    def computed(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> Tensor:
        with without_autocast(x.device.type):
            xf, dt, A, B, C = (at_least_float32(t) for t in (x, dt, A, B, C))
            y = scan(xf, dt, A, B, C, D, chunk_size)
        return y.to(x.dtype)

    if traced:
        return computed(x, dt, A, B, C, D)
    return counted(computed, 4 * x.numel() * A.shape[1], x, dt, A, B, C, D)


def _chunked(
    xf: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, chunk_size: int
) -> Tensor:  # fmt: skip
    entering, ys = xf.new_zeros(xf.shape[0], *A.shape), []
    for xq, dtq, Bq, Cq in zip(*(t.split(chunk_size, 1) for t in (xf, dt, B, C)), strict=True):
        decay = torch.exp(dtq[..., None] * A)  # b q d n
        through, states = traceable.prefix(decay, (dtq * xq)[..., None] * Bq[:, :, None, :], xq.shape[1])
        states = states + through * entering[:, None]
        entering = states[:, -1]
        ys.append((states @ Cq[..., None]).squeeze(-1))
    y = torch.cat(ys, 1)
    return y if D is None else y + D * xf


def selective_scan_matrix(dt: Tensor, A: Tensor, B: Tensor, C: Tensor, rows: Tensor | None = None) -> Tensor:
    """The token-mixing matrix M of y = Mx of every channel, without the skip D; (b,d,l,l), or (b,d,r,l) for ``rows``.

    M_ij = sum_n C_in B_jn exp(A_n sum_{j<k<=i} dt_k) dt_j for j <= i.
    """
    dt = at_least_float32(dt).transpose(1, 2)  # b d l
    total = torch.cumsum(dt, -1)
    length = dt.shape[-1]
    index = torch.arange(length, device=dt.device) if rows is None else rows
    below = torch.arange(length, device=dt.device)[None, :] <= index[:, None]
    elapsed = (total[:, :, index, None] - total[:, :, None, :]).masked_fill(~below, 0.0)  # b d r l
    M = torch.zeros_like(elapsed)
    for n in range(A.shape[1]):
        scores = C[:, None, index, n, None] * B[:, None, None, :, n]  # b 1 r l
        M = M + scores * torch.exp(A[:, n, None, None] * elapsed)
    return M * below * dt[:, :, None, :]
