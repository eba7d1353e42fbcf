"""Points of a run's curves, outside of ``LightningModule.log``."""

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
            start = Event(step=step, session_log=SessionLog(status=SessionLog.START))
            logger.experiment._get_file_writer().add_event(start, step)
