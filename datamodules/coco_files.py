"""COCO's published files of instances: read once, checked, and turned into what shards hold.

What COCO itself has is no fault: crowds, images without annotations, annotations of area 0 or beyond their image (not
trained on, see :func:`~datamodules.instance_annotations.trainable`). Whatever else is not as it should be is named.
"""

import json
import marshal
import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pycocotools import mask as run_length

from datamodules.instance_annotations import annotation
from datamodules.samples import ShardError
from datamodules.tally import Tally, some
from datamodules.tree_samples import Policy

FIELDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "images": {"id": int, "file_name": str, "width": int, "height": int},
    "categories": {"id": int, "name": str},
    "annotations": {
        "id": int, "image_id": int, "category_id": int, "bbox": list, "area": (int, float), "iscrowd": int,
        "segmentation": (list, dict),
    },
}  # fmt: skip
"""What entries must have, of the kind that they have in COCO."""


class InstanceFile(NamedTuple):
    """What a file says."""

    images: list[dict[str, Any]]
    categories: list[dict[str, Any]]
    """``id`` and ``name``, by id: their places are the labels."""
    packed: dict[int, list[bytes]]
    """Annotations by the image's id, in the file's order."""

    def annotations(self, image: int) -> list[dict[str, Any]]:
        """Of an image, as the file has them."""
        return [marshal.loads(one) for one in self.packed.get(image, [])]


def read_instances(path: Path, policy: Policy, tally: Tally) -> InstanceFile:
    """Reads a file such as ``instances_train2017.json``.

    Args:
        path: of the file.
        policy: whether annotations of images that it does not list stop it or are left out.
        tally: counts what is left out.

    Raises:
        ShardError: for what is no such file, or says something twice.
    """
    try:
        said = json.loads(path.read_text(encoding="utf-8-sig"), object_hook=_packed)
    except (OSError, ValueError) as error:
        raise ShardError(f"{path} is no JSON ({error}); fetch it again") from None
    images, found = _entries(path, said, "images"), _entries(path, said, "categories")
    categories = sorted(({key: one[key] for key in ("id", "name")} for one in found), key=lambda one: one["id"])
    for name, values in (
        ("images have the id", [one["id"] for one in images]),
        ("images have the file_name", [one["file_name"] for one in images]),
        ("categories have the id", [one["id"] for one in categories]),
        ("categories have the name", [one["name"] for one in categories]),
    ):
        _refuse_twice(path, name, values)
    ids: list[int] = []
    packed: dict[int, list[bytes]] = {image["id"]: [] for image in images}
    for number, one in enumerate(_list(path, said, "annotations")):
        entry = marshal.loads(one) if isinstance(one, bytes) else one
        _check_entry(path, "annotations", number, entry)
        ids.append(entry["id"])
        if entry["image_id"] in packed:
            packed[entry["image_id"]].append(one)
        elif policy == "strict":
            raise ShardError(
                f"{path}: annotation {entry['id']} is of image {entry['image_id']}, which is not among its images; "
                "correct it, or leave such annotations out by policy skip"
            )
        else:
            tally.add("annotations of images that are not listed, left out", entry["id"])
    _refuse_twice(path, "annotations have the id", ids)
    return InstanceFile(images, categories, packed)


def _packed(found: dict[str, Any]) -> Any:
    """Annotations in a few bytes as soon as they are read: as objects, COCO's 860,000 take several times the file."""
    if "image_id" not in found:
        return found
    return marshal.dumps({key: found[key] for key in FIELDS["annotations"] if key in found})


def _refuse_twice(path: Path, name: str, values: Sequence[Any]) -> None:
    if twice := [repr(value) for value, count in Counter(values).items() if count > 1]:
        raise ShardError(f"{path}: two {name} {twice[0]}; each must be the only one")


def _list(path: Path, said: Any, name: str) -> list[Any]:
    found = said.get(name) if isinstance(said, dict) else None
    if not isinstance(found, list):
        there = some([*map(repr, said)]) if isinstance(said, dict) else type(said).__name__
        raise ShardError(
            f"{path} has no list {name!r} (it has {there}); wanted a file of instances with {', '.join(FIELDS)}, such "
            "as instances_train2017.json"
        )
    return found


