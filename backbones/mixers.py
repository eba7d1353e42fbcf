"""Token mixers: softmax attention, linear attention, bidirectional Mamba-2 and Mamba-1.

Every mixer maps (B, L, D) to (B, L, D) and offers, for the same input,
``mixing(x, rows)``: those rows of its token-mixing matrix M, (B, heads, R, L); all rows where ``rows`` is None;
``decompose(x)``: Y = MX of each direction, with what the mixer itself gives for Y.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.ops import (
    BACKENDS,
    Directions,
    bidirectional_ssd,
    c_kernels,
    causal_conv,
    gated_rms_norm,
    selective_scan,
    selective_scan_matrix,
    ssd,
    ssd_decay,
    ssd_matrix,
)

KEY_AXES = ("tokens", "channels")
WHOLE_MIXER = ("triton", "c", "compiled")
"""Backends that are more than a scan's."""
IMAGES_A_THREAD = 0.25
"""From how many on ``auto`` takes C, which gives an image to one thread. A guess: with one image on two threads, the
least that was tried, C takes half the time of PyTorch's operations."""


class Mixing(NamedTuple):
    """Y = MX of one direction of a mixer, with tokens in sequence order; p is the width of a head."""

    direction: str
    """``attention``, ``forward`` or ``backward``."""
    matrix: Tensor
    """M (B, heads, L, L), without the skip D of scans."""
    inputs: Tensor
    """X (B, heads, L, p)."""
    outputs: Tensor
    """Y (B, heads, L, p) less the skip, by the path that the mixer takes; before gating and projection."""
    decay: Tensor | None = None
    """The decay mask (B, heads, L, L) of scans with one decay a head, else None."""
    width: int | None = None
    """The inner size that bounds ranks: a head's channels for linear attention, the state n for scans."""

    def reversed(self) -> "Mixing":
        """The same over the tokens in reverse order: what a scan over reversed tokens is to the tokens themselves."""
        decay = None if self.decay is None else self.decay.flip(2, 3)
        flipped = self.matrix.flip(2, 3), self.inputs.flip(2), self.outputs.flip(2), decay
        return Mixing(self.direction, *flipped, self.width)


class SoftmaxAttention(nn.Module):
    """Multi-head attention: Y = softmax(Q K^T / √d) V."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"embed_dim={dim} is not a multiple of num_heads={num_heads}")
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, L, D) to three of (B, heads, L, D / heads)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(*self._qkv(x))
        return self.proj(y.transpose(1, 2).flatten(2))

    def mixing(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        q, k, _ = self._qkv(x)
        q = q if rows is None else q[:, :, rows]
        return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)

    def decompose(self, x: Tensor) -> list[Mixing]:
        q, k, v = self._qkv(x)
        return [Mixing("attention", self.mixing(x), v, F.scaled_dot_product_attention(q, k, v))]


class LinearAttention(SoftmaxAttention):
    """Y = ψ(Q) (ψ(K)^T V), linear in L: ψ is a softmax over the head's channels for Q, over ``key_axis`` for K.

    With ``key_axis="tokens"`` the rows of M = ψ(Q) ψ(K)^T sum to 1 (Shen et al. 2021); with "channels" they do not.
    """

    def __init__(self, dim: int, num_heads: int, key_axis: str = "tokens") -> None:
        super().__init__(dim, num_heads)
        if key_axis not in KEY_AXES:
            raise ValueError(f"key_axis={key_axis!r}; allowed: {', '.join(KEY_AXES)}")
        self.key_axis = key_axis

    def _features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q.softmax(-1), k.softmax(-2 if self.key_axis == "tokens" else -1)

    def _attend(self, x: Tensor) -> Tensor:
        """(B, heads, L, D / heads)."""
        q, k, v = self._qkv(x)
        q, k = self._features(q, k)
        return q @ (k.transpose(-1, -2).to(v.dtype) @ v).to(q.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self._attend(x).transpose(1, 2).flatten(2))

    def mixing(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        q, k, _ = self._qkv(x)
        q, k = self._features(q, k)
        return (q if rows is None else q[:, :, rows]) @ k.transpose(-1, -2)

    def decompose(self, x: Tensor) -> list[Mixing]:
        v = self._qkv(x)[2]
        return [Mixing("attention", self.mixing(x), v, self._attend(x), width=v.shape[-1])]


def _initial_dt_bias(heads: int, dt_min: float, dt_max: float, floor: float = 1e-4) -> Tensor:
    """The inverse of softplus at step sizes log-uniform in [dt_min, dt_max]."""
    dt = torch.exp(torch.rand(heads) * (math.log(dt_max) - math.log(dt_min)) + math.log(dt_min)).clamp(min=floor)
    return dt + torch.log(-torch.expm1(-dt))


class ScanInputs(NamedTuple):
    """What one scan takes: the first arguments of :func:`backbones.ops.ssd`."""

    x: Tensor  # (b,l,h,p)
    dt: Tensor  # (b,l,h)
    A: Tensor  # (h)
    B: Tensor  # (b,l,g,n)
    C: Tensor  # (b,l,g,n)
    D: Tensor  # (h)

    def matrix(self, rows: Tensor) -> Tensor:
        """Those rows of the scan's token-mixing matrix, without D; (b,h,r,l)."""
        return ssd_matrix(self.dt, self.A, self.B, self.C, rows)


