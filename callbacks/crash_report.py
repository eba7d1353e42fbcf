"""What a run was doing when it failed."""

import time
import traceback
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from callbacks.preemption import Preempted
from callbacks.run_folder import run_folder
from common.files import write_json


def _described(exception: BaseException) -> str:
    """An exception and those behind it.

    torch raises the death of a DataLoader worker wherever Python is at that moment, and code that catches every
    exception there may turn it into one of its own: the first word on what happened is then the last of the chain.
    """
    text = f"{type(exception).__name__}: {exception}"
    behind = exception.__cause__ or (None if exception.__suppress_context__ else exception.__context__)
    return f"{text} (after {_described(behind)})" if behind else text


class CrashReport(Callback):
    """Writes ``crash-rankR.json`` into the run's folder when an exception ends it.

    It names the error and those behind it, epoch, step and batch, and the shards and sample keys of the last batch that
    this rank got.
    """

    def __init__(self) -> None:
        self._batch: Any = None
        self._number = -1

    def _note(self, batch: Any, number: int) -> None:
        self._batch, self._number = batch, number

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._note(batch, batch_idx)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._note(batch, batch_idx)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Preempted | SIGTERMException | KeyboardInterrupt):
            return
        batch = self._batch if isinstance(self._batch, dict) else {}
        shards = batch.get("shard", [])
        report = {
            "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "error": _described(exception),
            "stage": str(trainer.state.stage and trainer.state.stage.value),
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "batch": self._number,
            "last_shard": shards[-1] if shards else None,
            "last_shards": sorted(set(shards)),
            "last_keys": batch.get("key", []),
            "rank": trainer.global_rank,
            "traceback": traceback.format_exception(exception),
        }
        path = run_folder(trainer) / f"crash-rank{trainer.global_rank}.json"
        try:
            write_json(path, report)
        except OSError as error:  # the failure may be the disk's
            print(f"no crash report: {error}", flush=True)
            return
        print(f"step {trainer.global_step}, last shard {report['last_shard']}: see {path}", flush=True)
