"""Samples out of folders of images, for shards: every file found is written, or counted and named."""

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageOps

from datamodules.channel_files import SUFFIXES, read_channels
from datamodules.classes import CLASSES_FILE, alike_names, differ, numbers_of, read_classes
from datamodules.decoding import mask_ids
from datamodules.image_files import IMAGE_SUFFIXES, ORIENTATION, ImageBytes, PixelRules, read_image
from datamodules.image_tree import class_folders, class_images, count_notes
from datamodules.labels import folder_labels, synset_list
from datamodules.masks import MaskEncoding, index_png, odd_ids
from datamodules.pixel_format import RGB, PixelFormat
from datamodules.samples import ShardError, no_folder
from datamodules.shard_info import INFO_FILES
from datamodules.statistics import Statistics
from datamodules.tally import Tally, some

logger = logging.getLogger(__name__)

Policy = Literal["strict", "skip"]
Images = Sequence[tuple[Path, int | None]]
"""Files, and the number of their class."""


def key_name(path: Path) -> str:
    """A file's name as a sample's key can hold it: without ending, dots and control characters."""
    return re.sub(r"[.\x00-\x1f\x7f]", "_", path.stem)


class MaskTree:
    """Masks by the basename of their image.

    Args:
        root: CLASS/NAME.png.
        encoding, largest: see :func:`datamodules.masks.ids_of`.
    """

    def __init__(self, root: Path, encoding: MaskEncoding, largest: int | None) -> None:
        self.root, self.encoding, self.largest = root, encoding, largest
        self.paths: dict[str, Path] = {}
        self._images: dict[str, Path] = {}
        for folder in class_folders(root):
            for path in class_images(folder, may_be_empty=True):
                if path.suffix.lower() != ".png":
                    raise ShardError(f"the mask {path} is no .png file; write masks as PNG, which keeps ids")
                if path.stem in self.paths:
                    raise ShardError(f"two masks are called {path.name}: {self.paths[path.stem]} and {path}")
                self.paths[path.stem] = path

    def member(self, path: Path, image: ImageBytes, tally: Tally) -> bytes:
        """The bytes of an image's mask: as they are where readers need no more, else one channel of ids."""
        if path.stem not in self.paths:
            raise ShardError(f"{path} has no mask {path.stem}.png under {self.root}")
        if path.stem in self._images:
            raise ShardError(f"{self._images[path.stem]} and {path} have one mask, {path.stem}.png; rename one of each")
        self._images[path.stem] = path
        mask = self.paths[path.stem]
        data = mask.read_bytes()
        ids = mask_ids(data, f"mask {mask}", self.encoding, self.largest, "--mask_encoding")
        if odd := odd_ids(ids):
            tally.add(f"masks {odd}", mask.name)
        size = ids.shape[1], ids.shape[0]
        if image.turned and size == image.stored:
            tally.add("masks turned with their images", path.name)
            ids = _turned(ids, image.orientation)
        elif size != image.size:
            hint = (
                "; the mask fits the image as its EXIF orientation turns it: pass --pixels.orientation apply"
                if image.orientation > 4 and size == image.size[::-1]
                else ""
            )
            raise ShardError(f"mask {mask} is {size}, its image {path} is {image.size}{hint}")
        else:
            try:
                if np.array_equal(mask_ids(data, "", "auto", None, ""), ids):
                    return data
            except ShardError:
                pass
        return index_png(ids)

    def report(self, tally: Tally) -> None:
        """Counts the masks that no image asked for."""
        for stem, path in self.paths.items():
            if stem not in self._images:
                tally.add("masks of which there is no image, left out", path.name)


def _turned(ids: np.ndarray, orientation: int) -> np.ndarray:
    """Ids (H, W) as viewers turn an image of this EXIF orientation."""
    image = Image.fromarray(ids)
    image.getexif()[ORIENTATION] = orientation
    return np.asarray(ImageOps.exif_transpose(image))


