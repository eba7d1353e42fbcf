"""Which parameters weight decay acts on."""

from typing import Any

from torch import nn


def param_groups_weight_decay(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimiser: trainable parameters with more than one axis, which decay, and the rest.

    The rest, biases, norms, and what mixers keep as vectors, does not. ``decays`` says which is which.
    """
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            (free if parameter.ndim <= 1 or name.endswith(".bias") else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay, "decays": True},
        {"params": free, "weight_decay": 0.0, "decays": False},
    ]
