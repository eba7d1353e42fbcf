"""A tree CLASS/IMAGE read as if it were one shard, so that published folders need no conversion."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from datamodules.labels import folder_labels
from datamodules.samples import RawSample, ShardError, Source

SUFFIXES = {".jpg": "jpg", ".jpeg": "jpg", ".png": "png", ".webp": "webp"}
"""File endings of images, in any case, and the fields they become."""


def class_folders(root: Path) -> list[Path]:
    """The class folders of a tree, sorted as text. ShardError where there are none."""
    if not root.is_dir():
        raise ShardError(f"no folder {root}")
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not folders:
        raise ShardError(f"{root} has no class folders; wanted one folder per class, as ImageFolder reads them")
    return folders


def class_images(folder: Path) -> list[Path]:
    """The images of one class, sorted. ShardError for an empty folder or a file of another kind."""
    found = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    bad = [p for p in found if p.suffix.lower() not in SUFFIXES]
    if bad:
        raise ShardError(f"{bad[0]} is no {', '.join(SUFFIXES)} file; convert or remove it")
    if not found:
        raise ShardError(f"class folder {folder} is empty; fill or remove it")
    return found


class ImageTree(Source):
    """A source of one piece, and its own reader.

    Args:
        root: the tree.
        synsets: names the classes of folders that are not numbers; see :func:`~datamodules.labels.folder_labels`.
    """

    def __init__(self, root: str | Path, synsets: str = "imagenet") -> None:
        root = Path(root).expanduser()
        folders = class_folders(root)
        labels = folder_labels([f.name for f in folders], synsets)
        self.root, self.paths = root, [root]
        self._images = [(path, labels[folder.name]) for folder in folders for path in class_images(folder)]
        self.lengths = np.array([len(self._images)], dtype=np.int64)
        self.starts = np.array([0, len(self._images)])

    def reader(self) -> "ImageTree":
        return self

    def read(self, index: int, fields: Sequence[str]) -> RawSample:
        """The bytes of an image and its class number as ``cls``; its key is the path below the root."""
        path, label = self._images[index]
        key = str(path.relative_to(self.root))
        try:
            image = path.read_bytes()
        except OSError as error:
            raise ShardError(f"image {path} cannot be read ({error})") from None
        return RawSample(str(self.root), key, {SUFFIXES[path.suffix.lower()]: image, "cls": str(label).encode()})

    def look_ahead(self, indices: np.ndarray) -> None:
        """Nothing has to be fetched."""

    def close(self) -> None:
        """Nothing is held open."""
