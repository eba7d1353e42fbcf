"""Writes shards: ``python -m datamodules.prepare {imagefolder,imagenet_s,index,statistics,…} --help``.

Shards are written aside and renamed when whole; ``classes.json`` and ``_info.json`` come last. A split that is already
there is left alone unless ``--overwrite true``. Splits in one folder share its list of classes.
"""

import io
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jsonargparse import ArgumentParser, auto_cli
from PIL import Image

from common.files import write_json
from common.messages import OneLine
from datamodules.classes import CLASSES_FILE, read_classes
from datamodules.demo import CLASSES, draw_scene, shifted_scenes
from datamodules.image_files import PixelRules
from datamodules.image_tree import ImageFolder
from datamodules.masks import MOST_CLASSES, MaskEncoding
from datamodules.pixel_format import PixelFormat
from datamodules.prepare_ade20k import ade20k
from datamodules.prepare_coco import coco
from datamodules.prepare_dense import demo_dense
from datamodules.samples import ShardError
from datamodules.shard_info import INFO_FILES, Scan, folder_info, relative_name
from datamodules.shard_names import refuse_mixed, shard_paths
from datamodules.shards import ShardSet
from datamodules.split_writer import apart, check_split_name, enter_split, read_info, write_split
from datamodules.statistics import statistics_of
from datamodules.tree_samples import MaskTree, Policy, TreeSamples, class_list, labelled_images, unlabelled_images

logger = logging.getLogger(__name__)

__all__ = ["demo", "demo_robustness", "imagefolder", "imagenet_s", "index", "statistics", "write_split"]


def imagefolder(
    src: str, out: str, split: str, samples_per_shard: int = 1251, shuffle: bool = True, seed: int = 0,
    numbering: Literal["sorted", "folder"] = "sorted", overwrite: bool = False, classes: str | None = None,
    unlabelled: bool = False, policy: Policy = "strict", pixels: PixelRules = PixelRules(),  # noqa: B008
    channels: int | None = None, bits: Literal[8, 16, 32] = 8, pages: Literal["one", "bands"] = "one",
) -> None:  # fmt: skip
    """Shards from a tree SRC/CLASS/IMAGE, or from any folder of images without classes.

    Args:
        src: the tree.
        out: folder for the shards.
        split: name of the split, such as train or validation.
        samples_per_shard: samples in a shard.
        shuffle: mix the classes over the shards.
        seed: of the mixing.
        numbering: ``sorted`` numbers the class folders by the list of classes, and where there is none yet in sorted
            order, as ImageFolder does; ``folder`` takes their names as ImageNet's classes, numbers (ImageNet-V2) or
            WordNet ids (Sketch, A, R).
        overwrite: replace a split of that name.
        classes: list of classes: a JSON list, a text with one name a line, or imagenet; default is the classes.json of
            OUT, which the first split writes.
        unlabelled: the images have no classes, in whatever folders they are.
        policy: what to do with files that are no images or cannot be read: ``strict`` stops and names them, ``skip``
            leaves them out and counts.
        pixels: what of an image counts beside its pixels as they are stored.
        channels: of the images; None for RGB of 8 bits without arrays among them. Other than 3 of 8 bits are written as
            they are, as ``KEY.npy`` (H, W, C), or as PNG where that holds them; their mean and std go into
            ``_info.json``.
        bits: 8, 16, or 32 for floats.
        pages: of a TIFF file with several: ``one`` refuses it, ``bands`` takes each as a channel.
    """
    root, folder = Path(src).expanduser(), apart(out, Path(src).expanduser())
    names = None
    samples = TreeSamples(root, pixels, policy, _format(channels, bits, pages))
    if unlabelled:
        if classes is not None or numbering != "sorted":
            raise ShardError("--unlabelled true goes with neither --classes nor --numbering: there are no classes")
        images = unlabelled_images(root, samples)
    else:
        names = class_list(folder, split, classes, overwrite, numbering == "folder")
        images, names = labelled_images(root, samples, numbering, names, classes or str(folder / CLASSES_FILE))
    order = np.random.default_rng(seed).permutation(len(images)) if shuffle else np.arange(len(images))
    written = (sample for i, at in enumerate(order) if (sample := samples.sample(i, *images[at])) is not None)
    write_split(folder, split, written, samples_per_shard, overwrite, names, samples.about)
    samples.report(len(images), names)


