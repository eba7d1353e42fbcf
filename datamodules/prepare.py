"""Writes shards: ``python -m datamodules.prepare {imagefolder,imagenet_s,index,demo,demo_robustness} --help``.

Shards are written aside and renamed when whole; ``_info.json`` comes last. A split that is already there is left
alone unless ``--overwrite true``.
"""

import io
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import webdataset as wds
from jsonargparse import auto_cli
from PIL import Image

from common.files import write_json
from datamodules.demo import CLASSES, scenes, shifted_scenes
from datamodules.image_tree import SUFFIXES, class_folders, class_images
from datamodules.labels import folder_labels
from datamodules.samples import ShardError
from datamodules.shard_index import INFO_FILES, index_shard

logger = logging.getLogger(__name__)


def write_split(
    out: Path, split: str, samples: Iterable[dict[str, Any]], samples_per_shard: int, overwrite: bool = False
) -> list[Path]:
    """Writes ``out/{split}-%06d.tar`` and enters the split into ``_info.json``.

    Args:
        out: the folder.
        split: name of the split.
        samples: webdataset samples, each with ``__key__``.
        samples_per_shard: samples in a shard, the last one excepted.
        overwrite: replace a split of that name.

    Returns:
        The shards written.
    """
    if samples_per_shard < 1:
        raise ValueError(f"samples_per_shard={samples_per_shard} must be positive")
    out.mkdir(parents=True, exist_ok=True)
    info = _read_info(out, split, overwrite)
    paths: list[Path] = []
    lengths: list[int] = []
    writer: wds.TarWriter | None = None
    aside = Path()

    def finish() -> None:
        nonlocal writer
        if writer is not None:
            writer.close()
            aside.replace(paths[-1])
            writer = None

    try:
        for sample in samples:
            if writer is None:
                paths.append(out / f"{split}-{len(paths):06d}.tar")
                lengths.append(0)
                aside = out / f".{paths[-1].name}.{os.getpid()}"
                writer = wds.TarWriter(str(aside), mtime=0)
            writer.write(sample)
            lengths[-1] += 1
            if lengths[-1] == samples_per_shard:
                finish()
        finish()
    finally:
        if writer is not None:  # something went wrong inside a shard: nothing half-written stays
            writer.close()
            aside.unlink(missing_ok=True)
    if not paths:
        raise ShardError(f"the split {split!r} has no samples")
    for stale in sorted(out.glob(f"{split}-[0-9][0-9][0-9][0-9][0-9][0-9].tar")):
        if stale not in paths:
            stale.unlink()  # left by a longer version of this split
    _enter(out, info, split, paths, lengths)
    return paths


def _read_info(out: Path, split: str, overwrite: bool) -> dict[str, Any]:
    """The folder's ``_info.json``. ShardError where it names the split already."""
    path = out / INFO_FILES[0]
    info = json.loads(path.read_text()) if path.is_file() else {"splits": {}}
    if split in info["splits"] and not overwrite:
        raise ShardError(f"{out} already holds the split {split!r}; pass --overwrite true to write it again")
    return info


def _enter(out: Path, info: dict[str, Any], split: str, paths: list[Path], lengths: list[int]) -> None:
    """Writes the folder's ``_info.json`` with a split's shards."""
    info["splits"][split] = {
        "name": split,
        "num_samples": sum(lengths),
        "filenames": [p.name for p in paths],
        "shard_lengths": lengths,
    }
    write_json(out / INFO_FILES[0], info)
    logger.info("%s: %d samples in %d shards under %s", split, sum(lengths), len(paths), out)


def _images_by_class(root: Path, numbering: str = "sorted") -> list[tuple[Path, int]]:
    """Every image of a tree with its class number; see :func:`imagefolder` for ``numbering``."""
    folders = class_folders(root)
    names = [folder.name for folder in folders]
    if numbering == "sorted":
        if all(name.isdecimal() for name in names) and [int(name) for name in names] != list(range(len(names))):
            raise ShardError(
                f"the class folders of {root} are numbers, but sorted as text (as ImageFolder does) {names[2]!r} would "
                "be class 2; pass --numbering folder to take the numbers themselves"
                if len(names) > 2
                else f"the class folders of {root} are the numbers {', '.join(names)}; pass --numbering folder"
            )
        labels = {name: number for number, name in enumerate(names)}
    else:
        labels = folder_labels(names)
    return [(path, labels[folder.name]) for folder in folders for path in class_images(folder)]


def _sample(index: int, path: Path, label: int, root: Path) -> dict[str, Any]:
    return {
        "__key__": f"{index:08d}_{path.stem.replace('.', '_')}",
        SUFFIXES[path.suffix.lower()]: path.read_bytes(),
        "cls": str(label).encode(),
        "json": json.dumps({"filename": str(path.relative_to(root)), "label": label}).encode(),
    }


def imagefolder(
    src: str, out: str, split: str, samples_per_shard: int = 1251, shuffle: bool = True, seed: int = 0,
    numbering: Literal["sorted", "folder"] = "sorted", overwrite: bool = False,
) -> None:  # fmt: skip
    """Shards from a tree SRC/CLASS/IMAGE.

    Args:
        src: the tree.
        out: folder for the shards.
        split: name of the split, such as train or validation.
        samples_per_shard: samples in a shard.
        shuffle: mix the classes over the shards.
        seed: of the mixing.
        numbering: ``sorted`` numbers the class folders in sorted order, as ImageFolder does; ``folder`` takes their
            names as ImageNet's classes, numbers (ImageNet-V2) or WordNet ids (Sketch, A, R).
        overwrite: replace a split of that name.
    """
    root = Path(src)
    images = _images_by_class(root, numbering)
    order = np.random.default_rng(seed).permutation(len(images)) if shuffle else np.arange(len(images))
    samples = (_sample(i, images[at][0], images[at][1], root) for i, at in enumerate(order))
    write_split(Path(out), split, samples, samples_per_shard, overwrite)


