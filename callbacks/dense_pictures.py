"""Pictures of what a dense task predicts, beside the truth, while a run goes on."""

from collections.abc import Mapping

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from common.pictures import class_colours

COLUMNS = ("image", "target", "predicted")


def coloured(picture: np.ndarray, num_classes: int) -> np.ndarray:
    """(h, w, 3) uint8 as it is; a label map (h, w) in the classes' colours, black where there is no class."""
    if picture.ndim == 3:
        return picture
    colours = np.array([*class_colours(num_classes), (0, 0, 0)], np.uint8)
    return colours[np.where((picture >= 0) & (picture < num_classes), picture, num_classes)]


def shown(arrays: Mapping[str, np.ndarray], kind: str) -> list[dict[str, np.ndarray]]:
    """What a module keeps of the images that it is ``worst`` or ``best`` at, the most extreme first."""
    found: list[dict[str, np.ndarray]] = []
    while f"{kind}{len(found)}_image" in arrays:
        found.append({name: arrays[f"{kind}{len(found)}_{name}"] for name in (*COLUMNS, "score", "key")})
    return found


class DensePictures(Callback):
    """Images that a segmentation or detection is worst and best at: image, truth, prediction, in TensorBoard.

    Args:
        every_n: validations between pictures.
    """

    def __init__(self, every_n: int = 1) -> None:
        self.every_n, self._seen = every_n, 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        arrays = getattr(pl_module, "arrays", dict)()
        rows = [one for kind in ("worst", "best") for one in shown(arrays, kind)]
        self._seen += 1
        if not rows or not trainer.is_global_zero or (self._seen - 1) % self.every_n:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                step = max(trainer.global_step - 1, 0)  # the step just done, at which the scores are logged too
                logger.experiment.add_image("pictures/worst_then_best", _grid(rows, pl_module.num_classes), step)


def _grid(rows: list[dict[str, np.ndarray]], num_classes: int) -> torch.Tensor:
    """(3, H, W) uint8: a row an image, padded to the largest."""
    cells = [[coloured(row[name], num_classes) for name in COLUMNS] for row in rows]
    height, width = (max(cell.shape[axis] for line in cells for cell in line) for axis in (0, 1))
    lines = [
        np.concatenate(
            [np.pad(c, ((0, height - c.shape[0]), (0, width - c.shape[1]), (0, 0))) for c in line], 1
        )
        for line in cells
    ]  # fmt: skip
    return torch.from_numpy(np.concatenate(lines, 0)).movedim(-1, 0)
