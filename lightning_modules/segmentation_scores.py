"""How semantic segmentation is scored and kept: per class, per image, and in pictures."""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.collectives import gather_objects
from common.pictures import pictures
from heads.layers import resize
from lightning_modules.extremes import SIDE, Extremes
from metrics import SegmentationScores, segmentation_scores


class ScoresSegmentation(nn.Module):
    """Mixed into a LightningModule, after which it calls ``start_scores``."""

    headline = "val/mIoU"
    num_classes: int

    def start_scores(self, num_classes: int, ignore_index: int) -> None:
        """Called in ``__init__``."""
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.scores = SegmentationScores(num_classes, ignore_index)
        self._areas: dict[str, np.ndarray] = {}
        self._shown = Extremes()
        self._rows: list[dict[str, Any]] = []
        self._arrays: dict[str, np.ndarray] = {}

    def score(self, key: str, image: Tensor, predicted: Tensor, target: Tensor) -> None:
        """One image (3, h, w), with the class map that was predicted and the label map, both (H, W)."""
        self.scores.update(predicted[None], target[None])
        areas = self.scores.last[0]
        self._areas[key] = areas.cpu().numpy()
        picture = partial(self._picture, image, predicted, target)
        self._shown.offer(segmentation_scores(areas)["mIoU"].item(), key, picture)

    def _picture(self, image: Tensor, predicted: Tensor, target: Tensor) -> dict[str, np.ndarray]:
        """Small arrays of an image and its label maps: (h, w, 3) and (h, w) uint8 or int32."""
        shown = pictures(image[None], self.trainer.datamodule)
        scale = min(1.0, SIDE / max(shown.shape[-2:]))
        size = [round(side * scale) for side in shown.shape[-2:]]
        maps = F.interpolate(torch.stack([predicted, target])[None].double(), size, mode="nearest-exact")[0]
        return {
            "image": (resize(shown, torch.Size(size))[0].movedim(0, -1) * 255).round().byte().cpu().numpy(),
            "predicted": maps[0].int().cpu().numpy(),
            "target": maps[1].int().cpu().numpy(),
        }

    def finish_scores(self) -> dict[str, float]:
        """After all images of all processes: keeps the records, and returns mIoU, mAcc and aAcc."""
        scores = self.scores.compute()
        self.scores.reset()
        names = getattr(self.trainer.datamodule, "class_names", None) or []
        images = int(scores["images"])
        means = {name: scores[name].item() for name in ("mIoU", "mAcc", "aAcc")}
        self._rows = [
            {"metric": k, "class": None, "name": None, "value": v, "images": images} for k, v in means.items()
        ]
        self._rows += [
            {"metric": metric, "class": i, "name": names[i] if i < len(names) else None, "value": value,
             "images": images}
            for metric in ("IoU", "Acc")
            for i, value in enumerate(scores[metric].tolist())
            if not math.isnan(value)
        ]  # fmt: skip
        areas: dict[str, np.ndarray] = {}
        for part in gather_objects(self._areas):
            areas |= part
        keys = sorted(areas)
        self._arrays = {
            "keys": np.array(keys, np.str_), "areas": np.array([areas[key] for key in keys]), **self._shown.arrays(),
        }  # fmt: skip
        self._areas, self._shown = {}, Extremes()
        return means

    def rows(self) -> list[dict[str, Any]]:
        """Scores of the latest validation, as shares in 1: over all classes, and of each class that has one."""
        return self._rows

    def arrays(self) -> dict[str, np.ndarray]:
        """``keys`` and ``areas`` (n, 3, C) of all images, as :func:`metrics.segmentation_areas`; and pictures of those
        with the lowest and the highest mIoU."""
        return self._arrays

    def counts(self) -> dict[str, float]:
        return {"images": len(self._arrays.get("keys", ()))}
