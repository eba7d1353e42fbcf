"""When checkpoints are written: every epoch, every so often inside one, and when a signal asks for it."""

import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info

from callbacks.checkpoint_files import FORMAT, link
from callbacks.curves import start_history
from callbacks.preemption import Preempted, Request, SignalRequests, requeue
from callbacks.run_folder import goes_on, number_aside, run_folder
from common.evaluation import Evaluation


class Checkpoints(Checkpoint):
    """Keeps ``last.ckpt``, ``best.ckpt`` by an Evaluation's headline metric, and every k-th epoch.

    ``last.ckpt`` is written at the end of every epoch and, inside one, every ``minutes`` and when a signal reaches any
    process: SIGTERM then ends the run, SIGUSR1 has SLURM start it again, or outside SLURM lets it go on. The curves of
    a resumed run go on from its checkpoint; TensorBoard hides what the run before logged after that. What a run finds
    in its folder and does not go on from is kept as ``checkpoints-1`` and so on. With ``fast_dev_run`` nothing is
    written.

    Args:
        minutes: between checkpoints inside an epoch, by the first rank's clock; None for none.
        every_n_steps: optimiser steps between checkpoints inside an epoch; None for none.
        keep_every_n_epochs: ``epoch=N.ckpt`` is kept for each of them; None for none.
        check_every: batches between looks at clock and signals, where several processes have to agree on them; a
            single process looks at every step.
    """

    def __init__(
        self,
        minutes: float | None = 15.0,
        every_n_steps: int | None = None,
        keep_every_n_epochs: int | None = None,
        check_every: int = 10,
    ) -> None:
        for name, value in (
            ("every_n_steps", every_n_steps),
            ("keep_every_n_epochs", keep_every_n_epochs),
            ("check_every", check_every),
        ):
            if value is not None and value < 1:
                raise ValueError(f"callbacks.Checkpoints: {name}={value} must be at least 1, or null")
        self.minutes, self.every_n_steps, self.keep_every_n_epochs = minutes, every_n_steps, keep_every_n_epochs
        self.check_every = check_every
        self.best: float | None = None
        self.aside: int | None = None
        """Under which number this run has kept what was in its folder."""
        self._signals = SignalRequests()
        self._saved_step, self._scored_step, self._wrote = -1, -1, False
        self._written = time.monotonic()

    def folder(self, trainer: Trainer) -> Path:
        return run_folder(trainer) / "checkpoints"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.is_global_zero and stage == "fit":
            for left in self.folder(trainer).glob(".*.ckpt.*"):  # by a run that was killed while writing
                left.unlink(missing_ok=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.listen()  # instead of Lightning's handlers, which speak to other ranks from inside the signal
        # nor does it have to ask all ranks about signals before each batch, for which a GPU would stand still
        setattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)  # noqa: B010
        self._written, self._saved_step, self._first = time.monotonic(), trainer.global_step, True
        if trainer.is_global_zero and trainer.global_step:
            start_history(trainer, trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.stop_listening()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, Preempted):  # else the signals that follow a requeue would cut off the clean end
            self._signals.stop_listening()

    def _set_aside(self, trainer: Trainer) -> None:
        """Once, before the first checkpoint: weights may have been read from those of an earlier run."""
        folder = self.folder(trainer)
        if not goes_on(trainer) and any(folder.glob("*.ckpt")):
            self.aside = number_aside(folder.parent)
            folder.rename(folder.with_name(f"checkpoints-{self.aside}"))
            rank_zero_info(f"{folder} held an earlier run's checkpoints; they are in checkpoints-{self.aside} now")

    def _save(self, trainer: Trainer) -> Path:
        path = self.folder(trainer) / "last.ckpt"
        if trainer.is_global_zero:
            if not self._wrote:
                self._set_aside(trainer)
            self._wrote = True
            for logger in trainer.loggers:
                logger.save()  # the curves are on the disk up to where the checkpoint stands
        trainer.save_checkpoint(path, weights_only=False)
        self._written, self._saved_step = time.monotonic(), trainer.global_step
        return path

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["dinomamba_format"] = FORMAT

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._first:  # Lightning counts logged steps on as if every checkpoint were made before its step was logged
            trainer.fit_loop.epoch_loop._batches_that_stepped, self._first = trainer.global_step, False
            # and a batch that a checkpoint saw begun counts twice, by which validations every so many steps would slip
            batches = trainer.fit_loop.epoch_loop.batch_progress.total
            batches.ready = batches.completed + 1
        if self._scored_step == trainer.global_step != self._saved_step and not trainer.fast_dev_run:
            self._save_scored(trainer, pl_module)  # validated inside an epoch, of these very weights
        # here the step before is counted and logged; the last batch is followed by the epoch's checkpoint
        if batch_idx % trainer.accumulate_grad_batches or batch_idx + 1 >= trainer.num_training_batches:
            return
        request = self._request(trainer, batch_idx)
        counted = self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0
        if (request or counted) and not trainer.fast_dev_run and trainer.global_step != self._saved_step:
            self._save(trainer)
        if request == Request.REQUEUE:
            told = requeue() if trainer.is_global_zero else ""
            self._leave(trainer, Preempted(request, trainer.strategy.broadcast(told)))
        if request == Request.STOP:
            self._leave(trainer, Preempted(request, "stopped by SIGTERM"))

    def _leave(self, trainer: Trainer, stop: Preempted) -> NoReturn:
        """On all ranks. Each has said why before any is gone: SLURM then ends those that are still there."""
        sys.stderr.write(f"error: {stop}\n")
        sys.stderr.flush()
        trainer.strategy.barrier()
        raise stop

    def _request(self, trainer: Trainer, batch_idx: int) -> Request:
        """The most urgent request on any rank; the same answer on all."""
        if trainer.world_size > 1 and batch_idx // trainer.accumulate_grad_batches % self.check_every:
            return Request.NONE
        request = self._signals.take()
        if (
            self.minutes is not None
            and trainer.is_global_zero
            and time.monotonic() - self._written >= 60 * self.minutes
        ):
            request = max(request, Request.SAVE)
        if trainer.world_size > 1:
            found = torch.tensor(int(request), device=trainer.strategy.root_device)
            request = Request(int(trainer.strategy.reduce(found, reduce_op="max")))
        return request

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._scored_step = trainer.global_step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:
            return
        last = self._save_scored(trainer, pl_module)
        epoch = trainer.current_epoch
        if trainer.is_global_zero and self.keep_every_n_epochs and (epoch + 1) % self.keep_every_n_epochs == 0:
            link(last, last.with_name(f"epoch={epoch}.ckpt"))

    def _save_scored(self, trainer: Trainer, pl_module: LightningModule) -> Path:
        """Writes last.ckpt, which is best.ckpt too where these weights scored higher than any before."""
        headline = pl_module.headline if isinstance(pl_module, Evaluation) else ""
        metric = trainer.callback_metrics.get(headline) if self._scored_step == trainer.global_step else None
        value = None if metric is None else float(metric)
        better = value is not None and (self.best is None or value > self.best)
        if better:
            self.best = value
        last = self._save(trainer)
        if trainer.is_global_zero and better:
            link(last, last.with_name("best.ckpt"))
        return last

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
