"""Keeps an evaluation's table and headline metric."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.tensorboard.summary import hparams

from callbacks.checkpoints import Checkpoints
from callbacks.run_folder import goes_on, number_aside, run_folder
from common.evaluation import Evaluation
from common.files import to_csv, write_json, write_npz, write_text


class Results(Callback):
    """Writes ``results.json`` and ``results.csv`` into the run's folder, and the headline metric with the hparams.

    What they hold is what the module, a :class:`~common.evaluation.Evaluation`, says: its rows and counts, its arrays
    in ``results.npz``, and its headline, which with TensorBoard stands beside the hyper-parameters. Where the module
    says that this is not all that was asked for, the files are called ``results.partial.*``, so they never replace
    those of a complete run. What another training left in the folder is kept as ``results-1.*`` and so on, beside its
    ``checkpoints-1``.
    """

    def __init__(self) -> None:
        self._registered = self._wrote = False

    def _set_aside(self, trainer: Trainer, folder: Path) -> None:
        """Under the number that the run's checkpoints have taken, or will."""
        taken = next((callback.aside for callback in trainer.callbacks if isinstance(callback, Checkpoints)), None)
        number = taken or number_aside(folder)
        left = [folder / f"results.{suffix}" for suffix in ("json", "csv", "npz")]
        left = [path for path in left if path.is_file()]
        for path in left:
            path.rename(path.with_name(f"results-{number}{path.suffix}"))
        if left:
            rank_zero_info(f"{folder} held an earlier run's results; they are in results-{number}.* now")

    def _write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, Evaluation) or not trainer.is_global_zero or trainer.sanity_checking:
            return
        if trainer.fast_dev_run:  # it has no folder of its own
            return
        whole, rows, arrays = pl_module.complete(), pl_module.rows(), pl_module.arrays()
        headline = trainer.callback_metrics.get(pl_module.headline)
        folder, name = run_folder(trainer), "results" if whole else "results.partial"
        if whole and not self._wrote and trainer.state.fn == "fit" and not goes_on(trainer):
            self._set_aside(trainer, folder)
        self._wrote |= whole
        if rows:
            backbone: Any = pl_module.backbone
            table: dict[str, Any] = {
                "module": type(pl_module).__name__,
                "backbone": type(backbone).__name__,
                "headline": {pl_module.headline: None if headline is None else float(headline)},
                "backbone_parameters": sum(p.numel() for p in backbone.parameters()),
                "weights": getattr(pl_module, "weights_source", "random initialisation"),
                "epoch": trainer.current_epoch,
                "complete": whole,
                "counts": pl_module.counts(),
                "rows": rows,
            }
            if (names := getattr(getattr(trainer, "datamodule", None), "class_names", None)) is not None:
                table["classes"] = names
            write_json(folder / f"{name}.json", table)
            write_text(folder / f"{name}.csv", to_csv(rows))
            if whole:
                for suffix in ("json", "csv"):
                    (folder / f"results.partial.{suffix}").unlink(missing_ok=True)
        if arrays:
            write_npz(folder / f"{name}.npz", arrays)
        if headline is not None and not self._registered:
            self._registered = True
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    register_hparams(logger, _plain(pl_module.hparams), pl_module.headline)

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
