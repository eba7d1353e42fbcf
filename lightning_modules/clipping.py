"""Gradient clipping as DINO has it."""

import torch
from torch import Tensor


@torch.no_grad()
def clip_each(gradients: list[Tensor], largest: float) -> None:
    """Scales each gradient by itself, in place, so that its L2 norm is at most ``largest``."""
    scales = torch._foreach_norm(gradients)
    torch._foreach_add_(scales, 1e-6)
    torch._foreach_reciprocal_(scales)
    torch._foreach_mul_(scales, largest)
    torch._foreach_clamp_max_(scales, 1.0)
    torch._foreach_mul_(gradients, scales)
