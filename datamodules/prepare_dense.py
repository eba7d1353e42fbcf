"""Embedded scenes for dense tasks: what ``python -m datamodules.prepare demo_dense`` does."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as run_length

from datamodules.demo import CLASSES, LEAST_SEEN, SIDE, draw_dense_scene
from datamodules.instance_annotations import annotation, record
from datamodules.prepare_coco import InstanceSample, write_instances
from datamodules.split_writer import write_split

CATEGORIES = [{"id": label + 1, "name": name} for label, name in enumerate(CLASSES)]
CUT = 72
"""Pixels that are left of the cut side of an image for detection."""


def demo_dense(
    out: str, train: int = 600, validation: int = 100, samples_per_shard: int = 250, overwrite: bool = False
) -> None:
    """Embedded scenes for dense tasks, drawn here: up to four objects of ten classes each.

    OUT/segmentation has label maps of eleven classes, the first of them the background. OUT/detection has the same
    scenes with boxes and masks of the objects, of ten classes; two thirds of the images are cut to 72 pixels of height
    or of width, and what that leaves of an object below 100 pixels is a crowd, which is neither trained on nor counted.

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
        write_instances(
            Path(out) / "detection", split, _detection_scenes(seed, count), CATEGORIES, samples_per_shard, overwrite
        )


def _segmentation_scenes(seed: int, count: int) -> Iterator[dict[str, Any]]:
    for index in range(count):
        scene = draw_dense_scene(seed, index)
        yield {"__key__": f"{index:08d}", "png": _png(scene.image), "mask.png": _png(scene.label_map)}


def _detection_scenes(seed: int, count: int) -> Iterator[InstanceSample]:
    number = 0  # of annotations, over all images
    for index in range(count):
        scene = draw_dense_scene(seed, index)
        height, width = ((SIDE, SIDE), (CUT, SIDE), (SIDE, CUT))[index % 3]
        top, left = (SIDE - height) // 2, (SIDE - width) // 2
        window = slice(top, top + height), slice(left, left + width)
        objects = []
        for label, instance in zip(scene.labels, scene.instances, strict=True):
            if not (seen := instance[window]).any():
                continue
            number += 1
            rle = run_length.encode(np.asfortranarray(seen, np.uint8))
            box, area = run_length.toBbox(rle).tolist(), int(run_length.area(rle))
            objects.append(annotation(number, label + 1, label, box, area, area < LEAST_SEEN, rle))
        key, size = f"{index:08d}", (width, height)
        notes = record(index + 1, f"{key}.png", size, objects, f"scene {index}")
        yield InstanceSample({"__key__": key, "png": _png(scene.image[window]), "json": notes}, size, len(objects))


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
