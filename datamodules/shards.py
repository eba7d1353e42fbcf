"""Shards: ordinary WebDataset tars, indexed once and read by sample number.

A sample is ``KEY.jpg|jpeg|png|webp`` with ``KEY.cls`` (ASCII integer), optionally ``KEY.mask.png`` and ``KEY.json``.
Members are found by these endings, so a dot inside KEY does no harm. Nothing is ever extracted to disk.
"""

import json
import os
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from braceexpand import braceexpand

IMAGE_FIELDS = ("jpg", "jpeg", "png", "webp")
FIELDS = ("mask.png", *IMAGE_FIELDS, "cls", "json")  # the longer ending first: KEY.mask.png is no image
LARGEST = {"cls": 1 << 10, "json": 1 << 20}
"""Bytes that a member may have; those not named here ``LARGEST_IMAGE``."""
LARGEST_IMAGE = 64 << 20
INFO_FILES = ("_info.json", "info.json")
COUNTS_FILE = ".shard_counts.json"


class ShardError(ValueError):
    """Something is wrong with a shard or a sample in it; the message names it and the remedy."""


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

    def image(self) -> bytes:
        for field in IMAGE_FIELDS:
            if field in self.fields:
                return self.fields[field]
        raise ShardError(f"{self.name} has no image; wanted one of {', '.join(IMAGE_FIELDS)}")

    def label(self) -> int:
        if "cls" not in self.fields:
            raise ShardError(f"{self.name} has no .cls member with its class; rewrite it with datamodules.prepare")
        text = self.fields["cls"]
        try:
            return int(text)
        except ValueError:
            raise ShardError(f"{self.name}: .cls holds {text[:40]!r}, wanted an integer") from None


def split_member(name: str) -> tuple[str, str] | None:
    """A member's (key, field), or None for members of no meaning here."""
    for field in FIELDS:
        if name.lower().endswith("." + field):
            return name[: -len(field) - 1], field
    return None


def index_shard(path: Path) -> list[Sample]:
    """Reads a tar's headers. ShardError where it is not a whole tar."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        # unbuffered: a header is 512 bytes, and what lies between two of them is not wanted
        with path.open("rb", buffering=0) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                # links and the like hold no bytes of their own
                found = split_member(member.name) if member.isreg() and not member.issparse() else None
                if found:
                    samples.setdefault(found[0], {})[found[1]] = (member.offset_data, member.size)
            end = tar.offset
        last = max((o + s for m in samples.values() for o, s in m.values()), default=0)
        if max(last, end) > path.stat().st_size:
            raise tarfile.ReadError("unexpected end of data")
    except FileNotFoundError:
        raise _gone(path) from None
    except (tarfile.TarError, OSError) as error:
        raise ShardError(f"shard {path} is no whole tar ({error}); fetch or write it again") from None
    return [Sample(key, members) for key, members in samples.items()]


def _gone(path: Path) -> ShardError:
    return ShardError(f"shard {path} is gone; restore it or take it out of _info.json")


def write_json(path: Path, value: object) -> None:
    """Writes aside and renames, so that a reader sees the old file or the new one, whole."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(value, indent=1))
    aside.replace(path)


class SampleReader(Protocol):
    """Reads samples by number."""

    def read(self, index: int, fields: Sequence[str]) -> RawSample: ...

    def look_ahead(self, indices: np.ndarray) -> None: ...

    def close(self) -> None: ...


class RemoteShards(Protocol):
    """Fetches the files of a remote root: a ShardCache."""

    root: str

    def url(self, name: str) -> str: ...

    def index(self, names: tuple[str, ...]) -> str: ...

    def fetch(self, name: str, check: Callable[[Path], object]) -> Path: ...


class Source(Protocol):
    """Samples in a fixed order, in pieces: a :class:`ShardSet`, or an ImageTree as one piece."""

    @property
    def paths(self) -> Sequence[Path | str]: ...

    lengths: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int: ...

    def reader(self) -> SampleReader: ...


