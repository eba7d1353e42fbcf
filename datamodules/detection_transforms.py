"""Images with boxes and masks of objects, for training and for evaluation; mmdetection's rules.

Shapes: n samples of a batch, m objects of an image, H x W pixels of a batch's images, padded right and bottom to a
multiple of the divisor. Boxes are x1, y1, x2, y2 in pixels.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datamodules import dense_ops
from datamodules.buffers import Rows
from datamodules.collation import collate
from datamodules.decoding import open_image
from datamodules.instance_annotations import Instances, trainable
from datamodules.sample_seed import SampleKey
from datamodules.samples import IMAGE_FIELDS, RawSample
from datamodules.segmentation_transforms import blank_beyond
from datamodules.transforms import Transform


@dataclass(frozen=True)
class WindowRule:
    """DETR's multi-scale crop: half of the images are resized, a window is cut out, and that is resized again.

    Args:
        scales: shorter sides of the first resize, of which one is drawn, pixels.
        sides: shortest and longest side of the window, each drawn by itself, pixels.
    """

    scales: tuple[int, ...] = (400, 500, 600)
    sides: tuple[int, int] = (384, 600)

    def __post_init__(self) -> None:
        if not self.scales or min(self.scales) < 1:
            raise ValueError(f"window.scales={list(self.scales)}; allowed: one positive side or more")
        if not 1 <= self.sides[0] <= self.sides[1]:
            raise ValueError(f"window.sides={list(self.sides)}; allowed: two positive sides, the shorter first")


@dataclass
class Scene:
    """An image and its objects, on their way to a batch.

    Args:
        image: (H, W, 3) uint8.
        boxes: (m, 4) float32.
        labels: (m) int64.
        masks: (m, H, W) uint8.
    """

    image: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    masks: np.ndarray

    def resized(self, target: tuple[int, int]) -> "Scene":
        """Brought to fit a target, its ratio kept; boxes by what became of each side, and clipped."""
        height, width = self.image.shape[:2]
        size = dense_ops.scaled_size((width, height), target)
        scale = np.array([size[0] / width, size[1] / height] * 2, np.float32)
        boxes = np.clip(self.boxes * scale, 0, np.array([*size, *size], np.float32))
        return Scene(dense_ops.resize_image(self.image, size), boxes, self.labels, resized_masks(self.masks, size))

    def window(self, rows: slice, columns: slice) -> "Scene":
        """What a window shows; objects whose boxes lie beyond it are left out."""
        image = self.image[rows, columns]
        corner = np.array([columns.start, rows.start] * 2, np.float32)
        limit = np.array([image.shape[1], image.shape[0]] * 2, np.float32)
        boxes = np.clip(self.boxes - corner, 0, limit)
        seen = (boxes[:, 2:] > boxes[:, :2]).all(1)
        return Scene(image, boxes[seen], self.labels[seen], self.masks[seen][:, rows, columns])

    def flipped(self) -> "Scene":
        """Left to right."""
        boxes = self.boxes.copy()
        boxes[:, [0, 2]] = self.image.shape[1] - self.boxes[:, [2, 0]]
        return Scene(self.image[:, ::-1], boxes, self.labels, self.masks[:, :, ::-1])


def resized_masks(masks: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Bitmaps (m, H, W) to (W, H) by nearest, OpenCV's, which floors."""
    resized = [dense_ops.resize_labels(mask, size) for mask in masks]
    return np.stack(resized) if resized else np.zeros((0, size[1], size[0]), np.uint8)


def drawn_window(size: tuple[int, int], sides: tuple[int, int], draws: dense_ops.Draws) -> tuple[slice, slice]:
    """Rows and columns of a random window in (H, W), whose sides are drawn in a range as far as there are pixels."""
    height, width = (int(draws.integers(min(side, sides[0]), min(side, sides[1]) + 1)) for side in size)
    top, left = (int(draws.integers(0, side - cut + 1)) for side, cut in zip(size, (height, width), strict=True))
    return slice(top, top + height), slice(left, left + width)


