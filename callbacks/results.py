"""Keeps an evaluation's table and headline metric."""

import json
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard.summary import hparams

from callbacks.run_folder import run_folder, to_csv, write_npz, write_text


class Results(Callback):
    """Writes ``results.json`` and ``results.csv`` into the run's folder, and the headline metric with the hparams.

    The rows are what the module's ``results()`` returns, where it has one; what its ``arrays()`` returns goes into
    ``results.npz``. The headline is the module's
    ``headline_metric``; with TensorBoard it stands beside the hyper-parameters.
    """

    def __init__(self) -> None:
        self._registered = False

    def _write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or trainer.sanity_checking:
            return
        rows = pl_module.results() if hasattr(pl_module, "results") else []
        name = getattr(pl_module, "headline_metric", "")
        headline = trainer.callback_metrics.get(name)
        if rows:
            table = {
                "module": type(pl_module).__name__,
                "backbone": type(pl_module.backbone).__name__,
                "headline": {name: None if headline is None else float(headline)},
                "epoch": trainer.current_epoch,
                "rows": rows,
            }
            write_text(run_folder(trainer) / "results.json", json.dumps(table, indent=1))
            write_text(run_folder(trainer) / "results.csv", to_csv(rows))
        if hasattr(pl_module, "arrays"):
            write_npz(run_folder(trainer) / "results.npz", pl_module.arrays())
        if headline is not None and not self._registered:
            self._registered = True
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    register_hparams(logger, _plain(pl_module.hparams), name)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module)


def register_hparams(logger: TensorBoardLogger, values: dict[str, Any], metric: str) -> None:
    """Shows hyper-parameters in TensorBoard beside the scalar ``metric``, which is logged elsewhere.

    ``logger.log_hyperparams`` would also log the metric at step 0, and put a kink into its curve.
    """
    writer = logger.experiment._get_file_writer()
    for summary in hparams(values, {metric: 0.0}):
        writer.add_summary(summary)


def _plain(hparams: Any, prefix: str = "") -> dict[str, Any]:
    """Nested hyper-parameters flattened to what TensorBoard shows."""
    flat: dict[str, Any] = {}
    for key, value in dict(hparams).items():
        if key == "_instantiator":
            continue
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _plain(value, f"{name}/")
        else:
            flat[name] = value if isinstance(value, int | float | str | bool) else str(value)
    return flat
