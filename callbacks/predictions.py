"""Writes what ``predict`` returns."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from callbacks.run_folder import run_folder
from common.files import write_npz


class PredictionFiles(BasePredictionWriter):
    """One ``predictions/rankR-batchN.npz`` per batch, each whole: keys, labels, embeddings, maps and their names.

    Where the data name their classes, ``class_name`` is that of each image's label, empty where it has none. Of a
    trained classifier, ``logits``, ``predicted`` and ``predicted_name`` say what it takes each image for.
    """

    def __init__(self) -> None:
        super().__init__("batch")

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: dict[str, Any],
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        if trainer.fast_dev_run:  # it has no folder of its own
            return
        folder = run_folder(trainer) / "predictions"
        names = getattr(getattr(trainer, "datamodule", None), "class_names", None)
        if names is not None and "label" in prediction:
            found = [names[i] if 0 <= i < len(names) else "" for i in prediction["label"].tolist()]
            prediction = prediction | {"class_name": np.array(found, dtype=np.str_)}
        arrays = {
            k: v.detach().float().cpu().numpy() if isinstance(v, torch.Tensor) and v.is_floating_point()
            else v.cpu().numpy() if isinstance(v, torch.Tensor) else np.asarray(v)
            for k, v in prediction.items()
        }  # fmt: skip
        write_npz(folder / f"rank{trainer.global_rank}-batch{batch_idx:06d}.npz", arrays)
