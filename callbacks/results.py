"""Keeps an evaluation's table and headline metric."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.tensorboard.summary import hparams

from callbacks.run_folder import run_folder
from common.files import to_csv, write_json, write_npz, write_text


class Results(Callback):
    """Writes ``results.json`` and ``results.csv`` into the run's folder, and the headline metric with the hparams.

    The rows are what the module's ``results()`` returns, where it has one, ``counts`` what its ``counts()`` returns;
    what its ``arrays()`` returns goes into ``results.npz``. The headline is the module's ``headline_metric``; with
    TensorBoard it stands beside the hyper-parameters. Before a run's last epoch, and where ``limit_*_batches`` cuts it
    short, the files are called ``results.partial.*``, so they never replace those of a complete run.
    """

    def __init__(self) -> None:
        self._registered = False

    def _write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or trainer.sanity_checking:
            return
        whole = is_complete(trainer, pl_module)
        rows = pl_module.results() if hasattr(pl_module, "results") else []
        headline_name = getattr(pl_module, "headline_metric", "")
        headline = trainer.callback_metrics.get(headline_name)
        if rows:
            backbone: Any = pl_module.backbone
            parameters = sum(p.numel() for p in backbone.parameters())
            table: dict[str, Any] = {
                "module": type(pl_module).__name__,
                "backbone": type(pl_module.backbone).__name__,
                "headline": {headline_name: None if headline is None else float(headline)},
                "backbone_parameters": parameters,
                "weights": getattr(pl_module, "weights_source", "random initialisation"),
                "epoch": trainer.current_epoch,
                "complete": whole,
                "counts": pl_module.counts() if hasattr(pl_module, "counts") else {},
                "rows": rows,
            }
            name = "results" if whole else "results.partial"
            write_json(run_folder(trainer) / f"{name}.json", table)
            write_text(run_folder(trainer) / f"{name}.csv", to_csv(rows))
            if whole:
                for suffix in ("json", "csv"):
                    (run_folder(trainer) / f"results.partial.{suffix}").unlink(missing_ok=True)
        if hasattr(pl_module, "arrays") and (arrays := pl_module.arrays()):
            write_npz(run_folder(trainer) / ("results.npz" if whole else "results.partial.npz"), arrays)
        if headline is not None and not self._registered:
            self._registered = True
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    register_hparams(logger, _plain(pl_module.hparams), headline_name)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module)


def is_complete(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Whether what is validated now is all that was asked for: the last epoch, over all of the data."""
    sampled = getattr(pl_module, "samples_batches", False)
    limits = [1.0 if sampled else trainer.limit_val_batches, trainer.limit_test_batches]
    if trainer.state.fn == TrainerFn.FITTING:
        limits.append(trainer.limit_train_batches)
        if trainer.max_epochs is not None and 0 <= trainer.current_epoch + 1 < trainer.max_epochs:
            return False
    # the number 1 is one batch, 1.0 is all of them
    return not trainer.fast_dev_run and all(isinstance(limit, float) and limit == 1.0 for limit in limits)


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
