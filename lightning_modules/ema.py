"""Exponential moving average of parameters, and networks that follow others by it."""

import copy
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
def ema_update(teacher: nn.Module, student: nn.Module, momentum: float, skip_update: Tensor | None = None) -> None:
    """teacher <- momentum · teacher + (1 - momentum) · student over parameters; buffers are copied.

    Both networks hold the same parameters in the same order. ValueError for half-precision parameters.

    Args:
        teacher, student: the networks.
        momentum: the share of the teacher that stays.
        skip_update: a boolean scalar on the device; where it is true the teacher stays as it is.
    """
    mine, theirs = list(_float_parameters(teacher)), [p.detach() for p in student.parameters()]
    if skip_update is None:
        torch._foreach_mul_(mine, momentum)
        torch._foreach_add_(mine, theirs, alpha=1 - momentum)
    else:
        moves = (1 - momentum) * (~skip_update).to(mine[0].dtype)
        for first in range(0, len(mine), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            torch._foreach_mul_(mine[some], 1 - moves)
            torch._foreach_add_(mine[some], torch._foreach_mul(theirs[some], moves))
    for buffer, source in zip(teacher.buffers(), student.buffers(), strict=True):
        buffer.copy_(source if skip_update is None else torch.where(skip_update, buffer, source))


class EMATeacher(nn.Module):
    """Mixed into a module that trains a student: ``teacher`` is its copy, moved towards it and never trained itself.

    Put before the base class, so that ``train()`` leaves the teacher in eval mode.
    """

    teacher: nn.Module

    def follow(self, student: nn.Module) -> None:
        """Makes the teacher: a copy with storage of its own, without gradients, in eval mode."""
        self.teacher = copy.deepcopy(student).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "EMATeacher":
        super().train(mode)
        self.teacher.eval()
        return self

    def update_teacher(self, student: nn.Module, momentum: float, skip_update: Tensor | None = None) -> None:
        """See :func:`ema_update`."""
        ema_update(self.teacher, student, momentum, skip_update)