def _format(channels: int | None, bits: Literal[8, 16, 32], pages: Literal["one", "bands"]) -> PixelFormat | None:
    """What options say of the images. ShardError where they do not say how many channels."""
    if channels is None and (bits != 8 or pages != "one"):
        raise ShardError(f"--bits {bits} and --pages {pages} go with --channels, the number of channels")
    return None if channels is None else PixelFormat(channels, bits, pages=pages)


def imagenet_s(
    src: str, out: str, split: str = "validation", samples_per_shard: int = 512, overwrite: bool = False,
    classes: str | None = None, policy: Policy = "strict", pixels: PixelRules = PixelRules(),  # noqa: B008
    mask_encoding: MaskEncoding = "auto", largest_id: int = MOST_CLASSES,
    channels: int | None = None, bits: Literal[8, 16, 32] = 8, pages: Literal["one", "bands"] = "one",
) -> None:  # fmt: skip
    """Shards with masks from an ImageNet-S tree: SRC/SPLIT/WNID/NAME.JPEG and SRC/SPLIT-segmentation/WNID/NAME.png.

    Image and mask are paired by basename, which is unique; their folders may differ. Masks keep their bytes where
    readers see the ids in them by themselves; others, by another ``mask_encoding``, are written as one channel of ids.

    Args:
        src: the tree, such as ImageNetS919.
        out: folder for the shards.
        split: a split whose masks are public: validation, train-semi.
        samples_per_shard: samples in a shard.
        overwrite: replace a split of that name.
        classes: see imagefolder.
        policy: see imagefolder.
        pixels: see imagefolder; a mask of the size that its image is stored in is turned with it.
        mask_encoding: how masks tell ids: ``index`` by grey level, ``rgb`` as R + 256 G with B = 0 (ImageNet-S),
            ``palette`` by a palette's numbers (Pascal VOC), ``alpha`` as what is opaque; ``auto`` takes index for one
            channel and rgb for three. Pixels that tell none are an error.
        largest_id: highest id beside 1000: 919, 300 or 50.
        channels, bits, pages: see imagefolder.
    """
    root = Path(src).expanduser() / split
    folder = apart(out, root)
    samples = TreeSamples(root, pixels, policy, _format(channels, bits, pages))
    images, names = labelled_images(
        root, samples, "sorted", class_list(folder, split, classes, overwrite), classes or str(folder / CLASSES_FILE)
    )
    masks = MaskTree(Path(src).expanduser() / f"{split}-segmentation", mask_encoding, largest_id)

    def written() -> Iterator[dict[str, Any]]:
        for i, (path, label) in enumerate(images):
            if (sample := samples.sample(i, path, label, masks)) is not None:
                yield sample

    write_split(folder, split, written(), samples_per_shard, overwrite, names, samples.about)
    masks.report(samples.tally)
    samples.report(len(images), names)


def _png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "png", compress_level=1)  # noise hardly shrinks, whatever the level
    return buffer.getvalue()


def _demo_sample(seed: int, index: int) -> dict[str, Any]:
    """A scene of the embedded data as a shard holds it."""
    scene = draw_scene(index % len(CLASSES), seed, index)
    return {
        "__key__": f"{index:08d}",
        "png": _png(scene.image),
        "mask.png": _png(scene.mask),
        "cls": str(scene.label).encode(),
        "json": json.dumps({"class": CLASSES[scene.label]}).encode(),
    }


def demo(
    out: str, train: int = 4000, validation: int = 1000, test: int = 1000, samples_per_shard: int = 500,
    overwrite: bool = False, workers: int = 0,
) -> None:  # fmt: skip
    """The embedded data set, drawn here: ten classes of textures on random objects, with masks.

    Args:
        out: folder for the shards.
        train, validation, test: samples in each split.
        samples_per_shard: samples in a shard.
        overwrite: replace what is there.
        workers: processes that draw; 0 draws in this one.
    """
    if workers < 0:
        raise ShardError(f"--workers {workers}; allowed: 0 and more")
    with ProcessPoolExecutor(workers) if workers else nullcontext() as pool:
        for split, count, seed in (("train", train, 1), ("validation", validation, 2), ("test", test, 3)):
            each = (itertools.repeat(seed), range(count))
            samples = map(_demo_sample, *each) if pool is None else pool.map(_demo_sample, *each, chunksize=25)
            write_split(Path(out), split, samples, samples_per_shard, overwrite, list(CLASSES))


