"""Which shards a pattern means: globs, with ``{0000..1023}`` ranges; ``*`` stops at a folder, ``**/`` goes into all.

Patterns are read from the root; ``../other/*.tar`` and paths from ``/`` on lead out of it. Where ``_info.json`` says
which split a shard belongs to, a pattern means those of one split, or of all that it names: ``train-*.tar`` is refused
where it would take shards of train-noisy along, ``{train,train-noisy}-*.tar`` takes both.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from posixpath import join, normpath

from braceexpand import braceexpand

from datamodules.folders import folders_below
from datamodules.image_files import IMAGE_SUFFIXES
from datamodules.samples import ShardError, no_folder
from datamodules.shard_index import COMPRESSED
from datamodules.tally import some

logger = logging.getLogger(__name__)

LOOKED_AT = 10_000
"""Files below a folder that a message about it is made from."""


def shard_paths(folder: Path, pattern: str, option: str) -> list[Path]:
    """The shards in a folder that a pattern means, sorted. ShardError, saying what is there instead, for none.

    Args:
        folder: where to look.
        pattern: see above.
        option: the configuration key that holds the pattern, for messages.
    """
    if not folder.is_dir():
        raise ShardError(f"{no_folder(folder)}: set data.init_args.root to the folder that holds the shards")
    if not pattern:
        raise ShardError(f"{option} is empty; name shards in {folder}, such as 'train-*.tar'")
    paths = {path for part in braceexpand(pattern) for path in _glob(folder, part)}
    if not paths:
        seen, remedy = _instead(folder, pattern, option)
        raise ShardError(f"no shard in {folder} matches {option}={pattern!r} ({seen}); {remedy}")
    if packed := sorted(path.name for path in paths if path.suffix.lower() in COMPRESSED):
        raise ShardError(
            f"shards of {option}={pattern!r} are compressed ({len(packed)}: {some(packed)}), and samples "
            "are read at random: decompress them first, as gunzip, bunzip2, unxz or unzstd do"
        )
    return sorted(paths)


def _glob(folder: Path, part: str) -> set[Path]:
    if anchor := Path(part).anchor:  # "/", on Windows "C:/" and the like
        folder, part = Path(anchor), part[len(anchor) :].lstrip("/")
    head, every, tail = part.partition("**/")
    starts = [path for path in folder.glob(head) if path.is_dir()] if head else [folder]
    found = {path for start in starts for below in folders_below(start) for path in below.glob(tail)} if every else {
        *folder.glob(part)
    }  # fmt: skip
    # what macOS leaves beside a shard on foreign disks, ._train-0.tar, is none
    return {path for path in found if not path.name.startswith(".") or part.rpartition("/")[2].startswith(".")}


def _instead(folder: Path, pattern: str, option: str) -> tuple[str, str]:
    """What a folder holds that has no shard of a pattern, and what to do."""
    tars: list[str] = []
    packed: list[str] = []
    below: list[str] = []
    images: list[str] = []
    looked = 0
    last = {part.rpartition("/")[2] for part in braceexpand(pattern)}
    for inner in folders_below(folder):
        for path in sorted(inner.iterdir()):
            looked += 1
            name = path.relative_to(folder).as_posix()
            if path.name.startswith("."):
                continue
            if path.suffix.lower() in COMPRESSED and ".t" in path.name.lower():
                packed.append(name)
            elif inner != folder and any(fnmatchcase(path.name, part) for part in last):
                below.append(name)
            elif path.suffix.lower() == ".tar":
                tars.append(name)
            elif path.suffix.lower() in IMAGE_SUFFIXES:
                images.append(name)
        if looked > LOOKED_AT:
            break
    seen, remedy = [], "correct the pattern, or write shards with python -m datamodules.prepare"
    if below:
        seen.append(f"folders below it hold {len(below)} that do: {some(below)}")
        remedy = f"set {option} to '**/{min(last)}' to take them all, or root to the folder of the one split"
    if packed:
        seen.append(f"it holds compressed tars: {some(packed)}")
        remedy = remedy if below else "decompress them, since samples are read at random"
    if tars:
        seen.append(f"its tars: {some(tars)}")
    if images and not seen:
        seen.append(f"it holds no tar, but images: {some(images)}")
        remedy = (
            "write shards with python -m datamodules.prepare imagefolder, with --unlabelled true where there are no "
            f"classes; or set {option} to . to have the images read as they are, without classes"
        )
    return "; ".join(seen) or "it holds no tar", remedy


def found_below(folder: Path, name: str) -> Path | None:
    """A file below a folder that has the last part of a name."""
    paths = (below / Path(name).name for below in folders_below(folder))
    return next((path for path in paths if path.is_file()), None)


def matching(names: Iterable[str], pattern: str) -> set[str]:
    """Those of some names, paths from the root, that a pattern means."""
    return {name for name in names for part in braceexpand(pattern) if _matches(name.split("/"), part.split("/"))}


def _matches(name: list[str], part: list[str]) -> bool:
    if not part or not name:
        return not part and not name
    if part[0] == "**":
        return _matches(name, part[1:]) or _matches(name[1:], part)
    return fnmatchcase(name[0], part[0]) and _matches(name[1:], part[1:])


def named(pattern: str) -> set[str]:
    """The names a pattern spells out, which must all be there."""
    return {part for part in braceexpand(pattern) if not set(part) & set("*?[")}


def refuse_mixed(pattern: str, splits: Mapping[str, Sequence[str]], option: str, folder: Path | None = None) -> None:
    """ShardError where a pattern takes shards of several splits and does not name them all.

    A split is named by a part of the pattern (between braces' alternatives) that has its name in it as a word, or that
    means no other's shards. A pattern of all tars, ``*.tar``, is taken at its word, with a warning.

    Args:
        pattern: see above.
        splits: of shards by their names, paths from the root; those that the pattern does not mean have no say.
        option: the configuration key that holds the pattern, for messages.
        folder: the root, for patterns that lead out of it; None for a remote one.
    """
    parts = list(braceexpand(pattern))
    means = {part: _meant(part, [name for name in splits if splits[name]], folder) for part in parts}
    of = {name: set(splits[name]) for names in means.values() for name in names}
    if not of or set.intersection(*of.values()):  # one split holds them all, whatever others do
        return
    members: dict[str, list[str]] = {}
    for name in sorted(of):
        for split in sorted(of[name]):
            members.setdefault(split, []).append(name)
    meant: set[str] = set()
    for part in parts:
        here = {split for name in means[part] for split in of[name]}
        meant |= here if len(here) == 1 else {split for split in here if _names(part, split)}
    if not members.keys() - meant:
        return
    counts = ", ".join(f"{split} ({len(names)})" for split, names in members.items())
    if {*parts} <= {"*.tar", "**/*.tar", "*", "**/*"}:
        logger.warning("%s=%r takes the shards of several splits together: %s", option, pattern, counts)
        return
    each = {split: _exactly(names) for split, names in members.items()}
    first = next(iter(each))
    such_as = (
        f", such as {each[first]!r} for {first} alone, or {'{' + ','.join(map(str, each.values())) + '}'!r} for all"
        if all(each.values())
        else ""
    )
    raise ShardError(
        f"{option}={pattern!r} takes shards of several splits, which _info.json tells apart: {counts}; name those that "
        f"are meant{such_as}"
    )


def _meant(part: str, names: Iterable[str], folder: Path | None) -> list[str]:
    """Those of some names, paths from the root, that a part of a pattern means, wherever it leads."""
    if folder is None:
        return [name for name in names if _matches(name.split("/"), part.split("/"))]
    root = folder.absolute().as_posix()
    wanted = normpath(join(escape(root), part)).split("/")
    return [name for name in names if _matches(normpath(join(root, name)).split("/"), wanted)]


def _names(part: str, split: str) -> bool:
    """Whether a pattern has a split's name in it, as a word of its own."""
    return re.search(rf"(?<![^\W_]){re.escape(split)}(?![^\W_])", part) is not None


def _exactly(names: Sequence[str]) -> str | None:
    """A pattern of these names and no others: the name, or a range where they are numbered; None for others."""
    if len(names) == 1:
        return names[0]
    found = [re.fullmatch(r"(.*?)(\d+)(\.\w+)", name) for name in names]
    parts = [(match[1], match[3], len(match[2]), int(match[2])) for match in found if match]
    head, tail, width, low = parts[0] if parts else ("", "", 0, 0)
    if parts != [(head, tail, width, low + i) for i in range(len(names))]:
        return None
    return f"{head}{{{low:0{width}d}..{low + len(names) - 1:0{width}d}}}{tail}"