class BidirectionalMamba2(nn.Module):
    """Mamba-2 over the sequence and over its reverse, sharing both projections; the two gated outputs are averaged.

    Parameter names are Dino-Mamba's; ``_b`` marks the backward scan.

    Args:
        dim: D.
        d_state: n, the state's size.
        headdim: p; ``dim * expand / headdim`` heads.
        expand: inner width over D.
        d_conv: taps of the causal convolution.
        ngroups: g, sets of B and C.
        dt_min, dt_max: range of the initial step sizes.
        chunk_size, backend: see :func:`backbones.ops.ssd`; ``triton`` and ``c`` take
            :func:`backbones.ops.bidirectional_ssd` for all between the two projections, ``compiled`` puts ``torch``
            through torch.compile. On the CPU ``auto`` is ``c`` in float32 where there is a compiler.

    Raises:
        ValueError: for an unknown backend, where ``dim * expand / headdim`` is not whole, or (with
            ``backend="mamba_ssm"``, whose kernels need it) no multiple of 8.
    """

    def __init__(
        self, dim: int, d_state: int = 64, headdim: int = 64, expand: int = 2, d_conv: int = 4, ngroups: int = 1,
        dt_min: float = 0.001, dt_max: float = 0.1, chunk_size: int = 256, backend: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        inner = dim * expand
        if backend not in (*BACKENDS, *WHOLE_MIXER):
            raise ValueError(f"backend={backend!r}; allowed: {', '.join((*BACKENDS, *WHOLE_MIXER))}")
        if inner % headdim:
            raise ValueError(
                f"embed_dim·expand/headdim must be a whole number: embed_dim={dim}, expand={expand}, headdim={headdim}"
            )
        heads = inner // headdim
        if backend == "mamba_ssm" and heads % 8:
            raise ValueError(
                "mamba-ssm's kernels want embed_dim·expand/headdim to be a multiple of 8: "
                f"embed_dim={dim}, expand={expand}, headdim={headdim} give {heads}; use backend='auto' or 'torch'"
            )
        if heads % ngroups:
            raise ValueError(f"ngroups={ngroups} must divide the {heads} heads")
        self.inner, self.heads, self.headdim, self.ngroups, self.d_state = (
            inner,
            heads,
            headdim,
            ngroups,
            d_state,
        )
        self.chunk_size, self.backend, self.eps = chunk_size, backend, 1e-5
        conv_dim = inner + 2 * ngroups * d_state
        self.in_proj = nn.Linear(dim, inner + conv_dim + heads, bias=False)  # z, (x, B, C), dt
        # nn.Conv1d holds the weights in the published shape and initialisation; the operation is causal_conv
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, d_conv, groups=conv_dim, padding=d_conv - 1)
        self.conv1d_b = nn.Conv1d(conv_dim, conv_dim, d_conv, groups=conv_dim, padding=d_conv - 1)
        self.dt_bias = nn.Parameter(_initial_dt_bias(heads, dt_min, dt_max))
        self.dt_b_bias = nn.Parameter(_initial_dt_bias(heads, dt_min, dt_max))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.A_log_b = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.D_b = nn.Parameter(torch.ones(heads))
        self.norm = _Weight(inner)
        self.norm_b = _Weight(inner)
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def _scan_inputs(self, u: Tensor) -> tuple[Tensor, ScanInputs, ScanInputs]:
        """The gate z (b,l,inner) and each direction's inputs, the second one's tokens reversed."""
        z, xBC, dt = self.in_proj(u).split([self.inner, self.inner + 2 * self.ngroups * self.d_state, self.heads], -1)
        dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
        forward = self._direction(xBC, dt, self.conv1d, self.dt_bias, self.A_log, self.D)
        backward = self._direction(xBC.flip(1), dt.flip(1), self.conv1d_b, self.dt_b_bias, self.A_log_b, self.D_b)
        return z, forward, backward

    def _direction(
        self, xBC: Tensor, dt: Tensor, conv: nn.Conv1d, dt_bias: Tensor, A_log: Tensor, D: Tensor
    ) -> ScanInputs:
        xBC = F.silu(causal_conv(xBC, conv.weight.squeeze(1), conv.bias))
        state = self.ngroups * self.d_state
        x, B, C = xBC.split([self.inner, state, state], -1)
        heads, groups = (self.heads, self.headdim), (self.ngroups, self.d_state)
        dt, A = F.softplus(dt + dt_bias), -A_log.exp()
        return ScanInputs(x.unflatten(-1, heads), dt, A, B.unflatten(-1, groups), C.unflatten(-1, groups), D)

    @property
    def _scan_backend(self) -> str:
        """For a scan alone."""
        return {"triton": "auto", "c": "torch", "compiled": "torch"}.get(self.backend, self.backend)

    def scan(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gate z and the outputs of both scans before gating, (B, L, inner) each and in the order of u."""
        z, *both = self._scan_inputs(u)
        y, y_b = (ssd(*inputs, self.chunk_size, self._scan_backend).flatten(2) for inputs in both)
        return z, y, y_b.flip(1)

    def _directions(self) -> Directions:
        return Directions(
            torch.stack([self.conv1d.weight.squeeze(1).t(), self.conv1d_b.weight.squeeze(1).t()]),
            torch.stack([b for conv in (self.conv1d, self.conv1d_b) if (b := conv.bias) is not None]),
            torch.stack([self.dt_bias, self.dt_b_bias]),
            torch.stack([self.A_log, self.A_log_b]),
            torch.stack([self.D, self.D_b]),
            torch.stack([self.norm.weight, self.norm_b.weight]),
        )

    def _kernels(self, u: Tensor) -> str | None:
        """For all between the projections; None for one operation after the other."""
        if self.backend != "auto":
            return self.backend if self.backend in ("triton", "c") else None
        plain = u.device.type == "cpu" and u.dtype == self.in_proj.weight.dtype == torch.float32
        if not plain or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
            return None
        enough = IMAGES_A_THREAD * torch.get_num_threads() <= len(u)  # a sequence is one thread's
        return "c" if enough and c_kernels() is not None else None

    def forward(self, u: Tensor) -> Tensor:
        if (kernels := self._kernels(u)) is not None:
            sizes = self.headdim, self.d_state, self.ngroups, self.eps
            return self.out_proj(bidirectional_ssd(self.in_proj(u), self._directions(), *sizes, kernels))
        if self.backend == "compiled":
            return _compiled()(self, u)
        return self._forward(u)

    def _forward(self, u: Tensor) -> Tensor:
        z, forward, backward = self.scan(u)
        y = gated_rms_norm(forward, z, self.norm.weight, self.eps, self.ngroups)
        y_b = gated_rms_norm(backward, z, self.norm_b.weight, self.eps, self.ngroups)
        return self.out_proj((y + y_b) / 2)

    def mixing(self, u: Tensor, rows: Tensor | None = None) -> Tensor:
        """Rows of (M_forward + M_backward) / 2 with their skips D, before gating and normalisation."""
        _, forward, backward = self._scan_inputs(u)
        length = u.shape[1]
        rows = torch.arange(length, device=u.device) if rows is None else rows
        M = (forward.matrix(rows) + backward.matrix(length - 1 - rows).flip(-1)) / 2
        skip = ((self.D + self.D_b) / 2)[:, None, None] * F.one_hot(rows, length).to(M.dtype)
        return M + skip

    def decompose(self, u: Tensor) -> list[Mixing]:
        _, *both = self._scan_inputs(u)
        forward, backward = (
            Mixing(
                direction, ssd_matrix(*inputs[1:5]), inputs.x.transpose(1, 2),
                ssd(*inputs[:5], None, self.chunk_size, self._scan_backend).transpose(1, 2),
                ssd_decay(inputs.dt, inputs.A), self.d_state,
            )
            for direction, inputs in zip(("forward", "backward"), both, strict=True)
        )  # fmt: skip
        return [forward, backward.reversed()]


@cache
def _compiled() -> Callable[[BidirectionalMamba2, Tensor], Tensor]:
    """One compilation for all blocks alike and each shape, kept on disk by torch (TORCHINDUCTOR_CACHE_DIR)."""
    return torch.compile(BidirectionalMamba2._forward, dynamic=False)


class _SelectiveInputs(NamedTuple):
    """What one Mamba-1 scan takes: the arguments of :func:`backbones.ops.selective_scan`."""

    x: Tensor  # (b,l,d)
    dt: Tensor  # (b,l,d)
    A: Tensor  # (d,n)
    B: Tensor  # (b,l,n)
    C: Tensor  # (b,l,n)
    D: Tensor  # (d)


class BidirectionalMamba1(nn.Module):
    """Mamba-1 over the sequence and over its reverse, as the supervised Vim and Mamba-Reg are published.

    Parameter names are Vim's; ``_b`` marks the backward scan. Every one of the ``dim * expand`` channels has its own
    token-mixing matrix.

    Args:
        dim: D.
        d_state: n, the state's size.
        expand: inner width over D.
        d_conv: taps of the causal convolution.
        dt_min, dt_max: range of the initial step sizes.
        chunk_size: see :func:`backbones.ops.selective_scan`.
    """

    def __init__(
        self, dim: int, d_state: int = 16, expand: int = 2, d_conv: int = 4, dt_min: float = 0.001,
        dt_max: float = 0.1, chunk_size: int = 32,
    ) -> None:  # fmt: skip
        super().__init__()
        inner, rank = dim * expand, math.ceil(dim / 16)
        self.inner, self.d_state, self.rank, self.chunk_size = inner, d_state, rank, chunk_size
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)  # x, z
        for end in ("", "_b"):
            setattr(self, f"conv1d{end}", nn.Conv1d(inner, inner, d_conv, groups=inner, padding=d_conv - 1))
            setattr(self, f"x_proj{end}", nn.Linear(inner, rank + 2 * d_state, bias=False))  # dt, B, C
            dt_proj = nn.Linear(rank, inner)
            nn.init.uniform_(dt_proj.weight, -(rank**-0.5), rank**-0.5)
            with torch.no_grad():
                dt_proj.bias.copy_(_initial_dt_bias(inner, dt_min, dt_max))
            setattr(self, f"dt_proj{end}", dt_proj)
            steps = torch.arange(1, d_state + 1, dtype=torch.float32).repeat(inner, 1)
            setattr(self, f"A{end}_log", nn.Parameter(steps.log()))
            setattr(self, f"D{end}", nn.Parameter(torch.ones(inner)))
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def _scan_inputs(self, u: Tensor) -> tuple[Tensor, _SelectiveInputs, _SelectiveInputs]:
        """The gate z (b,l,inner) and each direction's inputs, the second one's tokens reversed."""
        x, z = self.in_proj(u).chunk(2, -1)
        return z, self._direction(x, ""), self._direction(x.flip(1), "_b")

    def _direction(self, x: Tensor, end: str) -> _SelectiveInputs:
        conv, x_proj, dt_proj = (getattr(self, f"{name}{end}") for name in ("conv1d", "x_proj", "dt_proj"))
        x = F.silu(causal_conv(x, conv.weight.squeeze(1), conv.bias))
        low, B, C = x_proj(x).split([self.rank, self.d_state, self.d_state], -1)
        dt = F.linear(low, dt_proj.weight)
        dt = F.softplus(dt.to(torch.promote_types(dt.dtype, torch.float32)) + dt_proj.bias)
        return _SelectiveInputs(x, dt, -getattr(self, f"A{end}_log").exp(), B, C, getattr(self, f"D{end}"))

    def scan(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gate z and the outputs of both scans before gating, (B, L, inner) each and in the order of u."""
        z, *both = self._scan_inputs(u)
        y, y_b = (selective_scan(*inputs, self.chunk_size) for inputs in both)
        return z, y, y_b.flip(1)

    def forward(self, u: Tensor) -> Tensor:
        z, forward, backward = self.scan(u)
        return self.out_proj((forward + backward) / 2 * F.silu(z))

    def mixing(self, u: Tensor, rows: Tensor | None = None) -> Tensor:
        """Rows of (M_forward + M_backward) / 2 with their skips D, channel by channel, before gating."""
        _, forward, backward = self._scan_inputs(u)
        length = u.shape[1]
        rows = torch.arange(length, device=u.device) if rows is None else rows
        M = selective_scan_matrix(*forward[1:5], rows)
        M = (M + selective_scan_matrix(*backward[1:5], length - 1 - rows).flip(-1)) / 2
        skip = ((forward.D + backward.D) / 2)[:, None, None] * F.one_hot(rows, length).to(M.dtype)
        return M + skip

    def decompose(self, u: Tensor) -> list[Mixing]:
        _, *both = self._scan_inputs(u)
        forward, backward = (  # a channel is a head of width 1
            Mixing(
                direction, selective_scan_matrix(*inputs[1:5]), inputs.x.transpose(1, 2)[..., None],
                selective_scan(*inputs[:5], None, self.chunk_size).transpose(1, 2)[..., None], width=self.d_state,
            )
            for direction, inputs in zip(("forward", "backward"), both, strict=True)
        )  # fmt: skip
        return [forward, backward.reversed()]


class _Weight(nn.Module):
    """Holds the weight of a normalisation under its published name."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
