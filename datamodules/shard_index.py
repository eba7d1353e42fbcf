"""What a tar holds, by its headers: samples, and by name what is none.

Tars that were joined (``cat a.tar b.tar``) are read one after the other, where other readers stop at the end of the
first. A key that stands several times with the same members is several samples, as for webdataset.
"""

import io
import os
import tarfile
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path
from typing import IO

from common.files import read_at
from datamodules.folders import is_litter
from datamodules.samples import ARRAY_FIELD, IMAGE_FIELDS, LARGEST, Labels, Sample, ShardError, labels_of, split_member
from datamodules.tally import SHOWN, Tally, some

CHUNK = 1 << 16
OTHERS = {
    b"\x1f\x8b": "is compressed by gzip, and samples are read at random: gunzip it first",
    b"BZh": "is compressed by bzip2, and samples are read at random: bunzip2 it first",
    b"\xfd7zXZ": "is compressed by xz, and samples are read at random: unxz it first",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd, and samples are read at random: unzstd it first",
    b"PK\x03\x04": "is a zip file; unpack it and write shards with python -m datamodules.prepare",
    b"version https://git-lfs": "is a pointer of Git LFS and not the file itself; fetch it with git lfs pull",
    b"<": "is a web page, such as a server answers instead of a file; fetch the shard again",
}
"""First bytes of what is taken for a tar, and what to do about it."""
MOST_WORDS = 8
"""Kinds of members that a sample may be thought to have."""
COMPRESSED = (".gz", ".tgz", ".bz2", ".tbz2", ".xz", ".txz", ".zst", ".tzst")
"""Endings of compressed tars."""


def index_shard(path: Path) -> list[Sample]:
    """The samples of a tar. ShardError where it is not a whole tar, or its samples cannot be told apart."""
    return scan_shard(path)[0]


def scan_shard(path: Path) -> tuple[list[Sample], Tally]:
    """The samples of a tar, and what in it is no sample or not a whole one; see :func:`index_shard`."""
    tars: list[list[Sample]] = []
    tally = Tally()
    try:
        # unbuffered: a header is 512 bytes, and what lies between two of them is not wanted
        with path.open("rb", buffering=0) as file:
            _refuse_other_kinds(file, path)
            start: int | None = 0
            while start is not None:
                if start:
                    tally.add("joined tars, of which other readers see the first alone", path.name)
                found, end = _one_tar(file, start, tally)
                tars.append(found)
                start = _goes_on(file, end)
    except FileNotFoundError:
        raise gone(path) from None
    except IsADirectoryError:
        raise ShardError(f"shard {path} is a folder; name the tars in it, or pack it again") from None
    except (tarfile.TarError, OSError) as error:
        raise ShardError(f"shard {path} is no whole tar ({error}); fetch or write it again") from None
    return [sample for found in tars for sample in _samples(found, path, tally)], tally


def describe(paths: Sequence[Path]) -> str:
    """What the first of some tars that is not empty holds, for a message: how many members of which endings."""
    for path in paths:
        with tarfile.open(path, "r:") as tar:
            names = [member.name for member in tar if not member.isdir()]
        if names:
            break
    else:
        return "they are empty"
    endings = Counter(Path(name).suffix.lower() or "no ending" for name in names)
    found = ", ".join(f"{count} of {ending}" for ending, count in endings.most_common(SHOWN))
    tars = "; they are tars themselves, as in ILSVRC's train set" if set(endings) <= {".tar"} else ""
    return f"{path.name} holds {len(names)} members, {found} ({some(names)}){tars}"


def shard_labels(path: Path, samples: list[Sample]) -> Labels:
    """Reads the classes of a tar's samples, and counts those without an image."""
    values: list[bytes | None] = []
    with path.open("rb", buffering=0) as file:
        for sample in samples:
            offset, size = sample.members.get("cls", (0, None))
            values.append(None if size is None else read_at(file.fileno(), min(size, LARGEST["cls"]), offset))
    return labels_of(values, sum(not _has_image(sample.members) for sample in samples))


