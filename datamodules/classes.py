"""One list of classes for all splits: names in the order of their numbers, in ``classes.json`` beside the shards."""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from datamodules.labels import synset_list
from datamodules.samples import ShardError
from datamodules.tally import some

CLASSES_FILE = "classes.json"
OTHERS = (".yaml", ".yml", ".csv", ".tsv", ".xml", ".pbtxt", ".xlsx")
"""Endings of files that hold more than names."""
HEADERS = ("class", "classes", "class_name", "class_names", "classname", "name", "names", "label", "labels", "category")
"""First lines, in lower case, that are none of the names."""
_SYNSET = re.compile(r"(n\d{8})[\s,]")


def read_classes(source: str | Path) -> list[str]:
    """A list of classes.

    Args:
        source: a JSON list of names, or object of names and numbers either way round (torchvision's ``class_to_idx``,
            ``id2label`` of Hugging Face, by itself or in a config.json, Keras' ``imagenet_class_index``); a text with
            one name a line, as ILSVRC's lists, where what follows a WordNet id is left out; or ``imagenet``, the 1,000
            WordNet ids in ILSVRC's order.

    Raises:
        ShardError: where it is none of these, or names a class twice.
    """
    if source == "imagenet":
        return synset_list("imagenet")
    path = Path(source).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ShardError(f"the list of classes {path} cannot be read ({error})") from None
    if path.suffix.lower() in OTHERS:
        raise ShardError(
            f"the list of classes {path} is {path.suffix}; wanted a text with one name a line in the order of their "
            "numbers, or JSON"
        )
    names = _from_json(text, path) if path.suffix.lower() == ".json" else _from_lines(text, path)
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice or not names or "" in names:
        found = f"it names {some([*map(repr, twice)])} twice" if twice else "it has none, or an empty name"
        raise ShardError(f"the list of classes {path}: {found}; wanted each class once, in the order of their numbers")
    return names


def _from_json(text: str, path: Path) -> list[str]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ShardError(f"the list of classes {path} is no JSON ({error})") from None
    if isinstance(found, dict):
        inner = [found[key] for key in ("classes", "names", "id2label") if isinstance(found.get(key), list | dict)]
        found = inner[0] if inner else found
    if isinstance(found, dict) and sorted(found) == sorted(map(str, range(len(found)))):
        names = [found[str(number)] for number in range(len(found))]
        # Keras has the WordNet id and a name for each
        found = [name[0] if isinstance(name, list) and len(name) == 2 else name for name in names]
    if isinstance(found, dict) and sorted(map(repr, found.values())) == sorted(map(repr, range(len(found)))):
        found = sorted(found, key=found.__getitem__)  # as torchvision's class_to_idx
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ShardError(
            f"the list of classes {path} is no JSON list of names, nor names with the numbers 0, 1, …, nor the other "
            "way round"
        )
    return found


def _from_lines(text: str, path: Path) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    if commented := next((line for line in lines if line.startswith(("#", "//"))), None):
        raise ShardError(
            f"the list of classes {path}: {commented!r} would be a class; wanted one name a line and nothing else, so "
            "take comments out, or write JSON, which can hold such a name"
        )
    if lines and lines[0].lower() in HEADERS and len(lines) > 1:
        raise ShardError(
            f"the list of classes {path}: its first line, {lines[0]!r}, looks like a header and would be class 0; take "
            "it out, or write JSON, which can hold such a name"
        )
    while lines and not lines[-1]:
        lines.pop()
    return [match[1] if (match := _SYNSET.match(line)) else line for line in lines]


def folder_classes(folders: Sequence[Path]) -> list[str] | None:
    """The list in some shards' folders; None where none has one. ShardError where they differ."""
    lists = {folder: read_classes(folder / CLASSES_FILE) for folder in dict.fromkeys(folders)
             if (folder / CLASSES_FILE).is_file()}  # fmt: skip
    first = next(iter(lists), None)
    for folder, names in lists.items():
        if first is not None and (difference := differ(lists[first], names)):
            raise ShardError(f"{first / CLASSES_FILE} and {folder / CLASSES_FILE} {difference}")
    return None if first is None else lists[first]


def differ(one: Sequence[str], other: Sequence[str]) -> str | None:
    """How two lists of classes differ, for a message; None where they are the same."""
    if list(one) == list(other):
        return None
    at, (a, b) = next((i, pair) for i, pair in enumerate(zip_longest(one, other)) if pair[0] != pair[1])
    return (
        f"differ: {len(one)} classes and {len(other)}, and number {at} is {a!r} in the one and {b!r} in the other; "
        "write both splits with one list, by --classes of python -m datamodules.prepare"
    )


def numbers_of(names: Sequence[str], classes: Sequence[str], source: str) -> dict[str, int]:
    """The numbers that a list of classes gives to class folders.

    Args:
        names: of the folders.
        classes: the list.
        source: where it comes from, for messages.

    Raises:
        ShardError: for folders that are not in the list, naming them.
    """
    place = {name: number for number, name in enumerate(classes)}
    if unknown := [name for name in names if name not in place]:
        alike = {_plain(name): name for name in classes}
        near = alike.get(_plain(unknown[0]))
        meant = f"; {unknown[0]!r} is spelt unlike {near!r} of the list" if near else ""
        raise ShardError(
            f"{len(unknown)} of {len(names)} class folders are not in the list of classes {source}: "
            f"{some([*map(repr, unknown)])}{meant}; correct their names, or give the list with all classes by --classes"
        )
    return {name: place[name] for name in names}


def alike_names(names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of names that differ in case, in outer spaces or in how accents are encoded, and in nothing else."""
    seen: dict[str, str] = {}
    return [(seen[plain], name) for name in names if (seen.setdefault(plain := _plain(name), name)) != name]


def _plain(name: str) -> str:
    return unicodedata.normalize("NFC", name).strip().casefold()


def summary(counts: Mapping[int, int], classes: Sequence[str]) -> list[str]:
    """Lines about a split's samples by class: how many classes have some, and the names of those that have none."""
    missing = [name for number, name in enumerate(classes) if not counts.get(number)]
    least, most = min(counts.values(), default=0), max(counts.values(), default=0)
    lines = [f"{len(counts)} of {len(classes)} classes have images, {least} to {most} each"]
    if missing:
        lines.append(
            f"classes without an image here, which keep their numbers: {len(missing)} ({some([*map(repr, missing)])})"
        )
    return lines