def _entries(path: Path, said: Any, name: str) -> list[dict[str, Any]]:
    found = _list(path, said, name)
    if not found:
        raise ShardError(f"{path}: {name!r} is empty")
    for number, entry in enumerate(found):
        _check_entry(path, name, number, entry)
    return found


def _check_entry(path: Path, name: str, number: int, entry: Any) -> None:
    for field, kind in FIELDS[name].items():
        if not isinstance(entry, dict) or field not in entry:
            raise ShardError(
                f"{path}: {name}[{number}] has no {field!r}; wanted {', '.join(FIELDS[name])}, as in a file of "
                "instances (not of captions, keypoints' results or panoptic segments)"
            )
        if not isinstance(entry[field], kind) or isinstance(entry[field], bool):
            raise ShardError(f"{path}: {name}[{number}] has the {field} {str(entry[field])[:40]!r} of a wrong kind")


def image_annotations(
    found: Sequence[dict[str, Any]], labels: Mapping[int, int], size: tuple[int, int], what: str
) -> list[dict[str, Any]]:
    """Annotations of one image as a shard holds them. ShardError for one that is not as it should be.

    Args:
        found: as the file has them.
        labels: category ids to labels.
        size: (W, H) of the image.
        what: how errors call the image.
    """
    written = []
    for one in found:
        name = f"{what}: annotation {one['id']}"
        if one["category_id"] not in labels:
            raise ShardError(f"{name} has the category {one['category_id']}, which is not among the file's categories")
        box = one["bbox"]
        if len(box) != 4 or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in box) or min(box[2:]) < 0:
            raise ShardError(f"{name} has the bbox {box}; wanted x, y, width and height in pixels")
        if not math.isfinite(one["area"]) or one["area"] < 0:
            raise ShardError(f"{name} has the area {one['area']}; wanted pixels, 0 or more")
        if one["iscrowd"] not in (0, 1):
            raise ShardError(f"{name} has iscrowd {one['iscrowd']}; allowed: 0, 1")
        rle = compressed(one["segmentation"], size, name)
        category = one["category_id"]
        written.append(annotation(one["id"], category, labels[category], box, one["area"], one["iscrowd"] == 1, rle))
    return written


def compressed(outline: Any, size: tuple[int, int], what: str) -> dict[str, Any]:
    """A ``segmentation`` (polygons, a run length of numbers, or a compressed one) as a compressed run length.

    Args:
        outline: as the file has it.
        size: (W, H) of the image.
        what: how errors call the annotation.

    Raises:
        ShardError: where it is none of these, or of another size.
    """
    width, height = size
    if isinstance(outline, list):
        polygons = [_numbers(polygon) for polygon in outline]
        if not polygons or any(
            len(numbers) < 6 or len(numbers) % 2 or not all(map(math.isfinite, numbers)) for numbers in polygons
        ):
            raise ShardError(f"{what} has a segmentation of no polygons; each needs three points, x and y, or more")
        return run_length.merge(run_length.frPyObjects(polygons, height, width))
    if outline.get("size") != [height, width]:
        raise ShardError(f"{what} has a run length of size {outline.get('size')}, the image is {[height, width]}")
    counts = outline.get("counts")
    runs = _runs(counts) if isinstance(counts, str) else counts
    if (
        not isinstance(runs, list)
        or not all(isinstance(run, int) and run >= 0 for run in runs)
        or sum(runs) != width * height
    ):
        raise ShardError(f"{what} has a run length whose runs do not add up to its {width} x {height} pixels")
    return run_length.frPyObjects({"size": [height, width], "counts": runs}, height, width)


def _numbers(values: Any) -> array:
    """A list of numbers; an empty one where it is something else."""
    try:
        return array("d", values)
    except TypeError:
        return array("d")


def _runs(text: str) -> list[int] | None:
    """The runs of a compressed run length; None where it is none, which pycocotools would read beyond its end.

    Numbers of five bits a character, the lowest first, from the third on as the difference to the last but one.
    """
    runs: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            return None
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (1 << shift) if bits & 16 else 0
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return None if shift else runs
