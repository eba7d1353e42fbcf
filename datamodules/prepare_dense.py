"""Shards for dense tasks: what ``python -m datamodules.prepare {ade20k,coco,demo_dense}`` does."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from datamodules.demo import CLASSES, draw_dense_scene
from datamodules.split_writer import write_split


def demo_dense(
    out: str, train: int = 1000, validation: int = 200, samples_per_shard: int = 250, overwrite: bool = False
) -> None:
    """Embedded scenes for dense tasks, drawn here: up to four objects of ten classes each.

    OUT/segmentation has label maps of eleven classes, the first of them the background.

    Args:
        out: folder for the shards.
        train, validation: samples in each split.
        samples_per_shard: samples in a shard.
        overwrite: replace what is there.
    """
    for split, count, seed in (("training", train, 11), ("validation", validation, 12)):
        write_split(
            Path(out) / "segmentation", split, _segmentation_scenes(seed, count), samples_per_shard, overwrite,
            ["background", *CLASSES],
        )  # fmt: skip


def _segmentation_scenes(seed: int, count: int) -> Iterator[dict[str, Any]]:
    for index in range(count):
        scene = draw_dense_scene(seed, index)
        yield {"__key__": f"{index:08d}", "png": _png(scene.image), "mask.png": _png(scene.label_map)}


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
