"""Shards with label maps: what ``python -m datamodules.prepare ade20k`` does."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.decoding import mask_ids
from datamodules.image_files import IMAGE_SUFFIXES, PixelRules, file_bytes, read_image
from datamodules.masks import VOID
from datamodules.samples import ShardError, no_folder
from datamodules.split_writer import apart, write_split
from datamodules.tally import Tally, some
from datamodules.tree_samples import Policy, key_name

logger = logging.getLogger(__name__)

SPLITS = ("training", "validation")
TOP = "ADEChallengeData2016"
NAMES_FILE = "objectInfo150.txt"
NUM_CLASSES = 150
WANTED = f"wanted {TOP}'s: one channel of 8 bits, 0 for none and k for class k"
FULL_RELEASE = (
    f"the full ADE20K release, whose colours code objects, parts and instances of thousands of classes; {WANTED}"
)
PNG_START = b"\x89PNG\r\n\x1a\n"


def ade20k(
    src: str, out: str, samples_per_shard: int = 1000, shuffle: bool = True, seed: int = 0, overwrite: bool = False,
    policy: Policy = "strict",
) -> None:  # fmt: skip
    """Shards from ADEChallengeData2016: SRC/images/SPLIT/NAME.jpg and SRC/annotations/SPLIT/NAME.png.

    Both keep their bytes, as KEY.jpg and KEY.mask.png; the splits are training and validation. SRC/objectInfo150.txt,
    where it is there, names the classes.

    Args:
        src: the folder ADEChallengeData2016.
        out: folder for the shards.
        samples_per_shard: samples in a shard.
        shuffle: mix the training images, which are published by scene, over the shards.
        seed: of the mixing.
        overwrite: replace what is there.
        policy: what to do with images that cannot be read or have no right annotation: ``strict`` stops and names them,
            ``skip`` leaves them out and counts.
    """
    if policy not in ("strict", "skip"):
        raise ShardError(f"--policy={policy!r}; allowed: strict, skip")
    root = Path(src).expanduser()
    _refuse_other_folders(root)
    folder, names = apart(out, root), class_names(root / NAMES_FILE)
    tally = Tally()
    pairs = {split: _pairs(root, split, policy, tally) for split in SPLITS}
    for split, found in pairs.items():
        if shuffle and split == "training":
            found = [found[at] for at in np.random.default_rng(seed).permutation(len(found))]
        samples = _samples(found, NUM_CLASSES if names is None else len(names), policy, tally)
        write_split(folder, split, samples, samples_per_shard, overwrite, names)
    for line in tally:
        logger.warning("%s: %s", root, line)


def _refuse_other_folders(root: Path) -> None:
    """ShardError where a folder is not laid out as wanted, saying what it looks like."""
    if not root.is_dir():
        raise ShardError(f"{no_folder(root)}; give --src the folder {TOP}")
    missing = [f"{kind}/{split}" for kind in ("images", "annotations") for split in SPLITS]
    missing = [name for name in missing if not (root / name).is_dir()]
    if not missing:
        return
    if (root / TOP).is_dir():
        seen = f"give --src {root / TOP}"
    elif root.name in ("images", "annotations") and (root / "training").is_dir():
        seen = f"give --src {root.parent}, the folder above"
    elif list(root.glob("index_ade20k.*")) or (root / "images" / "ADE").is_dir():
        seen = f"it is {FULL_RELEASE}"
    else:
        seen = (
            f"it has {some(sorted(path.name for path in root.iterdir())) or 'nothing'}; wanted {TOP} as it is published"
        )
    raise ShardError(f"{root} has no {', no '.join(missing)}; {seen}")


def class_names(path: Path) -> list[str] | None:
    """The names in ``objectInfo150.txt``, in the order of their numbers, synonyms and all; None where there is no file.

    Rows begin with the class's number, from 1, and end with its name; the first row says so. ShardError for others.
    """
    if not path.is_file():
        return None
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()[1:]
    rows = [[cell.strip() for cell in line.split("\t") if cell.strip()] for line in lines if line.strip()]
    if not rows or [row[0] for row in rows] != [str(number + 1) for number in range(len(rows))] or len(rows[0]) < 2:
        raise ShardError(
            f"{path} is no table of classes 1, 2, … with tabs between number and name; restore or remove it"
        )
    return [row[-1] for row in rows]


def _pairs(root: Path, split: str, policy: Policy, tally: Tally) -> list[tuple[Path, Path]]:
    """Images of a split and their annotations, by name. ShardError where one is without the other."""
    images = _files(root / "images" / split, IMAGE_SUFFIXES)
    maps = _files(root / "annotations" / split, (".png",))
    for lacking, of, what in (
        (images.keys() - maps.keys(), images, "images without an annotation"),
        (maps.keys() - images.keys(), maps, "annotations without an image"),
    ):
        names = sorted(of[stem].name for stem in lacking)
        if names and policy == "strict":
            raise ShardError(
                f"{root}: {len(names)} of {len(of)} {split} {what}: {some(names)}; restore the other, or leave them out"
                " by policy skip"
            )
        for name in names:
            tally.add(f"{split} {what}, left out", name)
    return [(images[stem], maps[stem]) for stem in sorted(images.keys() & maps.keys())]


def _files(folder: Path, suffixes: Sequence[str]) -> dict[str, Path]:
    """Files by their names without ending. ShardError for none, and for two of one name."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in suffixes and not path.name.startswith("."):
            if path.stem in found:
                raise ShardError(f"two files of {folder} are called {path.stem}: {found[path.stem].name}, {path.name}")
            found[path.stem] = path
    if not found:
        raise ShardError(f"{folder} holds no {', '.join(suffixes)} file; unpack {TOP} again")
    return found


def _samples(
    pairs: Sequence[tuple[Path, Path]], num_classes: int, policy: Policy, tally: Tally
) -> Iterator[dict[str, Any]]:
    for path, labels in pairs:
        try:
            image = read_image(path, PixelRules(), tally, policy == "strict")
            sample = {image.field: image.data, "mask.png": label_map(labels, path, image.size, num_classes)}
        except ShardError as error:
            if policy == "strict":
                raise
            tally.add("images that cannot be read or have no right annotation, left out", f"{path.name}: {error}")
            continue
        yield {"__key__": key_name(path)} | sample


def label_map(path: Path, image: Path, size: tuple[int, int], num_classes: int) -> bytes:
    """An annotation's bytes. ShardError where it is no label map of classes, or of another size.

    Args:
        path: of the annotation.
        image: its image.
        size: (W, H) of that.
        num_classes: classes are 1 to ``num_classes``, and 0 and 255 none.
    """
    data, what = file_bytes(path), f"annotation {path}"
    if data[:8] != PNG_START or len(data) < 26:
        raise ShardError(f"{what} is no PNG, whatever it is called; fetch it again")
    bits, colour = data[24], data[25]
    if colour in (2, 6):
        raise ShardError(f"{what} is RGB, as in {FULL_RELEASE}")
    if bits == 16:
        raise ShardError(f"{what} has 16 bits; {WANTED}")
    ids = mask_ids(data, what, "index", None, "the annotations' encoding")
    if ids.shape[::-1] != size:
        raise ShardError(f"{what} is {ids.shape[1]} x {ids.shape[0]}, its image {image} is {size[0]} x {size[1]}")
    wrong = ids[(ids > num_classes) & (ids != VOID)]
    if len(wrong):
        raise ShardError(f"{what} holds {int(wrong[0])}; classes are 1 to {num_classes}, and 0 and {VOID} none")
    return data
