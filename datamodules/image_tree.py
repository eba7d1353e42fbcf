"""Folders of images: as class folders CLASS/IMAGE, and as sources that need no conversion to shards."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from datamodules.channel_files import SUFFIXES, folder_member
from datamodules.folders import files_below, is_litter
from datamodules.image_files import IMAGE_SUFFIXES, PixelRules, read_image
from datamodules.labels import folder_labels
from datamodules.layout_names import is_notes, no_classes, odd_among
from datamodules.pixel_format import RGB, PixelFormat
from datamodules.samples import Labels, RawSample, ShardError, Source, labels_of, no_folder
from datamodules.tally import Tally, some

logger = logging.getLogger(__name__)


def class_folders(
    root: Path, suffixes: Sequence[str] = IMAGE_SUFFIXES, tally: Tally | None = None, listed: Sequence[str] = ()
) -> list[Path]:
    """The class folders of a tree, sorted as text.

    Args:
        root: the tree.
        suffixes: endings of files that are taken for images.
        tally: counts folders whose names are seldom classes'.
        listed: names that are known to be classes'.

    Raises:
        ShardError: where there are none, or images beside them, which would have no class, or the folders are splits.
    """
    if not root.is_dir():
        raise ShardError(no_folder(root))
    inside = [path for path in root.iterdir() if not is_litter(path.name)]
    folders = sorted(path for path in inside if path.is_dir())
    loose = sorted(path.name for path in inside if not path.is_dir() and path.suffix.lower() in suffixes)
    unlabelled = "or read all of them without classes by --unlabelled true of python -m datamodules.prepare imagefolder"
    if not folders:
        found = f"has no class folders, but images ({len(loose)}: {some(loose)})" if loose else "has no class folders"
        raise ShardError(f"{root} {found}; wanted one folder per class, as ImageFolder reads them, {unlabelled}")
    if loose:
        raise ShardError(
            f"images beside the class folders of {root} have no class ({len(loose)}: {some(loose)}); move "
            f"them into one, {unlabelled}"
        )
    names = [folder.name for folder in folders if folder.name not in listed]
    if names and (why := no_classes(names)):
        raise ShardError(
            f"the folders of {root}, {some(names)}, {why}; if they are classes, say so by a list of them, --classes"
        )
    for name in odd_among(names):
        if tally is not None:
            tally.add("folders that are called like a split, or like what belongs to images, taken for classes", name)
    return folders


def class_images(
    folder: Path,
    tally: Tally | None = None,
    strict: bool = True,
    may_be_empty: bool = False,
    suffixes: Sequence[str] = IMAGE_SUFFIXES,
) -> list[Path]:
    """The images of one class, in folders below it too, links followed, sorted.

    Args:
        folder: of the class, or of images without one.
        tally: counts what is left out.
        strict: a file that is no image is an error and not left out.
        may_be_empty: that there is none is no error.
        suffixes: endings of files that are taken for images.

    Raises:
        ShardError: for an empty folder or a file of another kind.
    """
    tally = Tally() if tally is None else tally
    files = files_below(folder, tally)
    found = [path for path in files if path.suffix.lower() in suffixes]
    if strict and (bad := [path for path in files if path.suffix.lower() not in suffixes]):
        others = f", nor are {len(bad) - 1} more" if len(bad) > 1 else ""
        arrays = "; arrays are read where --channels says what they hold" if bad[0].suffix.lower() == ".npy" else ""
        raise ShardError(
            f"{bad[0]} is no {', '.join(suffixes)} file{others}; convert or remove it, or --policy skip{arrays}"
        )
    for path in files:
        if path.suffix.lower() not in suffixes:
            tally.add("files that are no images, left out", path.name)
    if masks := [path for path in found if path.stem.lower().endswith(".mask")]:
        raise ShardError(f"{masks[0]} is called like a mask, and would be an image of its own; keep masks elsewhere")
    if not found and not may_be_empty:
        raise ShardError(f"class folder {folder} is empty; fill or remove it")
    return found


def count_notes(root: Path, images: Sequence[Path], tally: Tally) -> None:
    """Counts images that stand in folders of masks or labels, and are read all the same."""
    for path in images:
        if any(is_notes(part) for part in path.relative_to(root).parts[:-1]):
            tally.add("images in folders of masks or the like, taken for images", path.relative_to(root))


class ImageTree(Source):
    """A tree of class folders: a source of one piece, and its own reader.

    Args:
        root: the tree.
        synsets: names the classes of folders that are not numbers; see :func:`~datamodules.labels.folder_labels`.
    """

    def __init__(self, root: str | Path, synsets: str = "imagenet") -> None:
        root = Path(root).expanduser()
        folders = class_folders(root)
        labels = folder_labels([f.name for f in folders], synsets)
        tally = Tally()
        self._hold(root, [(path, labels[folder.name]) for folder in folders for path in class_images(folder, tally)])
        _report(root, tally)

    pixels: PixelFormat = RGB

    def _hold(self, root: Path, images: Sequence[tuple[Path, int | None]], apart: bool = False) -> None:
        self.root, self.paths, self._images = root, [root], images
        self.starts = np.arange(len(images) + 1) if apart else np.array([0, len(images)])
        self.lengths = np.diff(self.starts)

    @property
    def labels(self) -> Labels:
        return labels_of([None if label is None else str(label).encode() for _, label in self._images])

    def reader(self) -> "ImageTree":
        return self

    def read(self, index: int, fields: Sequence[str]) -> RawSample:
        """The bytes of an image and its class number as ``cls``; its key is the path below the root."""
        path, label = self._images[index]
        if self.pixels.plain:
            image = read_image(path, PixelRules(), Tally())
            field, data = image.field, image.data
        else:
            field, data = folder_member(path, self.pixels)
        members = {field: data} | ({} if label is None else {"cls": str(label).encode()})
        return RawSample(str(self.root), path.relative_to(self.root).as_posix(), members)

    def look_ahead(self, indices: np.ndarray) -> None:
        """Nothing has to be fetched."""

    def close(self) -> None:
        """Nothing is held open."""


class ImageFolder(ImageTree):
    """All images below a folder, without classes; each a piece of its own, so that training mixes them all.

    Args:
        root: the folder.
        option: the configuration key that names it, for messages.
        pixels: of its images.

    Raises:
        ShardError: where it holds no image.
    """

    def __init__(self, root: str | Path, option: str = "shards", pixels: PixelFormat = RGB) -> None:
        self.pixels = pixels
        root = Path(root).expanduser()
        if not root.is_dir():
            raise ShardError(f"{no_folder(root)}, which data.init_args.{option} names")
        tally = Tally()
        suffixes = IMAGE_SUFFIXES if pixels.plain else SUFFIXES
        images = class_images(root, tally, strict=False, may_be_empty=True, suffixes=suffixes)
        count_notes(root, images, tally)
        _report(root, tally)
        if not images:
            raise ShardError(f"data.init_args.{option}: {root} holds no image; wanted one of {', '.join(suffixes)}")
        self._hold(root, [(path, None) for path in images], apart=True)


def _report(root: Path, tally: Tally) -> None:
    for line in tally:
        logger.warning("%s: %s", root, line)