class TreeSamples:
    """Makes samples of image files, and keeps count of what is strange about them.

    Args:
        root: what file names are told from.
        rules: what of an image counts beside its pixels as they are stored.
        policy: whether what cannot be read stops it or is left out.
        pixels: what images consist of, which lets arrays be images; None for RGB of 8 bits, without arrays. Mean and
            std of others are computed on the way.
    """

    def __init__(self, root: Path, rules: PixelRules, policy: Policy, pixels: PixelFormat | None = None) -> None:
        self.suffixes = IMAGE_SUFFIXES if pixels is None else SUFFIXES
        pixels = RGB if pixels is None else pixels
        if not pixels.plain and rules != PixelRules():
            raise ShardError(
                "--pixels.* are for photographs in RGB; with --channels and --bits pixels stay as they are"
            )
        if policy not in ("strict", "skip"):
            raise ShardError(f"--policy={policy!r}; allowed: strict, skip")
        self.root, self.rules, self.policy, self.pixels = root, rules, policy, pixels
        self.tally = Tally()
        self._sums = Statistics(pixels)
        self.written = 0

    def sample(self, index: int, path: Path, label: int | None, masks: MaskTree | None = None) -> dict[str, Any] | None:
        """A webdataset sample; None, counted, for a file that policy ``skip`` leaves out."""
        try:
            if self.pixels.plain and path.suffix.lower() != ".npy":
                image = read_image(path, self.rules, self.tally, self.policy == "strict")
            else:
                image, found = read_channels(path, self.pixels, self.tally)
            mask = {} if masks is None else {"mask.png": masks.member(path, image, self.tally)}
        except ShardError as error:
            if self.policy == "strict":
                raise
            self.tally.add("files that cannot be read or have no right mask, left out", f"{path.name}: {error}")
            return None
        if not self.pixels.plain:
            self._sums.add(found)
        self.written += 1
        about = {"filename": path.relative_to(self.root).as_posix()} | ({} if label is None else {"label": label})
        return {
            # the number makes it unique whatever files are called; other readers cut a key at its first dot
            "__key__": f"{index:08d}_{key_name(path)}",
            image.field: image.data,
            "json": json.dumps(about).encode(),
        } | ({} if label is None else {"cls": str(label).encode()}) | mask  # fmt: skip

    def about(self) -> dict[str, Any]:
        """What ``_info.json`` keeps of the pixels written; nothing of ordinary images."""
        return {} if self.pixels.plain else {"pixels": self.pixels.record(), "statistics": self._sums.record()}

    def report(self, found: int, classes: Sequence[str] | None) -> None:
        """Says what was left out or is not seen, and compares the counts."""
        for line in self.tally:
            logger.warning("%s: %s", self.root, line)
        if self.written != found:
            logger.warning("%s: %d of %d images were written", self.root, self.written, found)
        for one, other in alike_names(classes or []):
            logger.warning("%s: %r and %r are two classes, though their names are alike", self.root, one, other)


def class_list(
    out: Path, split: str, classes: str | None, overwrite: bool, by_folder: bool = False
) -> list[str] | None:
    """The list that numbers a split's classes: the one given, or the folder's; None where there is neither.

    Raises:
        ShardError: where both are there and differ, unless this split, overwritten, is the folder's only one; or none
            is there but other splits are, unless folders say their numbers themselves (``by_folder``).
    """
    path, info = out / CLASSES_FILE, out / INFO_FILES[0]
    kept = read_classes(path) if path.is_file() else None
    splits = json.loads(info.read_text(encoding="utf-8"))["splits"] if info.is_file() else {}
    others = [name for name in splits if name != split]
    if kept is not None and overwrite and split in splits and not others:
        kept = None
    given = None if classes is None else read_classes(classes)
    unlisted = [name for name in others if splits[name].get("labels", {}).get("labelled", 1)]
    if kept is None and given is None and not by_folder and unlisted:
        raise ShardError(
            f"{out} has the splits {some(unlisted)}, but no {CLASSES_FILE} that says which number is which class; give "
            "the list by --classes"
        )
    if kept is not None and given is not None and (found := differ(kept, given)):
        raise ShardError(f"{path} and --classes {classes} {found}")
    return kept if given is None else given


def labelled_images(
    root: Path, samples: TreeSamples, numbering: str, classes: list[str] | None, source: str
) -> tuple[Images, list[str] | None]:
    """Every image of a tree with its class number, and the list of classes; see prepare.imagefolder.

    Args:
        root: the tree.
        samples: counts what is left out, and says whether files that are no images may be.
        numbering: ``sorted`` or ``folder``.
        classes: a list that is there already.
        source: where it comes from, for messages.
    """
    folders = class_folders(root, samples.suffixes, samples.tally, classes or ())
    names = [folder.name for folder in folders]
    for path in root.iterdir():
        if not path.is_dir():
            samples.tally.add("files beside the class folders, left out", path.name)
    if numbering == "folder":
        labels, known = folder_labels(names), None if names[0].isdecimal() else synset_list("imagenet")
        if classes is not None and known is not None and (found := differ(classes, known)):
            raise ShardError(f"the list of classes {source} and ImageNet's {found}")
    elif classes is not None:
        labels, known = numbers_of(names, classes, source), classes
    else:
        _refuse_numbers(root, names)
        labels, known = {name: number for number, name in enumerate(names)}, names
    strict = samples.policy == "strict"
    images = [
        (path, labels[folder.name])
        for folder in folders
        for path in class_images(folder, samples.tally, strict, classes is not None, samples.suffixes)
    ]
    of_class = {label: name for name, label in labels.items()}
    for path, label in images:
        if path.parent != root / of_class[label]:
            samples.tally.add("images in folders below their class's, taken for its own", path.relative_to(root))
    return images, classes if known is None else known


def _refuse_numbers(root: Path, names: list[str]) -> None:
    """ShardError for class folders that are numbers and not in the order of their names as text."""
    if all(name.isdecimal() for name in names) and [int(name) for name in names] != list(range(len(names))):
        remedy = "pass --numbering folder to take the numbers themselves, or the order by --classes"
        raise ShardError(
            f"the class folders of {root} are numbers, but sorted as text (as ImageFolder does) {names[2]!r} would "
            f"be class 2; {remedy}"
            if len(names) > 2
            else f"the class folders of {root} are the numbers {', '.join(names)}; {remedy}"
        )


def unlabelled_images(root: Path, samples: TreeSamples) -> Images:
    """Every image below a folder, without class. ShardError where there is none."""
    if not root.is_dir():
        raise ShardError(no_folder(root))
    found = class_images(root, samples.tally, samples.policy == "strict", True, samples.suffixes)
    if not found:
        raise ShardError(f"{root} holds no image")
    count_notes(root, found, samples.tally)
    return [(path, None) for path in found]
