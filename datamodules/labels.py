"""Which ImageNet-1k class a folder, or an image of the validation set, stands for.

ImageNet-V2's folders are class numbers, and sorted as text they come in another order. ImageNet-Sketch, -A and -R have
WordNet ids; A and R hold 200 classes each, whose places among the thousand are in timm's lists.
"""

import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from datamodules.samples import ShardError

SUBSETS = ("imagenet_a", "imagenet_r")
REAL = "imagenet_real"
_ILSVRC = re.compile(r"ILSVRC2012_val_(\d{8})")


def _timm_lines(name: str) -> list[str]:
    return files("timm.data").joinpath("_info", name).read_text(encoding="utf-8").split()


def synset_list(source: str) -> list[str]:
    """Folder names in the order of their classes: ``imagenet`` (timm's list of 1,000), or a file with one a line."""
    if source == "imagenet":
        return _timm_lines("imagenet_synsets.txt")
    path = Path(source).expanduser()
    if not path.is_file():
        raise ShardError(f"no list of class folders at {path}; write one name a line, in the order of the classes")
    return path.read_text(encoding="utf-8-sig").splitlines()


def folder_labels(names: Sequence[str], synsets: str = "imagenet") -> dict[str, int]:
    """Class folders to class numbers: numbers as they are, other names by their line in ``synsets``.

    Raises:
        ShardError: for a name that is neither, saying which.
    """
    if all(name.isdecimal() for name in names):
        return {name: int(name) for name in names}
    place = {name: i for i, name in enumerate(synset_list(synsets))}
    unknown = sorted(set(names) - set(place))
    if unknown:
        raise ShardError(
            f"{len(unknown)} of {len(names)} class folders are neither numbers nor in the list {synsets!r}, the first: "
            f"{unknown[0]}"
        )
    return {name: place[name] for name in names}


def subset_classes(classes: str | Sequence[int]) -> list[int] | None:
    """The classes an answer is sought among: None for all, or numbers, ``imagenet_a`` and ``imagenet_r`` as timm's."""
    if classes == "all":
        return None
    if isinstance(classes, str):
        if classes not in SUBSETS:
            raise ValueError(f"classes={classes!r}; allowed are all, {', '.join(SUBSETS)}, or a list of class numbers")
        return [int(i) for i in _timm_lines(f"{classes}_indices.txt")]
    if not classes or len(set(classes)) < len(classes) or min(classes) < 0:
        raise ValueError(f"classes={list(classes)}: wanted different class numbers, at least one")
    return list(classes)


def validation_labels(source: str) -> list[list[int]]:
    """Label lists of the ILSVRC validation images in their order: ``imagenet_real`` (ReaL, timm's copy), or a file."""
    if source == REAL:
        return json.loads(files("timm.data").joinpath("_info", "imagenet_real_labels.json").read_text(encoding="utf-8"))
    path = Path(source).expanduser()
    try:
        return [[int(label) for label in labels] for labels in json.loads(path.read_text(encoding="utf-8-sig"))]
    except (OSError, ValueError, TypeError) as error:
        raise ShardError(f"{path} is no JSON list of label lists ({type(error).__name__}: {error})") from None


def validation_number(name: str) -> int:
    """The place of ``…ILSVRC2012_val_00000001…`` in the validation order, from 0. ShardError for other names."""
    found = _ILSVRC.search(name)
    if found is None:
        raise ShardError(f"{name!r} does not name an image ILSVRC2012_val_00000001 …, by which its labels are found")
    return int(found[1]) - 1
