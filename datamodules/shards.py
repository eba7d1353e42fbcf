"""Shards: ordinary WebDataset tars, indexed once and read by sample number. Nothing is ever extracted to disk."""

import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import numpy as np
from braceexpand import braceexpand

from common.files import read_at
from datamodules.classes import folder_classes
from datamodules.remote import ShardCache
from datamodules.samples import (
    ARRAY_FIELD,
    IMAGE_FIELDS,
    LARGEST,
    LARGEST_IMAGE,
    Labels,
    RawSample,
    Sample,
    ShardError,
    Source,
)
from datamodules.shard_index import describe, gone, index_shard, shard_labels
from datamodules.shard_info import (
    INFO_FILES,
    ShardInfo,
    folder_info,
    joined_labels,
    parse_info,
    relative_name,
    shard_infos,
)
from datamodules.shard_names import found_below, matching, named, refuse_mixed, shard_paths


class ShardSet(Source):
    """The shards of one split, in a fixed order, with their lengths.

    Args:
        paths: the tars: paths, or URLs of remote ones.
        lengths: samples in each.
        names: what ``_info.json`` calls them, their paths from the root; none where they come from no root.
        cache: of remote ones, what fetches them.
        labels: what is known of all their classes.
    """

    def __init__(
        self,
        paths: Sequence[Path | str],
        lengths: Sequence[int],
        names: Sequence[str] = (),
        cache: ShardCache | None = None,
        labels: Labels | None = None,
    ) -> None:
        self.paths, self.lengths = list(paths), np.asarray(lengths, dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.names, self._cache, self._labels = names, cache, labels

    @classmethod
    def find(cls, root: str | Path, pattern: str, option: str) -> "ShardSet":
        """Shards in ``root`` whose names match ``pattern``; see :mod:`datamodules.shard_names`.

        Lengths come from ``_info.json`` beside them; without it from the tars' headers, scanned once and kept.

        Args:
            root: the folder.
            pattern: of file names.
            option: the configuration key that holds the pattern, for messages.
        """
        folder = Path(root).expanduser()
        paths = shard_paths(folder, pattern, f"data.init_args.{option}")
        announced = folder_info(folder, paths)
        there = {relative_name(path, folder) for path in paths}
        spelt_out = {relative_name(folder / name, folder) for name in named(pattern)}
        _refuse_missing(matching(announced, pattern) | spelt_out, there, folder, option)
        infos = shard_infos(folder, paths)
        splits = {relative_name(path, folder): info.splits for path, info in zip(paths, infos, strict=True)}
        refuse_mixed(pattern, splits, f"data.init_args.{option}", folder)
        _refuse_nothing(paths, infos, folder, option)
        names = [relative_name(path, folder) for path in paths]
        return cls(paths, [info.length for info in infos], names, labels=joined_labels(infos))

    @classmethod
    def find_remote(cls, cache: ShardCache, pattern: str, option: str) -> "ShardSet":
        """Shards of a remote root whose names match ``pattern``, out of the ``_info.json`` beside them."""
        announced = parse_info(cache.index(INFO_FILES), f"the index of {cache.root}")
        names = sorted(name for name in announced for part in braceexpand(pattern) if fnmatchcase(name, part))
        _refuse_missing(named(pattern), set(names), cache.root, option)
        refuse_mixed(pattern, {name: announced[name].splits for name in names}, f"data.init_args.{option}")
        if not names:
            raise ShardError(
                f"no shard in the index of {cache.root} matches data.init_args.{option}={pattern!r} (it names "
                f"{', '.join(sorted(announced)[:3])}, …); correct the pattern"
            )
        infos: list[ShardInfo] = [announced[name] for name in names]
        urls = [cache.url(name) for name in names]
        return cls(urls, [info.length for info in infos], names, cache, joined_labels(infos))

    def reader(self) -> "ShardReader":
        return ShardReader(self)

    @property
    def remote(self) -> bool:
        return self._cache is not None

    @cached_property
    def labels(self) -> Labels | None:
        """Of all samples, or where nothing is known of them, of the first shard; None where that had to be fetched."""
        if self._labels is None and not self.remote and self.paths:
            path = Path(self.paths[0])
            with suppress(ShardError, OSError):  # reading it will meet the same error, and the policy says what follows
                return shard_labels(path, index_shard(path))
        return self._labels

    @cached_property
    def classes(self) -> list[str] | None:
        """Names of the classes, from the ``classes.json`` beside the shards; None where there is none."""
        return None if self.remote else folder_classes([Path(path).parent for path in self.paths])

    def fetch(self, number: int) -> Path:
        """A shard's file; fetched first where it is remote and not there."""
        if self._cache is None:
            return Path(self.paths[number])
        return self._cache.fetch(self.names[number], lambda aside: self._samples(aside, number))

    def open(self, number: int) -> tuple[int, list[Sample]]:
        """A descriptor of a shard's file, and its samples."""
        if not self.remote:
            return self._opened(self.fetch(number), number)
        for _ in range(10):
            path = self.fetch(number)
            try:
                return self._opened(path, number)
            except ShardError as error:  # another process made room for its own, or the disk damaged it
                path.unlink(missing_ok=True)
                last = error
        raise last

    def _opened(self, path: Path, number: int) -> tuple[int, list[Sample]]:
        samples = self._samples(path, number)
        try:
            return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0)), samples
        except FileNotFoundError:
            raise gone(path) from None

    def _samples(self, path: Path, number: int) -> list[Sample]:
        samples = index_shard(path)
        if len(samples) != self.lengths[number]:
            raise ShardError(
                f"shard {path} holds {len(samples)} samples, {self.lengths[number]} were announced; "
                "correct _info.json, or delete it to have the tars counted"
            )
        return samples

    def locate(self, index: int) -> tuple[int, int]:
        """A sample's number over all shards to (shard, number within)."""
        shard = int(np.searchsorted(self.starts, index, "right")) - 1
        return shard, index - int(self.starts[shard])


