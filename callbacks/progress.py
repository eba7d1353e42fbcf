"""A bar on a terminal, a line a minute in a log file."""

import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar


class Progress(RichProgressBar):
    """The progress bar; where the output is no terminal, one line every ``seconds`` and at each epoch's end instead.

    A line holds step, epoch and batch, what the module logs for the bar, ``perf/*``, and the time left of the epoch.

    Args:
        seconds: between two lines.
        terminal: whether the output is one; None finds out.
    """

    def __init__(self, seconds: float = 60.0, terminal: bool | None = None) -> None:
        super().__init__()
        self.seconds = seconds
        self._shown: dict[str, Any] = {}
        self._lines = not (sys.stdout.isatty() if terminal is None else terminal)
        if self._lines:
            self.disable()

    def enable(self) -> None:
        """Lightning turns the first rank's bar on; here only on a terminal."""
        if not self._lines:
            super().enable()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The bar's values, read as often as the curves are while training: each reading waits for the device."""
        if not self._shown or not trainer.training or trainer.global_step % trainer.log_every_n_steps == 0:
            self._shown = super().get_metrics(trainer, pl_module)
        return self._shown

    def _line(self, trainer: Trainer, where: str, names: tuple[str, ...], more: str = "") -> None:
        shown = {**trainer.callback_metrics, **trainer.progress_bar_metrics}
        values = [f" {k.removeprefix('perf/')} {float(v):.4g}" for k, v in shown.items() if k.startswith(names)]
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {where}{''.join(values)}{more}", flush=True)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._lines &= trainer.is_global_zero
        self._next = time.monotonic() + self.seconds
        self._began: tuple[float, int] | None = None

    def _tick(self, trainer: Trainer, where: str, batch_idx: int, total: float, names: tuple[str, ...]) -> None:
        """A line where one is due. The time left is told by the batches since the first one of this loop."""
        if not self._lines:
            return
        now = time.monotonic()
        if self._began is None:  # after the first batch, which also waits for the loader
            self._began = now, batch_idx
        if now >= self._next:
            self._next = now + self.seconds
            since, first = self._began
            left = (now - since) / max(batch_idx - first, 1) * (total - batch_idx - 1)
            self._line(trainer, f"{where} batch {batch_idx + 1}/{total:.0f}", names, f" left {left / 60:.1f} min")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._began = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        where = f"step {trainer.global_step} epoch {trainer.current_epoch}"
        self._tick(trainer, where, batch_idx, trainer.num_training_batches, ("train/", "perf/"))

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        super().on_validation_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)
        if batch_idx == 0:
            self._began = None
        total = trainer.num_val_batches[dataloader_idx]
        self._tick(trainer, f"validation set {dataloader_idx}", batch_idx, total, ())

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if self._lines:
            where = f"step {trainer.global_step} epoch {trainer.current_epoch} done"
            self._line(trainer, where, ("train/", "val/", "perf/"))
