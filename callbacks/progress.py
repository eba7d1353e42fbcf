"""A bar on a terminal, a line a minute in a log file."""

import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar


class Progress(RichProgressBar):
    """The progress bar; where the output is no terminal, one line every ``seconds`` and at each epoch's end instead.

    A line holds epoch, batch, step, what the module logs for the bar, ``perf/*``, and the time left of the epoch.

    Args:
        seconds: between two lines.
        terminal: whether the output is one; None finds out.
    """

    def __init__(self, seconds: float = 60.0, terminal: bool | None = None) -> None:
        super().__init__()
        self.seconds = seconds
        self._lines = not (sys.stdout.isatty() if terminal is None else terminal)
        if self._lines:
            self.disable()

    def enable(self) -> None:
        """Lightning turns the first rank's bar on; here only on a terminal."""
        if not self._lines:
            super().enable()

    def _line(self, trainer: Trainer, where: str, names: tuple[str, ...], more: str = "") -> None:
        shown = {**trainer.callback_metrics, **trainer.progress_bar_metrics}
        values = [f"{k.removeprefix('perf/')} {float(v):.4g}" for k, v in shown.items() if k.startswith(names)]
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {where} {' '.join(values)}{more}", flush=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._lines &= trainer.is_global_zero
        self._next = time.monotonic() + self.seconds
        self._began: tuple[float, int] | None = None  # a resume inside an epoch does not start one

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._began = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if not self._lines:
            return
        now = time.monotonic()
        if self._began is None:  # after the first batch, which also waits for the loader
            self._began = now, batch_idx
        if now >= self._next:
            self._next = now + self.seconds
            since, first = self._began
            total, done = int(trainer.num_training_batches), batch_idx + 1
            left = (now - since) / max(batch_idx - first, 1) * (total - done)
            where = f"epoch {trainer.current_epoch} batch {done}/{total} step {trainer.global_step}"
            self._line(trainer, where, ("train/", "perf/"), f" left {left / 60:.1f} min")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if self._lines:
            where = f"epoch {trainer.current_epoch} done step {trainer.global_step}"
            self._line(trainer, where, ("train/", "val/", "perf/"))
