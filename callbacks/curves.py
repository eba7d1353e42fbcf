"""Points of a run's curves, outside of ``LightningModule.log``."""

import re
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto.event_pb2 import Event, SessionLog


def log_points(
    trainer: Trainer, pl_module: LightningModule, values: dict[str, Any], step: int, prog_bar: bool = False
) -> None:
    """Logs values once, at ``step``; ``LightningModule.log`` would repeat them at each step up to the next ones.

    Callbacks see them as ever.
    """
    values = {name: float(value) for name, value in values.items()}
    pl_module.log_dict(values, prog_bar=prog_bar, logger=False)
    for logger in trainer.loggers:
        logger.log_metrics(values, step)


def start_history(trainer: Trainer, step: int) -> None:
    """Tells TensorBoard that the run goes on at ``step``: what an earlier process logged at or after it is hidden."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            writer = logger.experiment._get_file_writer()
            put_before(Path(writer.event_writer._file_name))
            start = Event(step=step, session_log=SessionLog(status=SessionLog.START))
            writer.add_event(start, step)


def put_before(current: Path) -> None:
    """Renames event files that seem to be later than the current one, as TensorBoard reads them by the time in a name.

    They are where the clock was put back between two processes of a run.
    """
    pattern = re.compile(r"(events\.out\.tfevents\.)(\d+)(\..*)")
    times = {path: int(found[2]) for path in current.parent.iterdir() if (found := pattern.fullmatch(path.name))}
    mine = times.pop(current)
    late = sorted((path for path in times if times[path] >= mine), key=lambda path: times[path])
    for number, path in enumerate(late):
        path.rename(path.with_name(pattern.sub(rf"\g<1>{mine - len(late) + number}\g<3>", path.name)))
