"""Exponential moving average of parameters."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from common.precision import HALF

AT_ONCE = 32
"""Parameters that are copied at a time, where the weight of the average is known to the device only."""


def _float_parameters(module: nn.Module) -> Iterable[Tensor]:
    for name, parameter in module.named_parameters():
        if parameter.dtype in HALF:
            raise ValueError(
                f"{name} is {parameter.dtype}: an average in half precision never moves; "
                "train with trainer.precision bf16-mixed or 32-true, not bf16-true or 16-true"
            )
        yield parameter


@torch.no_grad()
def ema_update(teacher: nn.Module, student: nn.Module, momentum: float, held: Tensor | None = None) -> None:
    """teacher <- momentum · teacher + (1 - momentum) · student over parameters; buffers are copied.

    Both networks hold the same parameters in the same order. ValueError for half-precision parameters.

    Args:
        teacher, student: the networks.
        momentum: the share of the teacher that stays.
        held: a boolean scalar on the device; where it is true the teacher stays as it is.
    """
    mine, theirs = list(_float_parameters(teacher)), [p.detach() for p in student.parameters()]
    if held is None:
        torch._foreach_mul_(mine, momentum)
        torch._foreach_add_(mine, theirs, alpha=1 - momentum)
    else:
        moves = (1 - momentum) * (~held).to(mine[0].dtype)
        for first in range(0, len(mine), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            torch._foreach_mul_(mine[some], 1 - moves)
            torch._foreach_add_(mine[some], torch._foreach_mul(theirs[some], moves))
    for buffer, source in zip(teacher.buffers(), student.buffers(), strict=True):
        buffer.copy_(source if held is None else torch.where(held, buffer, source))
