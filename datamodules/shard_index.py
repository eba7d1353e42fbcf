"""What shards hold, found out once: from a tar's headers, timm's ``_info.json``, or counts kept from before."""

import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

from common.files import write_json
from datamodules.samples import Sample, ShardError, split_member

INFO_FILES = ("_info.json", "info.json")
COUNTS_FILE = ".shard_counts.json"


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
        raise gone(path) from None
    except (tarfile.TarError, OSError) as error:
        raise ShardError(f"shard {path} is no whole tar ({error}); fetch or write it again") from None
    return [Sample(key, members) for key, members in samples.items()]


def gone(path: Path) -> ShardError:
    return ShardError(f"shard {path} is gone; restore it or take it out of _info.json")


def shard_lengths(folder: Path, paths: Sequence[Path]) -> list[int]:
    """Samples in each shard: from timm's ``_info.json``, the kept counts, or a scan of the headers."""
    known = info_lengths(folder)
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


def info_lengths(folder: Path) -> dict[str, int]:
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
