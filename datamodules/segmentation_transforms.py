"""Images with label maps, for training and for evaluation; mmsegmentation's rules.

Shapes: n samples of a batch, H x W pixels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datamodules import dense_ops
from datamodules.buffers import Buffers, Rows, allocate
from datamodules.decoding import mask_ids, open_image
from datamodules.sample_seed import SampleKey
from datamodules.samples import IMAGE_FIELDS, RawSample, ShardError
from datamodules.transforms import Transform


@dataclass
class LabelRule:
    """What the numbers in label maps mean.

    Args:
        num_classes: C; classes are 0 to C - 1.
        reduce_zero_label: the maps' 0 is no class and k stands for class k - 1, as in ADE20K.
        ignore_index: of pixels without a class, in the maps and in batches.
    """

    num_classes: int = 150
    reduce_zero_label: bool = True
    ignore_index: int = 255

    def read(self, raw: RawSample, size: tuple[int, int]) -> np.ndarray:
        """(H, W) int32 classes of a sample's ``mask.png``.

        ShardError where it is missing, of another size than the image's (W, H), or holds what is no class.
        """
        if "mask.png" not in raw.fields:
            raise ShardError(f"{raw.name} has no .mask.png member with its label map")
        ids = mask_ids(
            raw.fields["mask.png"], f"the label map of {raw.name}", "index", None, "the label map's encoding"
        )
        if ids.shape[::-1] != size:
            raise ShardError(
                f"{raw.name}: the label map is {ids.shape[1]} x {ids.shape[0]}, the image {size[0]} x {size[1]}"
            )
        labels = ids
        if self.reduce_zero_label:
            labels = np.where((ids == 0) | (ids == self.ignore_index), self.ignore_index, ids - 1)
        wrong = (labels >= self.num_classes) & (labels != self.ignore_index)
        if wrong.any():
            first = 1 if self.reduce_zero_label else 0
            raise ShardError(
                f"{raw.name}: the label map holds {int(ids[wrong][0])}; classes are {first} to "
                f"{self.num_classes - 1 + first} (num_classes={self.num_classes}, reduce_zero_label="
                f"{str(self.reduce_zero_label).lower()}), and {self.ignore_index} is none"
            )
        return labels


class _SegmentationTransform(Transform):
    fields: Sequence[str] = (*IMAGE_FIELDS, "mask.png")
    images: Sequence[str] = ("image",)

    def __init__(self, rule: LabelRule, target: tuple[int, int]) -> None:
        self.rule, self.target = rule, target

    def _read(self, raw: RawSample) -> tuple[np.ndarray, np.ndarray]:
        image = open_image(raw)
        return image.pixels(), self.rule.read(raw, image.size)


class SegmentationTraining(_SegmentationTransform):
    """``image`` (n, 3, size, size), ``target`` (n, size, size) int32, and ``valid`` (n, 2), rows and columns that show
    the image: what lies beyond is 0 after normalisation, and ``ignore_index``.

    Resized at random, a window of several classes, flipped half of the time, distorted in colour.

    Args:
        rule: of the label maps.
        size: side of the window, pixels.
        target: longest and shortest side that images are resized to, times a ratio.
        ratios: range of that ratio.
        distort: change colours.
    """

    def __init__(
        self, rule: LabelRule, size: int = 512, target: tuple[int, int] = (2048, 512),
        ratios: tuple[float, float] = (0.5, 2.0), distort: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(rule, target)
        self.size, self.ratios, self.distort = size, ratios, distort

    @property
    def sizes(self) -> dict[str, int]:
        return {"size": self.size}

    def allocate(self, n: int) -> Buffers:
        target = allocate([(n, self.size, self.size)], torch.int32)[0]
        return {"image": allocate([(n, 3, self.size, self.size)])[0], "target": target}

    def __call__(self, raw: RawSample, key: SampleKey, rows: Rows) -> dict[str, Any]:
        image, labels = self._read(raw)
        draws = key.generator()
        drawn = dense_ops.drawn_target(self.target, self.ratios, draws)
        size = dense_ops.scaled_size((image.shape[1], image.shape[0]), drawn)
        labels = dense_ops.resize_labels(labels, size)
        window = dense_ops.crop_window(labels, (self.size, self.size), self.rule.ignore_index, draws)
        image, labels = np.ascontiguousarray(dense_ops.resize_image(image, size)[window]), labels[window]
        flip = bool(draws.integers(0, 2))
        if self.distort:
            image = dense_ops.distort(image, draws)
        height, width = labels.shape
        rows["image"][:], rows["target"][:] = 0, self.rule.ignore_index
        way = slice(None, None, -1 if flip else 1)
        rows["image"][:, :height, :width] = image[:, way].transpose(2, 0, 1)
        rows["target"][:height, :width] = labels[:, way]
        return {"valid": np.array([height, width])}

    def empty(self) -> dict[str, Any]:
        return {"valid": torch.empty(0, 2, dtype=torch.int64)}

    def finish(self, batch: dict[str, Any], normalize: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        batch = super().finish(batch, normalize)
        return batch | {"image": blank_beyond(batch["image"], batch["valid"])}


class SegmentationEvaluation(_SegmentationTransform):
    """``image``, a list of (3, h, w), resized; and ``target``, a list of (H, W) int32 label maps as they are.

    Args:
        rule: of the label maps.
        target: longest and shortest side that images are resized to, their ratio kept.
    """

    def __init__(self, rule: LabelRule, target: tuple[int, int] = (2048, 512)) -> None:
        super().__init__(rule, target)

    def __call__(self, raw: RawSample, key: SampleKey, rows: Rows) -> dict[str, Any]:
        image, labels = self._read(raw)
        size = dense_ops.scaled_size((image.shape[1], image.shape[0]), self.target)
        return {"image": dense_ops.resize_image(image, size).transpose(2, 0, 1), "target": labels}

    def empty(self) -> dict[str, Any]:
        return {"image": [], "target": []}


def blank_beyond(images: Tensor, valid: Tensor) -> Tensor:
    """Images (n, C, H, W) with 0 beyond their valid (n, 2) rows and columns."""
    inside = [torch.arange(side, device=images.device) < valid[:, i, None] for i, side in enumerate(images.shape[-2:])]
    return images * (inside[0][:, None, :, None] & inside[1][:, None, None, :])
