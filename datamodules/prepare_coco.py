"""Shards with boxes and masks of objects: what ``python -m datamodules.prepare coco`` does."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.files import write_json
from datamodules.coco_files import InstanceFile, image_annotations, read_instances
from datamodules.image_files import PixelRules, read_image
from datamodules.instance_annotations import record
from datamodules.samples import ShardError, no_folder
from datamodules.shard_info import INFO_FILES
from datamodules.split_writer import apart, check_split_name, write_split
from datamodules.tally import Tally, some
from datamodules.tree_samples import Policy, key_name

logger = logging.getLogger(__name__)

CATEGORIES_FILE = "categories.json"
"""Beside the shards: ``id`` and ``name`` of the data set's categories, in the order of the labels."""


class InstanceSample(NamedTuple):
    """A sample, and what the plan of an epoch needs to know of it."""

    sample: dict[str, Any]
    size: tuple[int, int]
    """(W, H)."""
    annotated: int
    """How many annotations it has."""


def write_instances(
    out: Path, split: str, samples: Iterable[InstanceSample], categories: Sequence[dict[str, Any]],
    samples_per_shard: int, overwrite: bool,
) -> None:  # fmt: skip
    """Writes a split, and into ``_info.json`` of each sample ``sizes`` (width, height) and ``annotated``, by shard.

    ShardError, beside write_split's, where another split of the folder has other categories.
    """
    path = out / CATEGORIES_FILE
    info = out / INFO_FILES[0]
    splits = json.loads(info.read_text(encoding="utf-8"))["splits"] if info.is_file() else {}
    if {*splits} - {split} and path.is_file() and json.loads(path.read_text(encoding="utf-8")) != list(categories):
        raise ShardError(f"{path} has other categories than the split {split!r}; give another --out")
    sizes: list[tuple[int, int]] = []
    annotated: list[int] = []

    def written() -> Iterator[dict[str, Any]]:
        for one in samples:
            sizes.append(one.size)
            annotated.append(one.annotated)
            yield one.sample

    def about() -> dict[str, Any]:
        starts = range(0, len(sizes), samples_per_shard)
        return {
            name: [values[start : start + samples_per_shard] for start in starts]
            for name, values in (("sizes", sizes), ("annotated", annotated))
        }

    names = [str(category["name"]) for category in categories]
    write_split(out, split, written(), samples_per_shard, overwrite, names, about)
    write_json(path, list(categories))


def coco(
    src: str, out: str, split: str, annotations: str | None = None, samples_per_shard: int = 1000, shuffle: bool = True,
    seed: int = 0, overwrite: bool = False, policy: Policy = "strict",
) -> None:  # fmt: skip
    """Shards from COCO as it is published: SRC/SPLIT/*.jpg and SRC/annotations/instances_SPLIT.json.

    Images keep their bytes. Masks become compressed run lengths; boxes, areas, crowds and ids stay as they are, with a
    label for each, counted from 0 in the order of the categories' ids. Images without annotations are kept.

    Args:
        src: the folder.
        out: folder for the shards.
        split: train2017 or val2017, or whatever else the folder of images is called.
        annotations: file of instances; None for SRC/annotations/instances_SPLIT.json.
        samples_per_shard: samples in a shard.
        shuffle: mix the images over the shards.
        seed: of the mixing.
        overwrite: replace a split of that name.
        policy: what to do with images that cannot be read or whose annotations are wrong: ``strict`` stops and names
            them, ``skip`` leaves them out and counts.
    """
    if policy not in ("strict", "skip"):
        raise ShardError(f"--policy={policy!r}; allowed: strict, skip")
    check_split_name(split)
    root, tally = Path(src).expanduser(), Tally()
    images = _images_folder(root, split)
    folder = apart(out, images)
    path = Path(annotations).expanduser() if annotations else root / "annotations" / f"instances_{split}.json"
    if not path.is_file():
        there = sorted(p.name for p in path.parent.glob("*.json")) if path.parent.is_dir() else []
        seen = f"{path.parent} has {some(there)}" if there else f"{path.parent} has no JSON"
        raise ShardError(f"no file of annotations {path} ({seen}); give it by --annotations")
    found = read_instances(path, policy, tally)
    listed = _listed(images, found, path, policy, tally)
    order = np.random.default_rng(seed).permutation(len(listed)) if shuffle else np.arange(len(listed))
    samples = _samples(images, found, [listed[at] for at in order], policy, tally)
    write_instances(folder, split, samples, found.categories, samples_per_shard, overwrite)
    for line in tally:
        logger.warning("%s: %s", images, line)


def _images_folder(root: Path, split: str) -> Path:
    """The folder of a split's images. ShardError, saying what is there instead, for none."""
    folder = root / split
    if folder.is_dir():
        return folder
    if not root.is_dir():
        raise ShardError(f"{no_folder(root)}; give --src the folder that holds {split} and annotations")
    inner = next((path for path in sorted(root.glob(f"*/{split}")) if path.is_dir()), None)
    if root.name == split:
        remedy = f"give --src {root.parent}, the folder above"
    elif inner is not None:
        remedy = f"there is {inner}: give --src {inner.parent}, with the annotations there or by --annotations"
    else:
        remedy = f"{root} has {some(sorted(p.name for p in root.iterdir() if p.is_dir())) or 'no folder'}"
    raise ShardError(f"{no_folder(folder)}; {remedy}")


def _listed(images: Path, found: InstanceFile, path: Path, policy: Policy, tally: Tally) -> list[dict[str, Any]]:
    """The images of a file that are there; and a count of those that it does not list."""
    there = {file.relative_to(images).as_posix() for file in images.rglob("*") if not file.name.startswith(".")}
    there = {name for name in there if not (images / name).is_dir()}
    if not there:
        raise ShardError(f"{images} holds no image; unpack the split there")
    names = {image["file_name"] for image in found.images}
    if lacking := sorted(names - there):
        if policy == "strict":
            raise ShardError(
                f"{len(lacking)} of {len(names)} images of {path} are missing from {images}: {some(lacking)}; restore "
                "them, or leave them out by policy skip"
            )
        for name in lacking:
            tally.add("images that are missing, left out", name)
    for name in sorted(there - names):
        tally.add(f"files that {path.name} does not list, left out", name)
    return [image for image in found.images if image["file_name"] in there]


def _samples(
    folder: Path, found: InstanceFile, images: Sequence[dict[str, Any]], policy: Policy, tally: Tally
) -> Iterator[InstanceSample]:
    labels = {category["id"]: label for label, category in enumerate(found.categories)}
    for said in images:
        path = folder / said["file_name"]
        try:
            image = read_image(path, PixelRules(), tally, policy == "strict")
            if (size := (said["width"], said["height"])) != image.size:
                raise ShardError(
                    f"{path} is {image.size[0]} x {image.size[1]}, its annotations say {size[0]} x {size[1]}"
                )
            objects = image_annotations(found.annotations(said["id"]), labels, size, str(path))
            notes = record(said["id"], said["file_name"], size, objects, str(path))
        except ShardError as error:
            if policy == "strict":
                raise
            tally.add("images that cannot be read or have wrong annotations, left out", f"{path.name}: {error}")
            continue
        if not objects:
            tally.add("images without annotations, kept, but not trained on", path.name)
        sample = {"__key__": key_name(path), image.field: image.data, "json": notes}
        yield InstanceSample(sample, size, len(objects))
