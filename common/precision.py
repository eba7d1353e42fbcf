"""Number formats."""

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def exact(t: Tensor) -> Tensor:
    """In float64; on the CPU where the tensor's device has no such numbers, as Apple's does not."""
    try:
        return t.double()
    except TypeError:
        return t.cpu().double()


def at_least_float32(t: Tensor) -> Tensor:
    """Half-precision tensors in float32, others as they are."""
    return t.float() if t.dtype in HALF else t
