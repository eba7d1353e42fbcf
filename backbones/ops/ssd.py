"""State-space duality (SSD): the scan of Mamba-2 as a recurrence, as one matrix, and in chunks.

Shapes: b batch, l tokens, h heads, p headdim, g groups, n state, c chunks, q tokens in a chunk.

All paths compute, per head, with state S of shape (p, n) and decay a_t = exp(dt_t A),

    S_t = a_t S_{t-1} + dt_t x_t B_t^T,      y_t = S_t C_t + D x_t,

which is Y = MX with M_ij = C_i·B_j exp(sum_{j<k<=i} dt_k A) dt_j for j <= i (Dao & Gu 2024, eq. 6 and sec. 6).
"""

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.ops import traceable
from backbones.ops.recompute import keeps
from backbones.ops.tracing import counted, is_traced, without_autocast
from common.derivatives import differentiated_again, gradients
from common.precision import at_least_float32

BACKENDS = ("auto", "torch", "recurrent", "mamba_ssm")


def _check(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> None:
    if x.ndim != 4 or B.ndim != 4:
        raise ValueError(f"ssd wants x (b,l,h,p) and B (b,l,g,n); found x {tuple(x.shape)}, B {tuple(B.shape)}")
    b, length, h, _ = x.shape
    g = B.shape[2]
    wanted = {
        "dt": (dt, (b, length, h)),
        "A": (A, (h,)),
        "B": (B, (b, length, g, B.shape[3])),
        "C": (C, tuple(B.shape)),
    }
    if D is not None:
        wanted["D"] = (D, (h,))
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"ssd: {name} has shape {tuple(tensor.shape)}, x {tuple(x.shape)} wants {shape}")
    if h % g:
        raise ValueError(f"ssd: {h} heads cannot share {g} groups evenly")


def ssd_recurrent(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    chunk_size: int = 256, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """The scan by its definition, one token at a time: the slow reference of :func:`ssd`.

    ``chunk_size`` and ``backend`` are taken for the sake of one signature and have no effect.
    """
    _check(x, dt, A, B, C, D)
    rep = x.shape[2] // B.shape[2]
    compute = torch.promote_types(at_least_float32(x).dtype, dt.dtype)
    xf, dtf, Bf, Cf = (t.to(compute) for t in (x, dt, B, C))
    Bh, Ch = Bf.repeat_interleave(rep, 2), Cf.repeat_interleave(rep, 2)
    state = xf.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[3])
    ys = []
    for t in range(x.shape[1]):
        decay = torch.exp(dtf[:, t] * A)[..., None, None]
        state = decay * state + (dtf[:, t, :, None] * xf[:, t])[..., None] * Bh[:, t, :, None, :]
        ys.append((state @ Ch[:, t, :, :, None]).squeeze(-1))
    y = torch.stack(ys, 1)
    if D is not None:
        y = y + D[:, None] * xf
    return y.to(x.dtype)


def ssd_log_decay(dt: Tensor, A: Tensor) -> Tensor:
    """a_i, the sum of dt_k A over k <= i; (b, h, l). The decay mask is exp(a_i - a_j) for j <= i."""
    return torch.cumsum(at_least_float32(dt) * A, 1).transpose(1, 2)


def ssd_decay(dt: Tensor, A: Tensor, rows: Tensor | None = None) -> Tensor:
    """The decay mask exp(sum_{j<k<=i} dt_k A) for j <= i, else 0; (b, h, l, l), or (b, h, r, l) for ``rows`` (r)."""
    cum, length = ssd_log_decay(dt, A), dt.shape[1]
    index = torch.arange(length, device=dt.device) if rows is None else rows
    above = torch.arange(length, device=dt.device)[None, :] > index[:, None]
    return (cum[:, :, index, None] - cum[:, :, None, :]).masked_fill(above, float("-inf")).exp()


