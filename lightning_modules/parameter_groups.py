"""Which parameters weight decay acts on."""

from torch import nn


def decayed_and_free(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters with more than one axis, and the rest: biases, norms, and what mixers keep as vectors."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            (free if parameter.ndim <= 1 or name.endswith(".bias") else decayed).append(parameter)
    return decayed, free
