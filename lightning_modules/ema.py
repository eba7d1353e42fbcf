"""Exponential moving average of parameters."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def _float_parameters(module: nn.Module) -> Iterable[Tensor]:
    for name, parameter in module.named_parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"{name} is {parameter.dtype}: an average in half precision never moves; "
                "train with trainer.precision bf16-mixed or 32-true, not bf16-true or 16-true"
            )
        yield parameter


@torch.no_grad()
def ema_update(teacher: nn.Module, student: nn.Module, momentum: float) -> None:
    """teacher <- momentum · teacher + (1 - momentum) · student over parameters; buffers are copied.

    Both networks hold the same parameters in the same order. ValueError for half-precision parameters.
    """
    mine, theirs = list(_float_parameters(teacher)), [p.detach() for p in student.parameters()]
    torch._foreach_mul_(mine, momentum)
    torch._foreach_add_(mine, theirs, alpha=1 - momentum)
    for buffer, source in zip(teacher.buffers(), student.buffers(), strict=True):
        buffer.copy_(source)
