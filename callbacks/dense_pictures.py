"""Pictures of what a dense task predicts, beside the truth, while a run goes on."""

from collections.abc import Mapping

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from common.evaluation import Evaluation
from common.pictures import KEPT, coloured, kept_pictures


class DensePictures(Callback):
    """Images that a segmentation or detection is worst and best at: image, truth, prediction, in TensorBoard.

    Args:
        every_n: validations between pictures.
    """

    def __init__(self, every_n: int = 1) -> None:
        self.every_n, self._seen = every_n, 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        arrays: Mapping[str, np.ndarray] = pl_module.arrays() if isinstance(pl_module, Evaluation) else {}
        rows = [one for kind in ("worst", "best") for one in kept_pictures(arrays, kind)]
        self._seen += 1
        if not rows or not trainer.is_global_zero or (self._seen - 1) % self.every_n:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                step = max(trainer.global_step - 1, 0)  # the step just done, at which the scores are logged too
                logger.experiment.add_image("pictures/worst_then_best", _grid(rows, pl_module.num_classes), step)


def _grid(rows: list[dict[str, np.ndarray]], num_classes: int) -> torch.Tensor:
    """(3, H, W) uint8: a row an image, padded to the largest."""
    cells = [[coloured(row[name], num_classes) for name in KEPT] for row in rows]
    height, width = (max(cell.shape[axis] for line in cells for cell in line) for axis in (0, 1))
    lines = [
        np.concatenate(
            [np.pad(c, ((0, height - c.shape[0]), (0, width - c.shape[1]), (0, 0))) for c in line], 1
        )
        for line in cells
    ]  # fmt: skip
    return torch.from_numpy(np.concatenate(lines, 0)).movedim(-1, 0)
