"""State-space duality (SSD): the scan of Mamba-2 as a recurrence, as one matrix, and in chunks.

Shapes: b batch, l tokens, h heads, p headdim, g groups, n state, c chunks, q tokens in a chunk.

All paths compute, per head, with state S of shape (p, n) and decay a_t = exp(dt_t A),

    S_t = a_t S_{t-1} + dt_t x_t B_t^T,      y_t = S_t C_t + D x_t,

which is Y = MX with M_ij = C_i·B_j exp(sum_{j<k<=i} dt_k A) dt_j for j <= i (Dao & Gu 2024, eq. 6 and sec. 6).
"""

import warnings
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

BACKENDS = ("auto", "torch", "recurrent", "mamba_ssm")


def _at_least_float32(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


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
    compute = torch.promote_types(_at_least_float32(x).dtype, dt.dtype)
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


def _decay(cum: Tensor) -> Tensor:
    """(..., q) cumulative log-decay to (..., q, q): exp(cum_i - cum_j) for j <= i, else 0.

    The exponent is masked before exp, so that no overflow above the diagonal turns into NaN gradients.
    """
    q = cum.shape[-1]
    above = torch.ones(q, q, dtype=torch.bool, device=cum.device).triu(1)
    return (cum[..., :, None] - cum[..., None, :]).masked_fill(above, float("-inf")).exp()


def ssd_decay(dt: Tensor, A: Tensor, rows: Tensor | None = None) -> Tensor:
    """The decay mask exp(sum_{j<k<=i} dt_k A) for j <= i, else 0; (b, h, l, l), or (b, h, r, l) for ``rows`` (r)."""
    cum = torch.cumsum(_at_least_float32(dt) * A, 1).transpose(1, 2)  # b h l
    length = dt.shape[1]
    index = torch.arange(length, device=dt.device) if rows is None else rows
    above = torch.arange(length, device=dt.device)[None, :] > index[:, None]
    return (cum[:, :, index, None] - cum[:, :, None, :]).masked_fill(above, float("-inf")).exp()


def ssd_matrix(dt: Tensor, A: Tensor, B: Tensor, C: Tensor, rows: Tensor | None = None) -> Tensor:
    """The token-mixing matrix M of Y = MX, without the skip D; (b, h, l, l), or (b, h, r, l) for ``rows`` (r)."""
    C = C if rows is None else C[:, rows]
    scores = torch.einsum("brgn,blgn->bgrl", C, B).repeat_interleave(dt.shape[2] // B.shape[2], 1)
    return scores * ssd_decay(dt, A, rows) * dt.transpose(1, 2)[:, :, None, :]


class _MaskedProduct(torch.autograd.Function):
    """y = MX + DX with M_ij = scores_ij exp(cum_i - cum_j) dt_j for j <= i, in few passes over memory.

    With G = dM * M, the gradients of cum and dt need no further (l, l) matrix: the row sums of G are dy_i · (MX)_i,
    its column sums x_j · (M^T dy)_j.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, scores: Tensor, cum: Tensor, dt: Tensor, D: Tensor | None, x: Tensor
    ) -> Tensor:
        """scores (b, g, l, l), cum and dt (b, h, l), D (h), x (b, h, l, p) to (b, h, l, p)."""
        b, h, length = cum.shape
        g = scores.shape[1]
        dt = dt.clamp(min=torch.finfo(dt.dtype).tiny)  # the backward pass divides by it
        # above the diagonal exp may overflow; tril_ overwrites it, and no gradient flows through it
        decay = (cum[..., :, None] - cum[..., None, :]).exp_().tril_().mul_(dt[..., None, :])
        M = (decay.view(b, g, h // g, length, length) * scores.unsqueeze(2)).view_as(decay).to(x.dtype)
        y = M @ x
        ctx.save_for_backward(decay, M, x, y, dt, D)
        ctx.groups = g
        return y if D is None else torch.addcmul(y, x, D[:, None, None].to(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        decay, M, x, y, dt, D = ctx.saved_tensors
        b, h, length, _ = dy.shape
        g = ctx.groups
        dy = dy.contiguous()
        dx = M.transpose(-1, -2) @ dy
        columns = (x * dx).sum(-1, dtype=dt.dtype)
        dcum = (dy * y).sum(-1, dtype=dt.dtype) - columns
        dM = dy @ x.transpose(-1, -2)
        dD = None
        if D is not None:
            dD = dM.diagonal(dim1=-2, dim2=-1).sum((0, 2), dtype=D.dtype)
            dx.addcmul_(dy, D[:, None, None].to(x.dtype))
        dM = dM.view(b, g, h // g, length, length)
        decay = decay.view_as(dM)
        dscores = dM[:, :, 0] * decay[:, :, 0]
        for i in range(1, h // g):
            dscores.addcmul_(dM[:, :, i].to(decay.dtype), decay[:, :, i])
        return dscores, dcum, columns / dt, dD, dx


def _quadratic(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> Tensor:
    """The whole sequence as one chunk: M is built and multiplied; O(l^2)."""
    cum = torch.cumsum(dt * A, 1).transpose(1, 2).contiguous()  # b h l
    scores = C.transpose(1, 2) @ B.permute(0, 2, 3, 1)  # b g l l
    heads_first = (dt.transpose(1, 2).contiguous(), D, x.transpose(1, 2).contiguous())  # so that each is dense
    return _MaskedProduct.apply(scores, cum, *heads_first).transpose(1, 2)


def _chunked(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, q: int) -> Tensor:
    """Quadratic inside chunks of q tokens, a recurrence of states between them; O(l q)."""
    b, length, h, p = x.shape
    g, n = B.shape[2:]
    pad = -length % q  # padded tokens have dt = 0: no input, no decay
    if pad:
        x, B, C = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (x, B, C))
        dt = F.pad(dt, (0, 0, 0, pad))
    c = (length + pad) // q
    # one matrix product per (b, chunk, group): heads of a group stand beside each other
    xdt = (x * dt[..., None]).to(x.dtype).view(b, c, q, h, p).transpose(2, 3)  # b c h q p
    Bc = B.view(b, c, q, g, n).transpose(2, 3)  # b c g q n
    Cc = C.view(b, c, q, g, n).transpose(2, 3)
    cum = torch.cumsum((dt * A).view(b, c, q, h), 2).transpose(2, 3)  # b c h q

    scores = Cc @ Bc.transpose(-1, -2)  # b c g q q
    M = (scores.unsqueeze(3) * _decay(cum).view(b, c, g, h // g, q, q)).view(b, c, h, q, q)
    y = M.to(x.dtype) @ xdt

    to_end = torch.exp(cum[..., -1:] - cum)[..., None]  # b c h q 1
    decayed = (xdt * to_end).to(x.dtype).view(b, c, g, h // g, q, p)
    states = (decayed.transpose(-1, -2) @ Bc.unsqueeze(3)).view(b, c, h, p, n)
    through = torch.exp(cum[..., -1])[..., None, None]  # b c h 1 1: the decay over a whole chunk
    entering = [torch.zeros_like(states[:, 0], dtype=cum.dtype)]
    for i in range(c - 1):
        entering.append(through[:, i] * entering[-1] + states[:, i])
    before = torch.stack(entering, 1).view(b, c, g, h // g, p, n).to(x.dtype)
    from_before = (Cc.unsqueeze(3) @ before.transpose(-1, -2)).view(b, c, h, q, p)
    y = y + from_before * torch.exp(cum)[..., None]
    y = y.transpose(2, 3).reshape(b, c * q, h, p)
    if D is not None:
        y = y + D[:, None].to(y.dtype) * x
    return y[:, :length]


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
        return kernel(x, dt.to(x.dtype), A.float(), B, C, chunk_size=chunk_size, D=D)
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
    if backend == "recurrent":
        return ssd_recurrent(x, dt, A, B, C, D)
    _check(x, dt, A, B, C, D)
    if backend == "mamba_ssm" or (backend == "auto" and x.is_cuda and x.dtype != torch.float64):
        y = _mamba_ssm(x, dt, A, B, C, D, chunk_size, strict=backend == "mamba_ssm")
        if y is not None:
            return y
    with torch.autocast(x.device.type, enabled=False):
        dt, A = _at_least_float32(dt), _at_least_float32(A)
        B, C = B.to(x.dtype), C.to(x.dtype)
        one_chunk = x.shape[1] <= chunk_size
        y = _quadratic(x, dt, A, B, C, D) if one_chunk else _chunked(x, dt, A, B, C, D, chunk_size)
    return y.to(x.dtype)
