"""Checkpoints that survive anything: written aside, flushed, renamed; the newest whole one is found again."""

import logging
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from callbacks.run_folder import run_folder

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised when an older version could not resume from what this one writes."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes ``.NAME.PID`` beside the target, flushes it to the disk, then renames it: a reader never sees a part."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """OSError, naming file and cause, where it could not be written; what was there before stays."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with aside.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(target)
            _flush_folder(target.parent)
        except (OSError, RuntimeError) as error:  # torch's writer wraps a full disk in a RuntimeError
            aside.unlink(missing_ok=True)
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise OSError(
                f"checkpoint {target} could not be written ({cause}); the one before it is untouched"
            ) from error


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fault(path: Path) -> str | None:
    """What keeps a file from being resumed from, in words; None where nothing does."""
    try:
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:
                return f"its member {damaged} is damaged"
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, zipfile.BadZipFile) as error:
        return f"it is no whole checkpoint ({error})"
    except Exception as error:  # the unpickler raises many types
        return f"it cannot be read ({type(error).__name__})"
    if not isinstance(content, dict) or "pytorch-lightning_version" not in content:
        return "it is no checkpoint of a run"
    if content.get("dinomamba_format", 0) > FORMAT:
        return (
            f"it is of format {content['dinomamba_format']} and this version of dinomamba reads up to {FORMAT}; "
            "install the version that wrote it"
        )
    return None


def newest(folder: Path) -> Path | None:
    """The newest checkpoint under ``folder`` that is whole; others are passed over with a message."""
    for path in sorted(folder.glob("*.ckpt"), key=lambda p: p.stat().st_mtime_ns, reverse=True):
        why = fault(path)
        if why is None:
            return path
        logger.warning("passing over %s: %s", path, why)
    return None


class Checkpoints(Checkpoint):
    """Keeps ``last.ckpt``, ``best.ckpt`` by the module's headline metric, and every k-th epoch.

    ``last.ckpt`` is written at the end of every epoch, every ``minutes`` inside one, and on SIGTERM.

    Args:
        minutes: between checkpoints inside an epoch, looked at every ``check_every`` steps; None for none.
        every_n_steps: optimiser steps between checkpoints inside an epoch; None for none.
        keep_every_n_epochs: ``epoch=N.ckpt`` is kept for each of them; None for none.
        check_every: batches between looks at the clock.
    """

    def __init__(
        self,
        minutes: float | None = 15.0,
        every_n_steps: int | None = None,
        keep_every_n_epochs: int | None = None,
        check_every: int = 20,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("keep_every_n_epochs", keep_every_n_epochs)):
            if value is not None and value < 1:
                raise ValueError(f"callbacks.Checkpoints: {name}={value} must be at least 1, or null")
        self.minutes, self.every_n_steps, self.keep_every_n_epochs = minutes, every_n_steps, keep_every_n_epochs
        self.check_every = check_every
        self.best: float | None = None
        self._written = time.monotonic()

    def folder(self, trainer: Trainer) -> Path:
        return run_folder(trainer) / "checkpoints"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.is_global_zero and stage == "fit":
            for left in self.folder(trainer).glob(".*.ckpt.*"):  # by a run that was killed while writing
                left.unlink(missing_ok=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._written = time.monotonic()

    def _save(self, trainer: Trainer) -> Path:
        path = self.folder(trainer) / "last.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        self._written = time.monotonic()
        return path

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["dinomamba_format"] = FORMAT

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches or batch_idx + 1 >= trainer.num_training_batches:
            return  # inside a step, or about to be saved with the epoch
        due = self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0
        if self.minutes is not None and (batch_idx + 1) % self.check_every == 0:
            late = time.monotonic() - self._written >= 60 * self.minutes
            due |= bool(trainer.strategy.broadcast(late))  # one clock decides for all ranks
        if due:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metric = trainer.callback_metrics.get(getattr(pl_module, "headline_metric", ""))
        value = None if metric is None else float(metric)
        better = value is not None and (self.best is None or value > self.best)
        if better:
            self.best = value
        last = self._save(trainer)
        if trainer.is_global_zero:
            epoch = trainer.current_epoch
            if better:
                _link(last, last.with_name("best.ckpt"))
            if self.keep_every_n_epochs and (epoch + 1) % self.keep_every_n_epochs == 0:
                _link(last, last.with_name(f"epoch={epoch}.ckpt"))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException) and trainer.state.stage == "train":
            self._save(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


def _link(source: Path, target: Path) -> None:
    """Another name for a file, put in place in one step; a copy where the file system has no links."""
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    try:
        os.link(source, aside)
    except OSError:
        aside.write_bytes(source.read_bytes())
    aside.replace(target)
