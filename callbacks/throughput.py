"""How fast a run goes, and on what."""

import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from callbacks.curves import log_points


class Throughput(Callback):
    """Logs, averaged over ``every_n_steps`` batches:

    - ``perf/images_per_second`` over all devices,
    - ``perf/data_wait``, the share of time spent waiting for the loader,
    - ``perf/memory_gib``, the most memory used so far: of the device, or without one of the process,
    - ``perf/skipped``, samples left out so far on this rank under the policy ``skip``.

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
            self._close(trainer, pl_module)

    def _close(self, trainer: Trainer, pl_module: LightningModule) -> None:
        now = time.perf_counter()
        elapsed = now - self._mark
        rate = {"perf/images_per_second": self._images / elapsed}
        others = {
            "perf/data_wait": self._waited / elapsed,
            "perf/memory_gib": peak_memory(pl_module.device) / 2**30,
            "perf/skipped": getattr(trainer.datamodule, "skipped", 0),
        }
        step = max(trainer.global_step - 1, 0)  # the one just done
        log_points(trainer, pl_module, rate, step, prog_bar=True)
        log_points(trainer, pl_module, others, step)
        self._mark, self._images, self._batches, self._waited = now, 0, 0, 0.0


def peak_memory(device: torch.device) -> int:
    """Bytes: the most allocated on a CUDA device, else the most resident in this process, so far; 0 where the system
    does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource  # not on Windows
    except ImportError:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
