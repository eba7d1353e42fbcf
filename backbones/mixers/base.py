"""What token mixers have in common.

Every mixer maps (B, L, D) to (B, L, D) and offers, for the same input,
``mixing(x, rows)``: those rows of its token-mixing matrix M, (B, heads, R, L); all rows where ``rows`` is None;
``decompose(x, max_heads)``: Y = MX of each direction, with what the mixer itself gives for Y; of at most so many heads,
spread evenly over all, where a number is given;
``head_shape``: heads and channels of each, or None where channels are not grouped in heads; where they are,
``head_outputs(x)``: what the output projection takes, cut into heads, (B, L, heads, channels).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from backbones.ops import causal_conv, is_counted


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
    scores: Tensor | None = None
    """C_i · B_j dt_j (B, heads, L, L) of scans with one decay a head, else None: M is the decay mask times them."""
    log_decay: Tensor | None = None
    """a (B, heads, L) of such scans: the decay mask is exp(a_i - a_j), zero where i comes before j in the scan."""
    width: int | None = None
    """The inner size that bounds ranks: a head's channels for linear attention, the state n for scans."""

    def reversed(self) -> "Mixing":
        """The same over the tokens in reverse order: what a scan over reversed tokens is to the tokens themselves."""
        scores = None if self.scores is None else self.scores.flip(2, 3)
        log_decay = None if self.log_decay is None else self.log_decay.flip(2)
        flipped = self.matrix.flip(2, 3), self.inputs.flip(2), self.outputs.flip(2), scores, log_decay
        return Mixing(self.direction, *flipped, self.width)


def spread(heads: int, most: int | None, like: Tensor) -> Tensor:
    """Numbers of at most ``most`` of the heads, evenly spread (of all where it is None), on ``like``'s device."""
    some = heads if most is None else min(heads, most)
    return torch.linspace(0, heads - 1, some, device=like.device).round().long()


def untouched(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of a module would give no more than its parameters do, which a kernel may then read.

    Not where it was wrapped or replaced (LoRA, quantisation), its weight is made anew at each call (parametrisations,
    pruning), or somebody listens: where hooks are, on it or on all modules, or a ``forward`` of its own.
    """
    if type(module) is not kind or "forward" in module.__dict__:
        return False
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    # PyTorch's FLOP counter hooks into all modules, and knows of our operations
    return torch.compiler.is_compiling() or not _has_any_global_hook() or is_counted()


def convolved(x: Tensor, conv: nn.Module) -> Tensor:
    """(B, L, D) through a causal depthwise nn.Conv1d that is padded on both sides; (B, L, D)."""
    if untouched(conv, nn.Conv1d):
        return causal_conv(x, conv.weight.squeeze(1), conv.bias)
    return conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


def initial_dt_bias(heads: int, dt_min: float, dt_max: float, floor: float = 1e-4) -> Tensor:
    """The inverse of softplus at step sizes log-uniform in [dt_min, dt_max]."""
    dt = torch.exp(torch.rand(heads) * (math.log(dt_max) - math.log(dt_min)) + math.log(dt_min)).clamp(min=floor)
    return dt + torch.log(-torch.expm1(-dt))
