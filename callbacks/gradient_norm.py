"""The size of the gradient."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from callbacks.curves import log_points


class GradientNorm(Callback):
    """Logs ``train/gradient_norm``: the L2 norm over all parameters before any clipping.

    Args:
        every_n_steps: optimiser steps from one figure to the next.
    """

    def __init__(self, every_n_steps: int = 20) -> None:
        if every_n_steps < 1:
            raise ValueError(f"callbacks.GradientNorm: every_n_steps={every_n_steps} must be at least 1")
        self.every_n_steps = every_n_steps

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if (trainer.global_step + 1) % self.every_n_steps == 0:
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            log_points(trainer, pl_module, {"train/gradient_norm": norm}, trainer.global_step)
