"""Bidirectional Mamba-2."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.mixers.base import Mixing, convolved, initial_dt_bias, spread, untouched
from backbones.ops import (
    BACKENDS,
    Directions,
    GatedRMSNorm,
    bidirectional_ssd,
    c_kernels,
    is_watched,
    recomputed,
    ssd,
    ssd_decay,
    ssd_log_decay,
    ssd_matrix,
    ssd_scores,
)
from common.precision import at_least_float32

WHOLE_MIXER = ("triton", "c", "compiled")
"""Backends that are more than a scan's."""
IMAGES_A_THREAD = 0.25
"""From how many on ``auto`` takes C, which gives an image to one thread. A guess: with one image on two threads, the
least that was tried, C takes half the time of PyTorch's operations."""


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

    def of_heads(self, heads: Tensor) -> "ScanInputs":
        """The same of some heads, each with B and C of its own."""
        group = heads // (self.x.shape[2] // self.B.shape[2])
        x, dt = self.x[:, :, heads], self.dt[:, :, heads]
        return ScanInputs(x, dt, self.A[heads], self.B[:, :, group], self.C[:, :, group], self.D[heads])


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
        dt_min, dt_max: range of the initial step sizes, drawn log-uniformly.
        A_init_range: range of the initial decay rates −A, drawn uniformly. Over l tokens a head keeps exp(A·dt·l) of
            its state; mamba-ssm's ranges are for hundreds of tokens and long training.
        chunk_size, backend: see :func:`backbones.ops.ssd`; ``triton`` and ``c`` take
            :func:`backbones.ops.bidirectional_ssd` for all between the two projections, ``compiled`` puts ``torch``
            through torch.compile. On the CPU ``auto`` is ``c`` in float32 where there is a compiler.

    Raises:
        ValueError: for an unknown backend, where ``dim * expand / headdim`` is not whole, or (with
            ``backend="mamba_ssm"``, whose kernels need it) no multiple of 8.
    """

    def __init__(
        self, dim: int, d_state: int = 64, headdim: int = 64, expand: int = 2, d_conv: int = 4, ngroups: int = 1,
        dt_min: float = 0.001, dt_max: float = 0.1, A_init_range: tuple[float, float] = (1.0, 16.0),
        chunk_size: int = 256, backend: str = "auto",
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
        self.head_shape = heads, headdim
        self.chunk_size, self.backend, self.eps = chunk_size, backend, 1e-5
        conv_dim = inner + 2 * ngroups * d_state
        self.in_proj = nn.Linear(dim, inner + conv_dim + heads, bias=False)  # z, (x, B, C), dt
        # of the published shape and initialisation; what is computed is causal_conv where nobody listens
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, d_conv, groups=conv_dim, padding=d_conv - 1)
        self.conv1d_b = nn.Conv1d(conv_dim, conv_dim, d_conv, groups=conv_dim, padding=d_conv - 1)
        self.dt_bias = nn.Parameter(initial_dt_bias(heads, dt_min, dt_max))
        self.dt_b_bias = nn.Parameter(initial_dt_bias(heads, dt_min, dt_max))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(*A_init_range).log())
        self.A_log_b = nn.Parameter(torch.empty(heads).uniform_(*A_init_range).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.D_b = nn.Parameter(torch.ones(heads))
        self.norm = GatedRMSNorm(inner, ngroups, self.eps)
        self.norm_b = GatedRMSNorm(inner, ngroups, self.eps)
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def _scan_inputs(self, u: Tensor) -> tuple[Tensor, ScanInputs, ScanInputs]:
        """The gate z (b,l,inner) and each direction's inputs, the second one's tokens reversed."""
        z, xBC, dt = self._parts(self.in_proj(u))
        return z, self._forward_inputs(xBC, dt), self._backward_inputs(xBC, dt)

    def _parts(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gate z, the convolution's input (b,l,inner + 2gn), and dt (b,l,h) before its bias and softplus."""
        z, xBC, dt = projected.split([self.inner, self.inner + 2 * self.ngroups * self.d_state, self.heads], -1)
        return z, xBC, at_least_float32(dt)

    def _forward_inputs(self, xBC: Tensor, dt: Tensor) -> ScanInputs:
        return self._direction(xBC, dt, self.conv1d, self.dt_bias, self.A_log, self.D)

    def _backward_inputs(self, xBC: Tensor, dt: Tensor) -> ScanInputs:
        return self._direction(xBC.flip(1), dt.flip(1), self.conv1d_b, self.dt_b_bias, self.A_log_b, self.D_b)

    def _direction(
        self, xBC: Tensor, dt: Tensor, conv: nn.Conv1d, dt_bias: Tensor, A_log: Tensor, D: Tensor
    ) -> ScanInputs:
        xBC = F.silu(convolved(xBC, conv))
        state = self.ngroups * self.d_state
        x, B, C = xBC.split([self.inner, state, state], -1)
        heads, groups = (self.heads, self.headdim), (self.ngroups, self.d_state)
        dt, A = F.softplus(dt + dt_bias), -at_least_float32(A_log).exp()
        return ScanInputs(x.unflatten(-1, heads), dt, A, B.unflatten(-1, groups), C.unflatten(-1, groups), D)

    @property
    def _scan_backend(self) -> str:
        """For a scan alone."""
        return {"triton": "auto", "c": "torch", "compiled": "torch"}.get(self.backend, self.backend)

    def scan(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gate z and the outputs of both scans before gating, (B, L, inner) each and in the order of u."""
        return self._scanned(self.in_proj(u))

    def _scanned(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z, xBC, dt = self._parts(projected)
        both: list[ScanInputs] = [recomputed(of, xBC, dt) for of in (self._forward_inputs, self._backward_inputs)]
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

    def _kernels(self, projected: Tensor) -> str | None:
        """For all between the projections; None for one operation after the other."""
        if is_watched(projected, self.A_log) or not self._untouched():
            return None
        if self.backend != "auto":
            return self.backend if self.backend in ("triton", "c") else None
        plain = projected.device.type == "cpu" and projected.dtype == self.A_log.dtype == torch.float32
        if not plain or torch.is_autocast_enabled("cpu"):
            return None
        enough = IMAGES_A_THREAD * torch.get_num_threads() <= len(projected)  # a sequence is one thread's
        return "c" if enough and c_kernels() is not None else None

    def _untouched(self) -> bool:
        """Whether what stands between the projections may be computed without calls of its modules."""
        both = (
            (self.conv1d, nn.Conv1d),
            (self.conv1d_b, nn.Conv1d),
            (self.norm, GatedRMSNorm),
            (self.norm_b, GatedRMSNorm),
        )
        return all(untouched(module, kind) for module, kind in both)

    def forward(self, u: Tensor) -> Tensor:
        if self.backend == "compiled" and not is_watched(u) and self._untouched():
            return _compiled()(self, u)
        projected = self.in_proj(u)
        if (kernels := self._kernels(projected)) is not None:
            sizes = self.headdim, self.d_state, self.ngroups, self.eps
            return self.out_proj(bidirectional_ssd(projected, self._directions(), *sizes, kernels))
        return self._after_projection(projected)

    def _forward(self, u: Tensor) -> Tensor:
        return self._after_projection(self.in_proj(u))

    def _after_projection(self, projected: Tensor) -> Tensor:
        return self.out_proj(recomputed(self._gated, *self._scanned(projected)))

    def _gated(self, z: Tensor, forward: Tensor, backward: Tensor) -> Tensor:
        """The mean of both scans' gated and normalised outputs."""
        return (self.norm(forward, z) + self.norm_b(backward, z)) / 2

    def head_outputs(self, u: Tensor) -> Tensor:
        return self._gated(*self.scan(u)).unflatten(-1, self.head_shape)

    def mixing(self, u: Tensor, rows: Tensor | None = None) -> Tensor:
        """Rows of (M_forward + M_backward) / 2 with their skips D, before gating and normalisation."""
        _, forward, backward = self._scan_inputs(u)
        length = u.shape[1]
        rows = torch.arange(length, device=u.device) if rows is None else rows
        M = (forward.matrix(rows) + backward.matrix(length - 1 - rows).flip(-1)) / 2
        skip = ((self.D + self.D_b) / 2)[:, None, None] * F.one_hot(rows, length).to(M.dtype)
        return M + skip

    def decompose(self, u: Tensor, max_heads: int | None = None) -> list[Mixing]:
        heads = spread(self.heads, max_heads, u)
        forward, backward = (
            self._mixing_of(direction, inputs.of_heads(heads))
            for direction, inputs in zip(("forward", "backward"), self._scan_inputs(u)[1:], strict=True)
        )
        return [forward, backward.reversed()]

    def _mixing_of(self, direction: str, inputs: ScanInputs) -> Mixing:
        """In the order in which the scan reads its tokens."""
        x, dt, A, B, C, _ = inputs
        scores, y = ssd_scores(dt, B, C), ssd(x, dt, A, B, C, None, self.chunk_size, self._scan_backend)
        return Mixing(
            direction, scores * ssd_decay(dt, A), x.transpose(1, 2), y.transpose(1, 2), scores, ssd_log_decay(dt, A),
            self.d_state,
        )  # fmt: skip


@cache
def _compiled() -> Callable[[BidirectionalMamba2, Tensor], Tensor]:
    """One compilation for all blocks alike and each shape, kept on disk by torch (TORCHINDUCTOR_CACHE_DIR)."""
    return torch.compile(BidirectionalMamba2._forward, dynamic=False)
