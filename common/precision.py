"""Number formats."""

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def at_least_float32(t: Tensor) -> Tensor:
    """Half-precision tensors in float32, others as they are."""
    return t.float() if t.dtype in HALF else t