def ssd_scores(dt: Tensor, B: Tensor, C: Tensor, rows: Tensor | None = None) -> Tensor:
    """C_i · B_j dt_j, what the decay mask is multiplied with; (b, h, l, l), or (b, h, r, l) for ``rows`` (r)."""
    C = C if rows is None else C[:, rows]
    scores = torch.einsum("brgn,blgn->bgrl", C, B).repeat_interleave(dt.shape[2] // B.shape[2], 1)
    return scores * dt.transpose(1, 2)[:, :, None, :]


def ssd_matrix(dt: Tensor, A: Tensor, B: Tensor, C: Tensor, rows: Tensor | None = None) -> Tensor:
    """The token-mixing matrix M of Y = MX, without the skip D; (b, h, l, l), or (b, h, r, l) for ``rows`` (r)."""
    return ssd_scores(dt, B, C, rows) * ssd_decay(dt, A, rows)


def _least(dtype: torch.dtype) -> float:
    """The exponent below which a decay no longer shrinks: exp of it is 4e-23 in float32 and counts for nothing.

    Without it strong decays reach numbers below the smallest normal one, which CPUs multiply many times slower.
    """
    return 0.59 * math.log(torch.finfo(dtype).tiny)


def _decay_rows(cum: Tensor, i: int, j: int) -> Tensor:
    """Rows i to j of the decay mask, up to column j; (b, h, j - i, j) from (b, h, l)."""
    decay = (cum[:, :, i:j, None] - cum[:, :, None, :j]).clamp_(min=_least(cum.dtype)).exp_()
    decay[..., i:].tril_()  # above the diagonal exp may overflow; no gradient flows through it
    return decay


def _row_blocks(length: int, rows: int) -> list[tuple[int, int]]:
    return [(i, min(i + rows, length)) for i in range(0, length, rows)]


class _MaskedProduct(torch.autograd.Function):
    """y = MX' + DX with X' = dt X and M_ij = C_i·B_j exp(cum_i - cum_j) for j <= i, in few passes over memory.

    M is made in blocks of rows, each up to the diagonal only. If there are several, or memory is a device's, no block
    is kept: the backward pass makes them again, which takes the time that reading them would and none of their memory.

    The gradient of cum is the row sums of G = dM * M less its column sums: dy_i · (MX')_i and x'_j · (M^T dy)_j,
    without a further (l, l) matrix. In half precision G itself is summed: where the diagonal prevails, rounded ones
    would not cancel.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, x: Tensor, dt: Tensor, cum: Tensor, B: Tensor, C: Tensor, D: Tensor | None, rows: int
    ) -> Tensor:
        """x (b, h, l, p), dt and cum (b, h, l), B and C (b, g, l, n), D (h) to (b, h, l, p)."""
        blocks = _row_blocks(x.shape[2], rows)
        xdt, y = (x * dt[..., None]).to(x.dtype), torch.empty_like(x)
        for i, j in blocks:
            scores = (C[:, :, i:j] @ B[:, :, :j].transpose(-1, -2)).unsqueeze(2)
            decay = _decay_rows(cum, i, j).unflatten(1, (B.shape[1], -1))
            M = (decay * scores if len(blocks) == 1 else decay.mul_(scores)).flatten(1, 2).to(x.dtype)
            y[:, :, i:j] = M @ xdt[:, :, :j]
        kept = (xdt, decay, M) if keeps(x) and len(blocks) == 1 else (xdt,) if keeps(x) else ()
        ctx.save_for_backward(x, dt, cum, B, C, D, y, *kept)
        ctx.rows = rows
        return y if D is None else torch.addcmul(y, x, D[:, None, None].to(x.dtype))

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        x, dt, cum, B, C, D, y, *kept = ctx.saved_tensors
        if differentiated_again(dy):
            return *gradients(traceable.masked_product, (x, dt, cum, B, C, D), dy), None
        xdt, *kept = kept or ((x * dt[..., None]).to(x.dtype),)
        dy = dy.contiguous()
        low = x.dtype != cum.dtype
        dC, dcum, dB, dxdt = torch.empty_like(C), torch.zeros_like(cum), None, None
        for i, j in reversed(_row_blocks(x.shape[2], ctx.rows)):  # the last one reaches all columns
            Ci, Bj, dyi = C[:, :, i:j], B[:, :, :j], dy[:, :, i:j]
            scores = (Ci @ Bj.transpose(-1, -2)).unsqueeze(2) if low or not kept else None
            if kept:
                decay, M = kept
            else:
                decay = _decay_rows(cum, i, j).unflatten(1, (B.shape[1], -1))
                M = (decay * scores).flatten(1, 2).to(x.dtype)
            dM = (dyi @ xdt[:, :, :j].transpose(-1, -2)).view_as(decay)
            if low:
                by_decay = dM * decay
                G = (by_decay * scores).flatten(1, 2)
                dcum[:, :, i:j] += G.sum(-1)
                dcum[:, :, :j] -= G.sum(-2)
                dscores = by_decay.sum(2).to(C.dtype)
            else:
                dscores = dM[:, :, 0] * decay[:, :, 0]
                for k in range(1, decay.shape[2]):
                    dscores.addcmul_(dM[:, :, k], decay[:, :, k])
            dC[:, :, i:j] = dscores @ Bj
            if dxdt is None or dB is None:
                dxdt, dB = M.transpose(-1, -2) @ dyi, dscores.transpose(-1, -2) @ Ci
            else:
                dxdt[:, :, :j] += M.transpose(-1, -2) @ dyi
                dB[:, :, :j] += dscores.transpose(-1, -2) @ Ci
        assert dxdt is not None
        if not low:
            dcum = (dy * y).sum(-1) - (xdt * dxdt).sum(-1)
        # of long sums that nearly cancel: rounded products would not
        ddt = (at_least_float32(dxdt) * x).sum(-1).to(dt.dtype)
        dx, dD = (dxdt * dt[..., None]).to(x.dtype), None
        if D is not None:
            dD = (at_least_float32(dy) * x).sum((0, 2, 3)).to(D.dtype)
            dx.addcmul_(dy, D[:, None, None].to(x.dtype))
        return dx, ddt, dcum, dB, dC, dD, None


ROWS = 64
"""Of M in a block on the CPU; elsewhere all."""


def _quadratic(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> Tensor:
    """The whole sequence as one chunk: M is built and multiplied; O(l^2)."""
    cum = torch.cumsum(dt * A, 1)
    x, dt, cum, B, C = (t.transpose(1, 2).contiguous() for t in (x, dt, cum, B, C))  # so that each head is dense
    rows = ROWS if x.device.type == "cpu" else x.shape[2]
    return _MaskedProduct.apply(x, dt, cum, B, C, D, rows).transpose(1, 2)


def _chunked(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, q: int) -> Tensor:
    """Quadratic inside chunks of q tokens, a recurrence of states between them; O(l q)."""
    b, length, h, p = x.shape
    g, n = B.shape[2:]
    pad = -length % q  # padded tokens have dt = 0: no input, no decay
    if pad:
        x, B, C = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (x, B, C))
        dt = F.pad(dt, (0, 0, 0, pad))
    c = (length + pad) // q
    xc, dtc, Bc, Cc = (t.unflatten(1, (c, q)).flatten(0, 1) for t in (x, dt, B, C))
    y = _quadratic(xc, dtc, A, Bc, Cc, D).unflatten(0, (b, c))  # b c q h p

    # one matrix product per (b, chunk, group): heads of a group stand beside each other
    cum = torch.cumsum((dt * A).view(b, c, q, h), 2).transpose(2, 3)  # b c h q
    Bc = B.view(b, c, q, g, n).transpose(2, 3)  # b c g q n
    Cc = C.view(b, c, q, g, n).transpose(2, 3)
    least = _least(cum.dtype)
    to_end = (cum[..., -1:] - cum).clamp(min=least).exp().transpose(2, 3) * dt.view(b, c, q, h)
    decayed = (x.view(b, c, q, h, p) * to_end[..., None]).to(x.dtype).transpose(2, 3).view(b, c, g, h // g, q, p)
    states = (decayed.transpose(-1, -2) @ Bc.unsqueeze(3)).view(b, c, h, p, n)
    through = cum[..., -1].clamp(min=least).exp()[..., None, None]  # b c h 1 1: the decay over a whole chunk
    entering = [torch.zeros_like(states[:, 0], dtype=cum.dtype)]
    for i in range(c - 1):
        entering.append(through[:, i] * entering[-1] + states[:, i])
    before = torch.stack(entering, 1).view(b, c, g, h // g, p, n).to(x.dtype)
    from_before = (Cc.unsqueeze(3) @ before.transpose(-1, -2)).view(b, c, h, q, p)
    y = y + (from_before * cum.clamp(min=least).exp()[..., None]).transpose(2, 3)
    return y.reshape(b, c * q, h, p)[:, :length]


@cache
def _mamba_ssm_kernel() -> Callable[..., Tensor] | None:
    """mamba-ssm's chunked scan, or None with one warning that says why it cannot be used."""
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except Exception as error:  # a broken CUDA extension raises ImportError, OSError, RuntimeError, AttributeError...
        warnings.warn(
            f"mamba-ssm's kernel cannot be used ({type(error).__name__}: {error}); falling back to plain PyTorch. "
            "Install it with pip install 'dinomamba[cuda]', or set backend='torch' to silence this.",
            stacklevel=2,
        )
        return None
    return mamba_chunk_scan_combined


_kernel_failed = False


def _mamba_ssm(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, chunk_size: int, strict: bool
) -> Tensor | None:
    """Runs mamba-ssm's kernel; None where it cannot be used and ``strict`` is off."""
    global _kernel_failed
    kernel = None if _kernel_failed else _mamba_ssm_kernel()
    if kernel is None:
        if strict:
            raise RuntimeError(
                "backend='mamba_ssm' was asked for, but mamba-ssm's kernel cannot be used here; "
                "install it with pip install 'dinomamba[cuda]' or set backend='auto'"
            )
        return None
    try:
        y = kernel(x, dt.float(), A.float(), B, C, chunk_size=chunk_size, D=D)
    except Exception as error:
        if strict or isinstance(error, torch.OutOfMemoryError):
            raise
        _kernel_failed = True
        warnings.warn(
            f"mamba-ssm's kernel failed ({type(error).__name__}: {error}); falling back to plain PyTorch "
            "for the rest of this process",
            stacklevel=3,
        )
        return None
    if (
        y.requires_grad and not torch.compiler.is_compiling()
    ):  # its backward pass is kernels, whose results autograd would take for constants
        y.register_hook(_refuse_second_derivatives)
    return y


def _refuse_second_derivatives(grad: Tensor) -> None:
    if differentiated_again(grad):
        raise RuntimeError(
            "mamba-ssm's kernel has no second derivatives (create_graph) and none of batches (is_grads_batched); "
            "set the backbone's backend to 'torch', which has"
        )


def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    chunk_size: int = 256, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """The SSD scan of Mamba-2, for any length and device, with gradients.

    Up to ``chunk_size`` tokens it is one masked matrix product; longer sequences are chunked, linear in time and
    memory. Cumulative sums and exponentials run in float32 at least, whatever autocast says.

    Args:
        x: (b,l,h,p) inputs.
        dt: (b,l,h) step sizes, after softplus.
        A: (h) negative.
        B: (b,l,g,n) input maps; head i reads group i // (h / g).
        C: (b,l,g,n) output maps.
        D: (h) skip, or None.
        chunk_size: tokens in a chunk.
        backend: ``auto`` takes mamba-ssm's kernel on CUDA where it works and ``torch`` elsewhere; ``recurrent`` is
            the reference.

    Returns:
        (b,l,h,p) in the dtype of x.

    Raises:
        ValueError: for shapes that do not fit, naming the argument, or an unknown backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"ssd: backend={backend!r}; allowed: {', '.join(BACKENDS)}")
    if chunk_size < 1:
        raise ValueError(f"ssd: chunk_size={chunk_size} must be positive")
    if not torch.jit.is_tracing():  # whose sizes are tensors
        _check(x, dt, A, B, C, D)
    if is_traced():
        with without_autocast(x.device.type):
            dt, A = at_least_float32(dt), at_least_float32(A)
            return traceable.ssd(x, dt, A, B.to(x.dtype), C.to(x.dtype), D, chunk_size)

    def computed(*tensors: Any) -> Tensor:
        return _computed(chunk_size, backend, *tensors)

    return counted(computed, 4 * x.numel() * B.shape[3], x, dt, A, B, C, D)


def _computed(
    chunk_size: int, backend: str, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None
) -> Tensor:
    if backend == "recurrent":
        return ssd_recurrent(x, dt, A, B, C, D)
    if backend == "mamba_ssm" or (backend == "auto" and x.is_cuda and x.dtype != torch.float64):
        y = _mamba_ssm(x, dt, A, B, C, D, chunk_size, strict=backend == "mamba_ssm")
        if y is not None:
            return y
    with without_autocast(x.device.type):
        dt, A, D = at_least_float32(dt), at_least_float32(A), None if D is None else at_least_float32(D)
        B, C = B.to(x.dtype), C.to(x.dtype)
        one_chunk = x.shape[1] <= chunk_size
        y = _quadratic(x, dt, A, B, C, D) if one_chunk else _chunked(x, dt, A, B, C, D, chunk_size)
    return y.to(x.dtype)
