"""What a shard's ``KEY.json`` says of the objects in its image: COCO's own annotations, masks as run lengths.

``{"id", "file_name", "width", "height", "annotations": [{"id", "category_id", "label", "bbox", "area", "iscrowd",
"rle": {"size", "counts"}}]}``: ``id`` and ``category_id`` are the data set's own, ``label`` counts categories from 0 in
the order of their ids, ``bbox`` is x, y, width, height in pixels, and ``rle`` a compressed run length of the image's
(height, width).

Shapes: m annotations of an image of H x W pixels.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from pycocotools import mask as run_length

from datamodules.samples import LARGEST, RawSample, ShardError


def trainable(boxes: np.ndarray, areas: np.ndarray, crowd: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(m) which annotations are trained on, as mmdetection has it.

    No crowds, nothing of area 0, with a side below a pixel, or beyond the image.

    Args:
        boxes: (m, 4) x, y, width, height.
        areas, crowd: (m).
        size: (W, H) of the image.
    """
    low = np.maximum(boxes[:, :2], 0)
    high = np.minimum(boxes[:, :2] + boxes[:, 2:], size)
    return ~crowd & (areas > 0) & (boxes[:, 2:] >= 1).all(1) & (high > low).all(1)


def annotation(
    number: int, category: int, label: int, box: Sequence[float], area: float, crowd: bool, rle: dict[str, Any]
) -> dict[str, Any]:
    """One entry of ``annotations``; see above."""
    counts = rle["counts"].decode() if isinstance(rle["counts"], bytes) else rle["counts"]
    return {
        "id": number, "category_id": category, "label": label, "bbox": list(box), "area": area, "iscrowd": int(crowd),
        "rle": {"size": list(rle["size"]), "counts": counts},
    }  # fmt: skip


def record(number: int, file_name: str, size: tuple[int, int], annotations: list[dict[str, Any]], what: str) -> bytes:
    """The member. ShardError where it would be larger than readers take it.

    Args:
        number: the image's id.
        file_name: of the image.
        size: (W, H).
        annotations: made by :func:`annotation`.
        what: how errors call the image.
    """
    said = {"id": number, "file_name": file_name, "width": size[0], "height": size[1], "annotations": annotations}
    data = json.dumps(said, separators=(",", ":")).encode()
    if len(data) > LARGEST["json"]:
        raise ShardError(
            f"{what}: its {len(annotations)} annotations take {len(data)} bytes, at most {LARGEST['json']} are read"
        )
    return data


class Instances(NamedTuple):
    """The objects of an image, in the file's order."""

    image_id: int
    boxes: np.ndarray
    """(m, 4) float64 x, y, width, height."""
    labels: np.ndarray
    """(m) int64."""
    crowd: np.ndarray
    """(m) bool."""
    areas: np.ndarray
    """(m) float64, pixels."""
    masks: list[dict[str, Any]]
    """(m) run lengths of (H, W)."""

    @classmethod
    def read(cls, raw: RawSample, size: tuple[int, int]) -> "Instances":
        """Of a sample whose image is of size (W, H). ShardError, naming shard and key, where it says something else."""
        if "json" not in raw.fields:
            raise ShardError(f"{raw.name} has no .json member with its objects; write shards with prepare coco")
        try:
            said = json.loads(raw.fields["json"])
            of = said["annotations"]
            found = cls(
                int(said["id"]),
                np.array([one["bbox"] for one in of], np.float64).reshape(len(of), 4),
                np.array([one["label"] for one in of], np.int64),
                np.array([one["iscrowd"] for one in of], bool),
                np.array([one["area"] for one in of], np.float64),
                [{"size": list(map(int, one["rle"]["size"])), "counts": str(one["rle"]["counts"])} for one in of],
            )
            stored = int(said["width"]), int(said["height"])
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(
                f"{raw.name}: its .json does not say which objects it has ({error!r}); write shards with prepare coco"
            ) from None
        if stored != size:
            raise ShardError(
                f"{raw.name}: its .json is of an image of {stored[0]} x {stored[1]}, the image is {size[0]} x {size[1]}"
            )
        if wrong := next((mask["size"] for mask in found.masks if mask["size"] != [size[1], size[0]]), None):
            raise ShardError(
                f"{raw.name}: a mask is of (height, width) {tuple(wrong)}, the image of {size[::-1]}; write the shard "
                "again with prepare coco"
            )
        return found

    def bitmaps(self, chosen: np.ndarray) -> np.ndarray:
        """(k, H, W) uint8 of the k chosen ones, (m) bool; (0, 0, 0) of none."""
        masks = [mask for mask, wanted in zip(self.masks, chosen, strict=True) if wanted]
        if not masks:
            return np.zeros((0, 0, 0), np.uint8)
        return np.ascontiguousarray(run_length.decode(masks).transpose(2, 0, 1))

    def truth(self) -> dict[str, Any]:
        """All of it as :class:`metrics.DetectionAP` takes an image's truth: corners, tensors, run lengths."""
        corners = np.concatenate([self.boxes[:, :2], self.boxes[:, :2] + self.boxes[:, 2:]], 1)
        return {
            "boxes": torch.from_numpy(corners.astype(np.float32)),
            "labels": torch.from_numpy(self.labels),
            "crowd": torch.from_numpy(self.crowd),
            "areas": torch.from_numpy(self.areas.astype(np.float32)),
            "masks": self.masks,
        }