def index(root: str, split: str, pattern: str, overwrite: bool = False, classes: str | None = None) -> None:
    """Enters shards that are already there into ``_info.json``, which remote shards need beside them.

    Args:
        root: folder with the shards.
        split: name of the split, such as train.
        pattern: glob of its shards' names; **/ goes into folders.
        overwrite: replace a split of that name.
        classes: list of classes, to be kept beside the shards; see imagefolder.
    """
    check_split_name(split)
    folder = Path(root).expanduser()
    paths = shard_paths(folder, pattern, "--pattern")
    known = folder_info(folder, paths)
    refuse_mixed(pattern, {name: known[name].splits for name in known}, "--pattern", folder)
    info = read_info(folder, split, overwrite)
    names = None if classes is None else read_classes(classes)
    scanned = Scan()
    labels = [scanned.add(path, relative_name(path, folder)) for path in paths]
    scanned.report(folder)
    enter_split(folder, info, split, paths, [one.samples for one in labels], sum(labels[1:], labels[0]), names)


def statistics(
    root: str, shards: str, channels: int = 3, bits: Literal[8, 16, 32] = 8, pages: Literal["one", "bands"] = "one",
) -> None:  # fmt: skip
    """Mean and std of every channel over all pixels of some shards, or of a folder of images.

    They are printed as YAML for a configuration. Where ``_info.json`` lists the shards as one split, they are kept
    there, and runs on other than ordinary images take them from it; of a folder of images nothing is kept, and they are
    printed as options too. Give the training split's.

    Args:
        root: folder with the shards.
        shards: glob of their names, or a folder of images such as ``.``.
        channels, bits, pages: see imagefolder.
    """
    folder, form = Path(root).expanduser(), PixelFormat(channels, bits, pages=pages)
    if shards and (folder / shards).is_dir():
        found = statistics_of(ImageFolder(folder / shards, "shards", form), form)
        options = " ".join(f"--data.{name} '{json.dumps(found[name])}'" for name in ("mean", "std"))
        logger.info("not kept, as nothing is written into a folder of images; pass to runs on it: %s", options)
    else:
        source = ShardSet.find(folder, shards, "shards")
        found = statistics_of(source, form)
        names = {relative_name(Path(path), folder) for path in source.paths}
        path = folder / INFO_FILES[0]
        info = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"splits": {}}
        for name, split in info["splits"].items():
            if set(split["filenames"]) == names:
                split |= {"pixels": form.record(), "statistics": found}
                write_json(path, info)
                logger.info("kept in %s as those of the split %s", path, name)
                break
        else:
            logger.info(
                "not kept: no split of %s has these shards; python -m datamodules.prepare index enters them", path
            )
    print(f"mean: {json.dumps(found['mean'])}\nstd: {json.dumps(found['std'])}")


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
    (aside / "real.json").write_text(json.dumps(answers), encoding="utf-8")
    (aside / "classes.txt").write_text("\n".join(names), encoding="utf-8")
    aside.rename(folder)
    logger.info("robustness sets under %s", folder)


DEMO_SETS = (
    ("v2-a", "other", range(10)), ("v2-b", "faint", range(10)), ("v2-c", "strong", range(10)),
    ("sketch", "lines", range(10)), ("a", "noisy", (0, 3, 5, 8)), ("r", "negative", (1, 4, 6, 7)),
    ("real", "none", range(10)),
)  # fmt: skip


class Parser(OneLine, ArgumentParser):
    """jsonargparse's, that ends with one line."""


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        auto_cli(
            [imagefolder, imagenet_s, ade20k, coco, index, statistics, demo, demo_dense, demo_robustness],
            as_positional=False,
            parser_class=Parser,
        )
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