def gone(path: Path) -> ShardError:
    """The error for a shard that is not there any more."""
    found = "is a link to nowhere" if path.is_symlink() else "is gone"
    return ShardError(f"shard {path} {found}; restore it or take it out of _info.json")


def _refuse_other_kinds(file: io.FileIO, path: Path) -> None:
    start = file.read(64)
    for magic, what in OTHERS.items():
        if start.lstrip().startswith(magic) if magic == b"<" else start.startswith(magic):
            raise ShardError(f"shard {path} {what}")


def _one_tar(file: IO[bytes], start: int, tally: Tally) -> tuple[list[Sample], int]:
    """Keys and members of the tar that begins at ``start``, as they follow each other, and where its headers end."""
    groups: list[Sample] = []
    current: dict[str, Sample] = {}
    size = os.fstat(file.fileno()).st_size
    file.seek(start)
    if start:  # tarfile would take what is no header for the end
        try:
            tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            raise tarfile.ReadError(f"from byte {start} of {size} on it is damaged, or no tar any more") from None
        file.seek(start)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            found = _key_and_field(member, tally)
            if member.offset_data + member.size > size and member.isreg():
                raise tarfile.ReadError("unexpected end of data")
            if found is None:
                continue
            key, field = found
            if key not in current or field in current[key].members:
                current[key] = Sample(key, {})
                groups.append(current[key])
            current[key].members[field] = (member.offset_data, member.size)
        end = tar.offset
    if end > size:
        raise tarfile.ReadError("unexpected end of data")
    if end == size and size:
        tally.add("tars without an end mark, maybe cut off; compare counts with the source's", Path(file.name).name)
    return groups, end


def _key_and_field(member: tarfile.TarInfo, tally: Tally) -> tuple[str, str] | None:
    """None, counted, for members that are read as nothing."""
    if member.isdir():
        return None
    if any(is_litter(part) for part in member.name.split("/") if part not in (".", "..")):
        tally.add("hidden or system files, left out", member.name)
    elif not member.isreg() or member.issparse():
        tally.add("links and the like, which hold no bytes of their own, left out", member.name)
    elif (found := split_member(member.name)) is None:
        tally.add("members whose endings say nothing here, left out", member.name)
    else:
        return found
    return None


def _goes_on(file: IO[bytes], end: int) -> int | None:
    """Where after its end a tar's file holds something other than zeros, in whole blocks; None for nowhere."""
    file.seek(end)
    at = end
    while data := file.read(CHUNK):
        zeros = len(data) - len(data.lstrip(b"\0"))
        if zeros < len(data):
            return (at + zeros) // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE
        at += len(data)
    return None


def _samples(groups: list[Sample], path: Path, tally: Tally) -> list[Sample]:
    """The samples among keys and their members, with a look at what is strange about them."""
    times = Counter(group.key for group in groups)
    _refuse_mixed_up({key for key, count in times.items() if count > 1}, groups, path)
    _refuse_several_images(groups, path)
    beside = _beside_images(groups)
    labelled = {group.key for group in groups if "cls" in group.members}
    of_images = any(field in group.members for group in groups for field in IMAGE_FIELDS)
    samples = []
    for key, members in groups:
        if of_images and members.keys() == {ARRAY_FIELD}:  # features, perhaps, which somebody keeps beside the images
            tally.add("arrays without an image among samples with one, left out", key)
            continue
        parent, dot, _ = key.rpartition(".")
        extends = dot and parent in times and "cls" not in members
        if extends and (parent in labelled or key in beside):
            tally.add("members that are neither image nor mask of their sample, left out", key)
            continue
        if extends:
            tally.add("keys that are another's and an ending, read as samples of their own", key)
        if times[key] > 1:
            tally.add("samples that share their key with another in the shard", key)
        images = [field for field in IMAGE_FIELDS if field in members]
        if not _has_image(members):
            tally.add("samples without an image", key)
        elif len(images) > 1:
            tally.add(f"samples with several images, of which the first of {', '.join(IMAGE_FIELDS)} is read", key)
        elif images and ARRAY_FIELD in members:
            tally.add("arrays (.npy) beside an image, read where in_chans and bits are declared for them", key)
        if labelled and "cls" not in members:
            tally.add("samples without a class, where others of the shard have one", key)
        samples.append(Sample(key, members))
    return samples


