"""Writes a split: shards, the list of classes, and what readers need to know of both."""

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import webdataset as wds

from common.files import write_json
from datamodules.classes import CLASSES_FILE, differ, read_classes, summary
from datamodules.samples import WANTED_CLASS, Labels, ShardError, labels_of
from datamodules.shard_info import INFO_FILES, relative_name

logger = logging.getLogger(__name__)


def write_split(
    out: Path, split: str, samples: Iterable[dict[str, Any]], samples_per_shard: int, overwrite: bool = False,
    classes: Sequence[str] | None = None, about: Callable[[], dict[str, Any]] = dict,
) -> list[Path]:  # fmt: skip
    """Writes ``out/{split}-%06d.tar`` and enters the split into ``_info.json``.

    Args:
        out: the folder.
        split: name of the split.
        samples: webdataset samples, each with ``__key__``.
        samples_per_shard: samples in a shard, the last one excepted.
        overwrite: replace a split of that name.
        classes: names of the classes in the order of their numbers, kept as ``classes.json``.
        about: what else ``_info.json`` says of the split, asked for when all samples are written.

    Returns:
        The shards written.

    Raises:
        ShardError: where the split is there already, has no samples, two of one key, a class beyond the list, or a
            name that shards cannot have.
    """
    if samples_per_shard < 1:
        raise ValueError(f"samples_per_shard={samples_per_shard} must be positive")
    check_split_name(split)
    out.mkdir(parents=True, exist_ok=True)
    info = read_info(out, split, overwrite)
    keys: set[str] = set()
    values: list[bytes | None] = []
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
            if sample["__key__"] in keys:
                raise ShardError(f"the split {split!r} has two samples of the key {sample['__key__']!r}")
            keys.add(sample["__key__"])
            values.append(_label_bytes(sample))
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
    enter_split(out, info, split, paths, lengths, labels_of(values), classes, about())
    if classes is not None and any(value is not None for value in values):
        for line in summary(Counter(int(value) for value in values if value is not None), classes):
            logger.info("%s: %s", split, line)
    return paths


def apart(out: str, root: Path) -> Path:
    """The folder for the shards. ValueError where it lies among the images, where the next look would find shards."""
    folder = Path(out)
    if root.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise ValueError(f"--out {out} lies inside the images' folder {root}: give a folder beside it")
    return folder


def check_split_name(split: str) -> None:
    """ShardError for a name that could not begin the names of shards, or would mean others in a pattern."""
    if not re.fullmatch(r"\w[\w.-]*", split):
        raise ShardError(
            f"--split {split!r} is no name for a split: shards are called NAME-000000.tar, so it is made of letters, "
            "digits, _, - and ., and begins with a letter, a digit or _, such as train"
        )


def _label_bytes(sample: dict[str, Any]) -> bytes | None:
    """A sample's class as its member will hold it."""
    value = sample.get("cls")
    return value if value is None or isinstance(value, bytes) else str(value).encode()


def read_info(out: Path, split: str, overwrite: bool) -> dict[str, Any]:
    """The folder's ``_info.json``. ShardError where it names the split already."""
    path = out / INFO_FILES[0]
    info = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"splits": {}}
    if split in info["splits"] and not overwrite:
        raise ShardError(f"{out} already holds the split {split!r}; pass --overwrite true to write it again")
    return info


def enter_split(
    out: Path, info: dict[str, Any], split: str, paths: Sequence[Path], lengths: Sequence[int], labels: Labels,
    classes: Sequence[str] | None = None, about: Mapping[str, Any] = {},  # never changed
) -> None:  # fmt: skip
    """Writes the folder's ``classes.json``, where there are any, and ``_info.json`` with a split's shards."""
    if classes is not None and labels.unreadable:
        raise ShardError(f"the split {split!r} has the class {labels.example}; {WANTED_CLASS}")
    listed = len(classes) if classes is not None else None
    if listed is not None and labels.highest is not None and labels.highest >= listed:
        raise ShardError(f"the split {split!r} has class {labels.highest}; the list of classes ends at {listed - 1}")
    info["splits"][split] = {
        "name": split,
        "num_samples": sum(lengths),
        "filenames": [relative_name(path, out) for path in paths],
        "shard_lengths": list(lengths),
        "labels": labels.record(),
        **about,
    }
    if classes is not None:
        path = out / CLASSES_FILE
        if path.is_file() and set(info["splits"]) - {split} and (found := differ(read_classes(path), classes)):
            raise ShardError(f"{path} and the classes of the split {split!r} {found}")
        write_json(path, list(classes))
    write_json(out / INFO_FILES[0], info)
    found = f"{sum(lengths)} samples in {len(paths)} shards under {out}"
    logger.info(
        "%s: %s, %s with a class", split, found, "all" if labels.labelled == labels.samples else labels.labelled
    )