def _refuse_missing(wanted: set[str], present: set[str], root: object, option: str) -> None:
    if missing := sorted(wanted - present):
        elsewhere = found_below(root, missing[0]) if isinstance(root, Path) else None
        raise ShardError(
            f"{len(missing)} shard(s) are missing from {root}, the first: {missing[0]}; "
            + (f"{elsewhere} has its name: correct _info.json and data.init_args.{option}, or move it" if elsewhere
               else f"restore it, or take it out of _info.json and data.init_args.{option}")
        )  # fmt: skip


def _refuse_nothing(paths: Sequence[Path], infos: Sequence[ShardInfo], folder: Path, option: str) -> None:
    """ShardError where there is no sample at all, or not one has an image."""
    total, labels = sum(info.length for info in infos), joined_labels(infos)
    imageless = 0 if labels is None else labels.imageless
    if total > imageless:
        return
    found = "no sample" if not total else f"{total} samples, none of which has an image"
    raise ShardError(
        f"the {len(paths)} shard(s) of data.init_args.{option} in {folder} hold {found}: {describe(paths)}; wanted "
        f"members KEY.{', KEY.'.join(IMAGE_FIELDS)} or KEY.{ARRAY_FIELD}: unpack them, convert the images, and write "
        "shards with python -m datamodules.prepare imagefolder"
    )


class ShardReader:
    """Reads samples of a ShardSet by number; keeps a few shards open and indexed."""

    def __init__(self, shards: ShardSet, keep_open: int = 16) -> None:
        self.shards, self.keep_open = shards, keep_open
        self._open: OrderedDict[int, tuple[int, list[Sample]]] = OrderedDict()
        self._failed: dict[int, str] = {}
        self._asked: set[int] = set()
        self._fetching: ThreadPoolExecutor | None = None

    def look_ahead(self, indices: np.ndarray) -> None:
        """Has the remote shards of samples that are read soon fetched in the meantime."""
        if not self.shards.remote:
            return
        numbers = np.unique(np.searchsorted(self.shards.starts, indices, "right") - 1).tolist()
        for number in set(numbers) - self._asked:
            self._asked.add(number)
            self._fetching = self._fetching or ThreadPoolExecutor(1)
            self._fetching.submit(self.shards.fetch, number)  # reading it meets the same error, if there is one

    def _shard(self, number: int) -> tuple[int, list[Sample]]:
        if number in self._failed:
            raise ShardError(self._failed[number])
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        try:
            opened = self.shards.open(number)
        except ShardError as error:
            self._failed[number] = str(error)  # not tried again for each of its samples
            raise
        if len(self._open) >= self.keep_open:
            os.close(self._open.popitem(last=False)[1][0])
        self._open[number] = opened
        return opened

    def read(self, index: int, fields: Sequence[str]) -> RawSample:
        """The bytes of a sample's members among ``fields``."""
        number, within = self.shards.locate(index)
        file, samples = self._shard(number)
        sample, path = samples[within], str(self.shards.paths[number])
        data = {}
        for field, (offset, size) in sample.members.items():
            if size > (allowed := LARGEST.get(field, LARGEST_IMAGE)):
                raise ShardError(
                    f"sample {sample.key!r} in shard {path}: its .{field} has {size} bytes, at most {allowed} are "
                    "allowed; write the shard without it"
                )
            if field in fields:
                data[field] = read_at(file, size, offset)
                if len(data[field]) != size:
                    raise ShardError(
                        f"sample {sample.key!r} in shard {path} is cut off; fetch or write the shard again"
                    )
        return RawSample(path, sample.key, data)

    def close(self) -> None:
        if self._fetching is not None:
            self._fetching.shutdown(wait=False, cancel_futures=True)
        while self._open:
            os.close(self._open.popitem()[1][0])
