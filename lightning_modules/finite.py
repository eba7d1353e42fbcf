"""Stops a run at a loss that is no number, without waiting for the device in every step."""

import torch
from torch import Tensor, nn

from common.collectives import all_reduce


class FiniteGuard(nn.Module):
    """Remembers, on the device, the first step whose loss was not finite on any rank.

    From then on ``skip_update`` is true, by which optimiser, centre and EMA leave everything as it is, until ``check``
    stops the run. Its state belongs to one run and is in no checkpoint.
    """

    skip_update: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("skip_update", torch.zeros((), dtype=torch.bool), persistent=False)
        self.register_buffer("_step", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("_loss", torch.zeros(()), persistent=False)

    @torch.no_grad()
    def note(self, loss: Tensor, step: int) -> None:
        """A scalar loss of this rank at an optimiser step; every rank has to call."""
        total = all_reduce(loss.detach().clone())  # not finite if one is not
        first = ~torch.isfinite(total) & ~self.skip_update
        self._step.masked_fill_(first, step)
        self._loss.copy_(torch.where(first, total, self._loss))
        self.skip_update |= first

    def check(self) -> None:
        """Waits for the device. FloatingPointError, on every rank, naming the step."""
        if self.skip_update.item():
            raise FloatingPointError(
                f"the loss is {self._loss.item()} at step {self._step.item()}; nothing was updated by it and the last "
                "checkpoint is untouched: resume it with a lower model.lr or model.clip_grad"
            )