def _has_image(members: Container[str]) -> bool:
    return any(field in members for field in (*IMAGE_FIELDS, ARRAY_FIELD))


def _words_of(groups: list[Sample]) -> dict[str, dict[str, Sample]]:
    """Keys STEM.WORD, where WORD is no number, by stem and word."""
    found: dict[str, dict[str, Sample]] = {}
    for group in groups:
        stem, dot, word = group.key.rpartition(".")
        if dot and "/" not in word and not word.isdecimal():
            found.setdefault(stem, {})[word] = group
    return found


def _refuse_several_images(groups: list[Sample], path: Path) -> None:
    """ShardError where samples are STEM.rgb.png, STEM.depth.png and the like: several members of a sample, of which
    nothing says which is the image.

    That is taken for so where most stems have two or more of a few words, no image of their own, and not all of what
    the words name has a class; keys that end in a number, such as frames, are samples of their own.
    """
    own = {key for key, members in groups if _has_image(members)}
    stems = {stem: words for stem, words in _words_of(groups).items() if stem not in own}
    several = {stem: words for stem, words in stems.items() if len(words) > 1}
    names = sorted({word for words in several.values() for word in words})
    counted = sum(len(words) for words in several.values())
    complete = all("cls" in group.members for words in several.values() for group in words.values())
    if len(several) < 2 or len(names) > MOST_WORDS or complete or counted * 2 < len(groups):
        return
    stem = next(iter(several))
    members = [f"{group.key}.{field}" for group in several[stem].values() for field in group.members]
    raise ShardError(
        f"shard {path}: {len(several)} samples have several members that may be the image, {', '.join(names)} "
        f"({some(sorted(members))}); write it anew with the image as {stem}.png (or .jpg), its class as {stem}.cls, a "
        f"mask's ids as {stem}.mask.png, and without the others; or where each is an image of its own, without the "
        f"dot: {stem}_{names[0]}.png"
    )


def _beside_images(groups: list[Sample]) -> set[str]:
    """Keys that say something of another's image, such as STEM.seg beside STEM: most stems have them."""
    own = {key for key, members in groups if _has_image(members)}
    counts: Counter[str] = Counter()
    stems = {stem: words for stem, words in _words_of(groups).items() if stem in own}
    for words in stems.values():
        counts.update(words.keys())
    systematic = {word for word, count in counts.items() if count > 1 and 2 * count > len(own) - sum(counts.values())}
    return {
        group.key for words in stems.values() for word, group in words.items()
        if word in systematic and "cls" not in group.members
    }  # fmt: skip


def _refuse_mixed_up(repeated: set[str], groups: list[Sample], path: Path) -> None:
    """ShardError for keys that stand several times, where one cannot tell which members belong together."""
    kinds: dict[str, set[str]] = {}
    for key, members in groups:
        if key in repeated:
            kinds.setdefault(key, set()).add("+".join(sorted(members)))
    if mixed := sorted(key for key, found in kinds.items() if len(found) > 1):
        raise ShardError(
            f"shard {path}: {len(mixed)} keys stand several times with unlike members ({some([*map(repr, mixed)])}: "
            f"{', '.join(sorted(kinds[mixed[0]]))}), so which belong together cannot be told; give each sample a key "
            "of its own"
        )
