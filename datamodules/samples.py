"""What a sample is, and what it is read from.

A sample is ``KEY.jpg|jpeg|png|webp``, or ``KEY.npy`` for channels that those do not hold, with ``KEY.cls`` (ASCII
integer), optionally ``KEY.mask.png`` and ``KEY.json``.
Members are found by these endings, so a dot inside KEY does no harm.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

IMAGE_FIELDS = ("jpg", "jpeg", "png", "webp")
ARRAY_FIELD = "npy"
"""An image of another kind, where :class:`~datamodules.pixel_format.PixelFormat` says so: (H, W, C), not pickled."""
FIELDS = ("mask.png", *IMAGE_FIELDS, ARRAY_FIELD, "cls", "json")  # the longer ending first: KEY.mask.png is no image
LARGEST = {"cls": 1 << 10, "json": 1 << 20, ARRAY_FIELD: 1 << 30}
"""Bytes that a member may have; those not named here ``LARGEST_IMAGE``."""
LARGEST_IMAGE = 64 << 20


class ShardError(ValueError):
    """Something is wrong with a shard or a sample in it; the message names it and the remedy."""


def no_folder(path: Path) -> str:
    """In words, that a path is none."""
    return f"{path} is a file and no folder" if path.is_file() else f"no folder {path}"


class Sample(NamedTuple):
    """Where a sample's members lie in its shard."""

    key: str
    members: dict[str, tuple[int, int]]
    """field -> (offset, size) in bytes."""


class RawSample(NamedTuple):
    """A sample's bytes."""

    shard: str
    key: str
    fields: dict[str, bytes]

    @property
    def name(self) -> str:
        """How errors call it."""
        return f"sample {self.key!r} in shard {self.shard}"

    def image(self, wanted: Sequence[str] = IMAGE_FIELDS) -> bytes:
        for field in wanted:
            if field in self.fields:
                return self.fields[field]
        hint = "" if ARRAY_FIELD in wanted else "; arrays (.npy) are read where data.init_args.in_chans and bits say so"
        raise ShardError(f"{self.name} has no image; wanted one of {', '.join(wanted)}{hint}")

    def label(self) -> int:
        if "cls" not in self.fields:
            raise ShardError(f"{self.name} has no .cls member with its class; rewrite it with datamodules.prepare")
        number = class_number(self.fields["cls"])
        if number is None:
            raise ShardError(f"{self.name}: .cls holds {self.fields['cls'][:40]!r}; {WANTED_CLASS}")
        return number


WANTED_CLASS = (
    "wanted the class's number, from 0, in ASCII digits: write the shards anew with numbers, as python -m "
    "datamodules.prepare imagefolder does from class folders"
)


def class_number(text: bytes) -> int | None:
    """The number that a ``.cls`` holds; None where it holds something else, such as a name or 1.0."""
    return int(text) if re.fullmatch(rb"\s*[+-]?[0-9]+\s*", text) else None


def split_member(name: str) -> tuple[str, str] | None:
    """A member's (key, field), or None for members of no meaning here."""
    for field in FIELDS:
        if name.lower().endswith("." + field):
            return name[: -len(field) - 1], field
    return None


class Labels(NamedTuple):
    """What is known of some samples without reading them one by one."""

    samples: int
    labelled: int
    """How many of them have a class."""
    lowest: int | None
    highest: int | None
    unreadable: int = 0
    """Of how many the class is no number."""
    example: str | None = None
    """What the first of these has in its place, as Python writes it."""
    imageless: int = 0
    """How many have neither image nor array."""

    def __add__(self, other: "Labels") -> "Labels":  # type: ignore[override]
        lows = [v for v in (self.lowest, other.lowest) if v is not None]
        highs = [v for v in (self.highest, other.highest) if v is not None]
        return Labels(
            self.samples + other.samples,
            self.labelled + other.labelled,
            min(lows, default=None),
            max(highs, default=None),
            self.unreadable + other.unreadable,
            other.example if self.example is None else self.example,
            self.imageless + other.imageless,
        )

    def record(self) -> dict[str, Any]:
        """For ``_info.json``: what is as it should be goes without saying."""
        said = self._asdict()
        return {name: said[name] for name in said if name not in self._field_defaults or said[name]}


NO_SAMPLES = Labels(0, 0, None, None)


def labels_of(values: Sequence[bytes | None], imageless: int = 0) -> Labels:
    """Of each sample's ``.cls``; what is no number counts as a class, and as one that cannot be read.

    Args:
        values: content of the members; None for a sample without.
        imageless: how many samples have no image.
    """
    there = [value for value in values if value is not None]
    numbers = [number for value in there if (number := class_number(value)) is not None]
    example = next((repr(value[:40]) for value in there if class_number(value) is None), None)
    return Labels(
        len(values), len(there), min(numbers, default=None), max(numbers, default=None),
        len(there) - len(numbers), example, imageless,
    )  # fmt: skip


class SampleReader(Protocol):
    """Reads samples by number."""

    def read(self, index: int, fields: Sequence[str]) -> RawSample: ...

    def look_ahead(self, indices: np.ndarray) -> None: ...

    def close(self) -> None: ...


class Source(ABC):
    """Samples in a fixed order, in pieces: a :class:`~datamodules.shards.ShardSet`, or an ImageTree as one piece.

    Attributes:
        fields: members that its samples may have.
        paths: of the pieces, for the run's record.
        lengths: samples in each piece.
        starts: (pieces + 1) number of each piece's first sample, and in the end of all samples.
        groups: (samples) a number for each sample; those of one number share training batches, as far as that goes.
            None where all may.
    """

    fields: Sequence[str] = FIELDS
    paths: Sequence[Path | str]
    lengths: np.ndarray
    starts: np.ndarray
    groups: np.ndarray | None = None

    @property
    def labels(self) -> Labels | None:
        """What is known of the samples' classes, of all samples or of some; None for nothing."""
        return None

    @property
    def classes(self) -> Sequence[str] | None:
        """Names of the classes in the order of their numbers; None where they are not known."""
        return None

    def __len__(self) -> int:
        """Samples in all pieces."""
        return int(self.starts[-1])

    @abstractmethod
    def reader(self) -> SampleReader:
        """A reader for one process."""
