"""Random numbers of a training step that do not depend on what ran before it."""

import os
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class StepSeed(Callback):
    """Seeds torch's generators before each batch from (seed, epoch, batch, rank).

    What draws in a training step (stochastic depth) then draws the same after a resume as without one, and no
    generator's state needs to be kept.
    """

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        entropy = [seed, trainer.current_epoch, batch_idx, trainer.global_rank]
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1)
