"""Images per second."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class Throughput(Callback):
    """Logs ``perf/images_per_second`` over all devices, and ``perf/data_wait`` (the share of time spent waiting).

    Args:
        every_n_steps: batches averaged in one figure.
    """

    def __init__(self, every_n_steps: int = 20) -> None:
        self.every_n_steps = every_n_steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open()  # a resume inside an epoch does not start one

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open()

    def _open(self) -> None:
        self._mark = self._asked = time.perf_counter()
        self._images, self._batches, self._waited = 0, 0, 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._waited += time.perf_counter() - self._asked

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._asked = time.perf_counter()
        self._images += len(batch["key"]) * trainer.world_size
        self._batches += 1
        if self._batches == self.every_n_steps:
            self._close(pl_module)

    def _close(self, pl_module: LightningModule) -> None:
        now = time.perf_counter()
        elapsed = now - self._mark
        pl_module.log("perf/images_per_second", self._images / elapsed, prog_bar=True)
        pl_module.log("perf/data_wait", self._waited / elapsed)
        self._mark, self._images, self._batches, self._waited = now, 0, 0, 0.0