def padded_size(sizes: Sequence[tuple[int, int]], divisor: int) -> tuple[int, int]:
    """The least (H, W), multiples of ``divisor``, that hold images of these (h, w)."""
    height, width = (-(-max(side) // divisor) * divisor for side in zip(*sizes, strict=True))
    return height, width


class _DetectionTransform(Transform):
    fields: Sequence[str] = (*IMAGE_FIELDS, "json")
    images: Sequence[str] = ("image",)

    def __init__(self, resize: tuple[int, int] = (1333, 800), divisor: int = 32) -> None:
        if min(resize) < 1:
            raise ValueError(f"data.init_args.resize={list(resize)}; allowed: positive sides, in pixels")
        if divisor < 1:
            raise ValueError(f"data.init_args.divisor={divisor}; allowed: 1 and more")
        self.resize, self.divisor = resize, divisor

    @abstractmethod
    def _entries(self) -> dict[str, Any]:
        """The entries of a batch beside its images, as :meth:`empty` declares them."""

    def empty(self) -> dict[str, Any]:
        return {"image": torch.empty(0, 3, self.divisor, self.divisor, dtype=torch.uint8)} | self._entries()

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        images = [sample["image"] for sample in samples]
        rest = [{name: sample[name] for name in sample if name != "image"} for sample in samples]
        height, width = padded_size([image.shape[:2] for image in images], self.divisor)
        padded = torch.zeros(len(images), 3, height, width, dtype=torch.uint8)
        for row, image in zip(padded.numpy(), images, strict=True):
            row[:, : image.shape[0], : image.shape[1]] = image.transpose(2, 0, 1)
        return {"image": padded} | collate(rest, self._entries(), type(self).__name__)

    def finish(self, batch: dict[str, Any], normalize: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        batch = super().finish(batch, normalize)
        return batch | {"image": blank_beyond(batch["image"], batch["valid"])}


class DetectionTraining(_DetectionTransform):
    """Images and the objects to be found in them.

    ``image`` (n, 3, H, W), ``valid`` (n, 2) the rows and columns that show the image (what lies beyond is 0 after
    normalisation), ``original`` (n, 2) height and width as they are stored, ``image_id`` (n), and lists of n: ``boxes``
    (m, 4) float32, ``labels`` (m) int64, ``masks`` (m, H, W) uint8. Images may be without an object: crowds and what is
    too small are not trained on, see :func:`~datamodules.instance_annotations.trainable`.

    Resized to a size that is drawn, with ``window`` by half by way of one, and flipped half of the time.

    Args:
        resize: longest and shortest side that images are resized to, their ratio kept.
        scales: shorter sides of which one is drawn in the place of ``resize``'s; empty for that alone.
        window: DETR's crop; None for none.
        flip: how often images are flipped, from 0 to 1.
        divisor: of the sides of batches.
    """

    def __init__(
        self, resize: tuple[int, int] = (1333, 800), scales: Sequence[int] = (), window: WindowRule | None = None,
        flip: float = 0.5, divisor: int = 32,
    ) -> None:  # fmt: skip
        super().__init__(resize, divisor)
        if not 0 <= flip <= 1:
            raise ValueError(f"data.init_args.flip={flip}; allowed: 0 to 1")
        if any(side < 1 for side in scales):
            raise ValueError(f"data.init_args.scales={list(scales)}; allowed: positive sides, in pixels")
        self.scales, self.cut, self.flip = tuple(scales) or (min(resize),), window, flip

    def _drawn(self, scales: Sequence[int], draws: np.random.Generator) -> tuple[int, int]:
        """A target of one of some shorter sides."""
        return max(self.resize), scales[int(draws.integers(0, len(scales)))]

    def __call__(self, raw: RawSample, key: SampleKey, rows: Rows) -> dict[str, Any]:
        encoded = open_image(raw)
        said = Instances.read(raw, encoded.size)
        wanted = trainable(said.boxes, said.areas, said.crowd, encoded.size)
        boxes = said.boxes[wanted]
        corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1).astype(np.float32)
        scene = Scene(encoded.pixels(), corners, said.labels[wanted], said.bitmaps(wanted))
        draws = key.generator()
        if self.cut is not None and draws.integers(0, 2):
            scene = scene.resized(self._drawn(self.cut.scales, draws))
            scene = scene.window(*drawn_window(scene.image.shape[:2], self.cut.sides, draws))
        scene = scene.resized(self._drawn(self.scales, draws))
        if draws.random() < self.flip:
            scene = scene.flipped()
        return {
            "image": scene.image, "valid": np.array(scene.image.shape[:2]), "original": np.array(encoded.size[::-1]),
            "image_id": said.image_id, "boxes": scene.boxes, "labels": scene.labels, "masks": scene.masks,
        }  # fmt: skip

    def _entries(self) -> dict[str, Any]:
        pairs, numbers = torch.empty(0, 2, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        return {"valid": pairs, "original": pairs, "image_id": numbers, "boxes": [], "labels": [], "masks": []}

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        batch = super().collate(samples)
        height, width = batch["image"].shape[2:]
        masks = [mask.new_zeros(len(mask), height, width) for mask in batch["masks"]]
        for large, mask in zip(masks, batch["masks"], strict=True):
            large[:, : mask.shape[1], : mask.shape[2]] = mask
        return batch | {"masks": masks}


class DetectionEvaluation(_DetectionTransform):
    """Images, and all that is known of their objects.

    ``image`` (n, 3, H, W), ``valid`` (n, 2), ``original`` (n, 2) and ``image_id`` (n) as in training, and ``truth``, a
    list of n: every annotation of the image, crowds too, in the frame of the image as it is stored, as
    ``DetectionAP.update`` takes it.

    Args:
        resize: longest and shortest side that images are resized to, their ratio kept.
        divisor: of the sides of batches.
    """

    def __call__(self, raw: RawSample, key: SampleKey, rows: Rows) -> dict[str, Any]:
        encoded = open_image(raw)
        said = Instances.read(raw, encoded.size)
        image = dense_ops.resize_image(encoded.pixels(), dense_ops.scaled_size(encoded.size, self.resize))
        return {
            "image": image, "valid": np.array(image.shape[:2]), "original": np.array(encoded.size[::-1]),
            "image_id": said.image_id, "truth": said.truth(),
        }  # fmt: skip

    def _entries(self) -> dict[str, Any]:
        pairs, numbers = torch.empty(0, 2, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        return {"valid": pairs, "original": pairs, "image_id": numbers, "truth": []}
