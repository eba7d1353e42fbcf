"""What is cheap to compute again is not kept for the backward pass where memory is a device's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from backbones.ops.tracing import is_counted, is_traced

KEEPING = ("cpu",)
"""Devices on which time counts more than memory."""


def keeps(tensor: Tensor) -> bool:
    """Whether what was computed of a tensor is kept for the backward pass."""
    return tensor.device.type in KEEPING


def recomputed(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """``function(*tensors)``, of which only the arguments are kept: the backward pass calls it once more.

    For functions without random numbers. Where :func:`keeps` says so, or while something traces, compiles or counts
    operations, it is called as it is: there time counts more, or another decides what is kept.
    """
    if keeps(tensors[0]) or not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_traced() or is_counted():
        return function(*tensors)
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
