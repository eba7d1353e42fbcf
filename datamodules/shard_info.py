"""What shards hold, found out once: from timm's ``_info.json``, from counts kept from before, or by a scan.

``_info.json`` may say more of a split than timm's schema asks for: ``labels``, how many of its samples have a class and
which are the lowest and highest; ``pixels``, the ``in_chans`` and ``bits`` of its images; ``statistics``, their
``mean`` and ``std`` by channel; ``sizes`` and ``annotated``, by shard and sample the (width, height) of its image
and how many annotations of objects it has.
"""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common.files import write_json
from datamodules.samples import NO_SAMPLES, Labels, ShardError
from datamodules.shard_index import gone, scan_shard, shard_labels
from datamodules.tally import Tally

logger = logging.getLogger(__name__)

INFO_FILES = ("_info.json", "info.json")
COUNTS_FILE = ".shard_counts.json"
KEPT = 2 + len(Labels._fields)
"""What is kept of a shard there: its size in bytes, when it was changed, and the fields of :class:`Labels`."""


class ShardInfo(NamedTuple):
    """What is known of a shard without opening it."""

    length: int
    labels: Labels | None
    """Of the samples of its split, or of its own; None where nothing was said."""
    splits: tuple[str, ...] = ()
    """Names of the splits that it belongs to, as far as that is said."""


def shard_infos(folder: Path, paths: Sequence[Path]) -> list[ShardInfo]:
    """Of each shard: from the ``_info.json`` of the folder or of its own, the kept counts, or a scan of the headers."""
    known = folder_info(folder, paths)
    names = [relative_name(path, folder) for path in paths]
    if all(name in known for name in names):
        return [known[name] for name in names]
    kept_in = [
        folder / COUNTS_FILE,
        user_cache() / (str(folder.resolve()).strip("/").replace("/", "_") + ".json"),
    ]
    kept: dict[str, list] = {}
    for file in kept_in:
        kept |= _kept_counts(file)
    infos, scanned, fresh = [], Scan(), False
    for path, name in zip(paths, names, strict=True):
        try:
            stat = path.stat()
        except FileNotFoundError:
            raise gone(path) from None
        entry = kept.get(name)
        if entry is None or len(entry) != KEPT or entry[:2] != [stat.st_size, stat.st_mtime_ns]:
            labels = scanned.add(path, name)
            entry = kept[name] = [stat.st_size, stat.st_mtime_ns, labels.samples, *labels[1:]]
            fresh = True
        infos.append(ShardInfo(entry[2], Labels(*entry[2:]), known[name].splits if name in known else ()))
    scanned.report(folder)
    if fresh:
        for file in kept_in:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, kept)
                break
            except OSError:  # a read-only folder: keep the counts in the user's cache instead
                continue
    return infos


def _kept_counts(file: Path) -> dict[str, list]:
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):  # none, or not one of ours: count again
        return {}


class Scan:
    """Shards read by their headers for the first time; says together what was strange about them."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._keys: set[int] = set()

    def add(self, path: Path, name: str) -> Labels:
        """Scans a shard, and reads its samples' classes."""
        samples, tally = scan_shard(path)
        self.tally.join(tally, f"{name}: ")
        keys = {hash(sample.key) for sample in samples}
        if self._keys & keys:
            for sample in samples:
                if hash(sample.key) in self._keys:
                    self.tally.add("samples with the key of one in an earlier shard", f"{name}: {sample.key}")
        self._keys |= keys
        return shard_labels(path, samples)

    def report(self, folder: Path) -> None:
        """A warning for each kind of strangeness."""
        for line in self.tally:
            logger.warning("shards in %s: %s", folder, line)


def relative_name(path: Path, folder: Path) -> str:
    """What ``_info.json`` in ``folder`` calls a shard: its path from there."""
    return Path(os.path.relpath(path, folder)).as_posix()


def folder_info(folder: Path, paths: Sequence[Path] = ()) -> dict[str, ShardInfo]:
    """What the ``_info.json`` of a folder says, and those beside shards in folders below; by name from ``folder``."""
    found: dict[str, ShardInfo] = {}
    for below in sorted({path.parent for path in paths} - {folder}):
        prefix = relative_name(below, folder)
        found |= {f"{prefix}/{name}": info for name, info in _info(below).items()}
    return found | _info(folder)


def _info(folder: Path) -> dict[str, ShardInfo]:
    for name in INFO_FILES:
        path = folder / name
        if path.is_file():
            return parse_info(path.read_text(encoding="utf-8-sig"), str(path))
    return {}


def parse_info(text: str, source: str) -> dict[str, ShardInfo]:
    """Shards by name out of an ``_info.json``. ShardError, naming ``source``, where it is no such file."""
    found: dict[str, ShardInfo] = {}
    try:
        for of, split in json.loads(text)["splits"].items():
            said = split.get("labels")
            labels = (
                None if said is None else Labels(**{field: said[field] for field in Labels._fields if field in said})
            )
            for name, length in zip(split["filenames"], split["shard_lengths"], strict=True):
                before = found[name].splits if name in found else ()
                found[name] = ShardInfo(int(length), labels, (*before, str(of)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShardError(
            f"{source} is not in timm's schema, splits → name → filenames, shard_lengths ({error!r}); "
            "correct it, or delete it to have the tars counted"
        ) from None
    return found


def joined_labels(infos: Sequence[ShardInfo]) -> Labels | None:
    """Of shards together; a split's own count once. None where not all are known."""
    if any(info.labels is None for info in infos):
        return None
    total = NO_SAMPLES
    for labels in {id(info.labels): info.labels for info in infos}.values():
        assert labels is not None
        total = total + labels
    return total


def user_cache() -> Path:
    """Where this project keeps files of its own between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "dinomamba"