def imagenet_s(
    src: str, out: str, split: str = "validation", samples_per_shard: int = 512, overwrite: bool = False
) -> None:
    """Shards with masks from an ImageNet-S tree: SRC/SPLIT/WNID/NAME.JPEG and SRC/SPLIT-segmentation/WNID/NAME.png.

    Image and mask are paired by basename, which is unique; their folders may differ.

    Args:
        src: the tree, such as ImageNetS919.
        out: folder for the shards.
        split: a split whose masks are public: validation, train-semi.
        samples_per_shard: samples in a shard.
        overwrite: replace a split of that name.
    """
    root = Path(src) / split
    images, masks_root = _images_by_class(root), Path(src) / f"{split}-segmentation"
    masks: dict[str, Path] = {}
    for folder in class_folders(masks_root):
        for path in sorted(folder.glob("*.png")):
            if path.stem in masks:
                raise ShardError(f"two masks are called {path.name}: {masks[path.stem]} and {path}")
            masks[path.stem] = path

    def samples() -> Iterator[dict[str, Any]]:
        for i, (path, label) in enumerate(images):
            if path.stem not in masks:
                raise ShardError(f"{path} has no mask {path.stem}.png under {masks_root}")
            mask = masks[path.stem]
            with Image.open(path) as image, Image.open(mask) as segmentation:
                if image.size != segmentation.size:
                    raise ShardError(f"mask {mask} is {segmentation.size}, its image {path} is {image.size}")
            yield _sample(i, path, label, root) | {"mask.png": mask.read_bytes()}

    write_split(Path(out), split, samples(), samples_per_shard, overwrite)


def _png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "png")
    return buffer.getvalue()


def demo(
    out: str, train: int = 4000, validation: int = 1000, test: int = 1000, samples_per_shard: int = 500,
    overwrite: bool = False,
) -> None:  # fmt: skip
    """The embedded data set, drawn here: ten classes of textures on random objects, with masks.

    Args:
        out: folder for the shards.
        train, validation, test: samples in each split.
        samples_per_shard: samples in a shard.
        overwrite: replace what is there.
    """
    for split, count, seed in (("train", train, 1), ("validation", validation, 2), ("test", test, 3)):
        samples = (
            {
                "__key__": f"{i:08d}",
                "png": _png(scene.image),
                "mask.png": _png(scene.mask),
                "cls": str(scene.label).encode(),
                "json": json.dumps({"class": CLASSES[scene.label]}).encode(),
            }
            for i, scene in enumerate(scenes(count, seed))
        )
        write_split(Path(out), split, samples, samples_per_shard, overwrite)


def index(root: str, split: str, pattern: str, overwrite: bool = False) -> None:
    """Enters shards that are already there into ``_info.json``, which remote shards need beside them.

    Args:
        root: folder with the shards.
        split: name of the split, such as train.
        pattern: glob of its shards' names.
        overwrite: replace a split of that name.
    """
    folder = Path(root)
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise ShardError(f"no shard in {folder} matches --pattern {pattern!r}")
    info = _read_info(folder, split, overwrite)
    _enter(folder, info, split, paths, [len(index_shard(path)) for path in paths])


def demo_robustness(out: str, per_class: int = 20) -> None:
    """Test sets like the robustness sets of ImageNet, drawn from the embedded data's classes, as folders.

    Under OUT: ``v2-a``, ``v2-b``, ``v2-c`` (folders are class numbers), ``sketch`` (all classes), ``a`` and ``r`` (four
    classes each), and ``real`` with ``real.json``, whose lists hold one class, two, or none; ``classes.txt`` names the
    classes in order.

    Args:
        out: folder for the trees, which must not exist yet.
        per_class: images of each class.
    """
    folder = Path(out)
    if folder.exists():
        raise ShardError(f"{folder} is already there; remove it to have the sets drawn again")
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    names = [name.replace(" ", "_") for name in CLASSES]
    answers: list[list[int]] = []
    for split, shift, classes in DEMO_SETS:
        for number, (image, label) in enumerate(shifted_scenes(shift, classes, per_class)):
            name = str(label) if split.startswith("v2") else names[label]
            path = aside / split / name / f"ILSVRC2012_val_{number + 1:08d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_png(image))
            if split == "real":
                answers.append([[label], [label, (label + 1) % len(CLASSES)], []][min(2, number % 10 // 4)])
    (aside / "real.json").write_text(json.dumps(answers))
    (aside / "classes.txt").write_text("\n".join(names))
    aside.rename(folder)
    logger.info("robustness sets under %s", folder)


DEMO_SETS = (
    ("v2-a", "other", range(10)), ("v2-b", "faint", range(10)), ("v2-c", "strong", range(10)),
    ("sketch", "lines", range(10)), ("a", "noisy", (0, 3, 5, 8)), ("r", "negative", (1, 4, 6, 7)),
    ("real", "none", range(10)),
)  # fmt: skip


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        auto_cli([imagefolder, imagenet_s, index, demo, demo_robustness], as_positional=False)
    except ValueError as error:
        sys.exit(f"error: {error}")