class ShardSet:
    """The shards of one split, in a fixed order, with their lengths.

    Args:
        paths: the tars: paths, or URLs of remote ones.
        lengths: samples in each.
        names, cache: of remote ones, their names and what fetches them.
    """

    def __init__(
        self,
        paths: Sequence[Path | str],
        lengths: Sequence[int],
        names: Sequence[str] = (),
        cache: "RemoteShards | None" = None,
    ) -> None:
        self.paths, self.lengths = list(paths), np.asarray(lengths, dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self._names, self._cache = names, cache

    def __len__(self) -> int:
        """Samples in all shards."""
        return int(self.starts[-1])

    @classmethod
    def find(cls, root: str | Path, pattern: str, option: str) -> "ShardSet":
        """Shards in ``root`` whose names match ``pattern`` (a glob, with {0000..1023} ranges if wanted).

        Lengths come from ``_info.json`` beside them; without it from the tars' headers, scanned once and kept.

        Args:
            root: the folder.
            pattern: of file names.
            option: the configuration key that holds the pattern, for messages.
        """
        folder = Path(root).expanduser()
        if not folder.is_dir():
            raise ShardError(f"no folder {folder}: set data.init_args.root to the folder that holds the shards")
        announced = _info_lengths(folder)
        paths = sorted({path for part in braceexpand(pattern) for path in folder.glob(part)})
        if not paths:
            there = sorted(p.name for p in folder.glob("*.tar"))
            seen = f"its tars: {', '.join(there[:3])}{', …' if len(there) > 3 else ''}" if there else "it holds no tar"
            raise ShardError(
                f"no shard in {folder} matches data.init_args.{option}={pattern!r} ({seen}); correct the pattern, or "
                "write shards with python -m datamodules.prepare"
            )
        _refuse_missing(_matching(announced, pattern) | _named(pattern), {p.name for p in paths}, root, option)
        return cls(paths, shard_lengths(folder, paths))

    @classmethod
    def find_remote(cls, cache: "RemoteShards", pattern: str, option: str) -> "ShardSet":
        """Shards of a remote root whose names match ``pattern``, out of the ``_info.json`` beside them."""
        announced = parse_info(cache.index(INFO_FILES), f"the index of {cache.root}")
        names = sorted(_matching(announced, pattern))
        _refuse_missing(_named(pattern), set(names), cache.root, option)
        if not names:
            raise ShardError(
                f"no shard in the index of {cache.root} matches data.init_args.{option}={pattern!r} (it names "
                f"{', '.join(sorted(announced)[:3])}, …); correct the pattern"
            )
        return cls([cache.url(name) for name in names], [announced[n] for n in names], names, cache)

    def reader(self) -> "ShardReader":
        return ShardReader(self)

    @property
    def remote(self) -> bool:
        return self._cache is not None

    def fetch(self, number: int) -> Path:
        """A shard's file; fetched first where it is remote and not there."""
        if self._cache is None:
            return Path(self.paths[number])
        return self._cache.fetch(self._names[number], lambda aside: self._samples(aside, number))

    def open(self, number: int) -> tuple[int, list[Sample]]:
        """A descriptor of a shard's file, and its samples."""
        if not self.remote:
            return self._opened(self.fetch(number), number)
        for _ in range(3):
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
            return os.open(path, os.O_RDONLY), samples
        except FileNotFoundError:
            raise _gone(path) from None

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


def shard_lengths(folder: Path, paths: Sequence[Path]) -> list[int]:
    """Samples in each shard: from timm's ``_info.json``, the kept counts, or a scan of the headers."""
    known = _info_lengths(folder)
    if all(p.name in known for p in paths):
        return [known[p.name] for p in paths]
    kept_in = [
        folder / COUNTS_FILE,
        user_cache() / (str(folder.resolve()).strip("/").replace("/", "_") + ".json"),
    ]
    kept: dict[str, list[int]] = {}
    for file in kept_in:
        if file.is_file():
            kept |= json.loads(file.read_text())
    lengths, fresh = [], False
    for path in paths:
        stat = path.stat()
        entry = kept.get(path.name)
        if entry is None or entry[:2] != [stat.st_size, stat.st_mtime_ns]:
            entry = kept[path.name] = [stat.st_size, stat.st_mtime_ns, len(index_shard(path))]
            fresh = True
        lengths.append(entry[2])
    if fresh:
        for file in kept_in:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, kept)
                break
            except OSError:  # a read-only folder: keep the counts in the user's cache instead
                continue
    return lengths


def _matching(names: Iterable[str], pattern: str) -> set[str]:
    return {name for name in names for part in braceexpand(pattern) if fnmatch(name, part)}


def _named(pattern: str) -> set[str]:
    """The names a pattern spells out, which must all be there."""
    return {part for part in braceexpand(pattern) if not set(part) & set("*?[")}


def _refuse_missing(wanted: set[str], present: set[str], root: object, option: str) -> None:
    if missing := sorted(wanted - present):
        raise ShardError(
            f"{len(missing)} shard(s) are missing from {root}, the first: {missing[0]}; restore it, or take it "
            f"out of _info.json and data.init_args.{option}"
        )


def _info_lengths(folder: Path) -> dict[str, int]:
    for name in INFO_FILES:
        path = folder / name
        if path.is_file():
            return parse_info(path.read_text(), str(path))
    return {}


def parse_info(text: str, source: str) -> dict[str, int]:
    """Shard names and lengths out of an ``_info.json``. ShardError, naming ``source``, where it is no such file."""
    try:
        splits = json.loads(text)["splits"].values()
        return {f: int(n) for s in splits for f, n in zip(s["filenames"], s["shard_lengths"], strict=True)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShardError(
            f"{source} is not in timm's schema, splits → name → filenames, shard_lengths ({error!r}); "
            "correct it, or delete it to have the tars counted"
        ) from None


def user_cache() -> Path:
    """Where this project keeps files of its own between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "dinomamba"


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
                data[field] = os.pread(file, size, offset)
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
