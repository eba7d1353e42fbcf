"""Names of folders that tell how a data set is laid out, where those of classes are expected."""

import re
from collections.abc import Sequence

from datamodules.tally import some

_SPLITS = {
    "train", "training", "trn", "val", "valid", "validation", "dev", "devel", "development", "eval", "evaluation",
    "test", "testing", "tst", "trainval", "minival", "holdout", "heldout", "unlabeled", "unlabelled", "unsup",
}  # fmt: skip
_IMAGES = {
    "image", "images", "img", "imgs", "jpegimages", "photo", "photos", "picture", "pictures", "input", "inputs", "rgb",
}  # fmt: skip
_NOTES = {
    "mask", "masks", "label", "labels", "annotation", "annotations", "segmentation", "segmentations",
    "segmentationclass", "segmentationobject", "gt", "groundtruth", "depth",
}  # fmt: skip
_BESIDE = {"set", "split", "data", "part", *_IMAGES}
"""Words that a split's name may have beside its own."""


def _words(name: str) -> list[str]:
    """In lower case, without years and numbers."""
    return [word for word in re.split(r"[\W_\d]+", name.lower()) if word]


def is_split(name: str) -> bool:
    """Whether a folder's name is a split's: train, val2017, test-images, unlabeled, trainset."""
    words = [word.removesuffix("set") for word in _words(name)]
    return any(word in _SPLITS for word in words) and {*words} <= _SPLITS | _BESIDE | {""}


def is_images(name: str) -> bool:
    """Whether a folder's name says that it holds images of any class: images, JPEGImages."""
    return "".join(_words(name)) in _IMAGES


def is_notes(name: str) -> bool:
    """Whether a folder's name says that it holds something about images: masks, labels, SegmentationClass."""
    return "".join(_words(name)) in _NOTES


def no_classes(names: Sequence[str]) -> str | None:
    """Why a tree's folders can be no classes, as it reads after "the folders of ROOT, …,", and what to do."""
    splits, images, notes = ([name for name in names if of(name)] for of in (is_split, is_images, is_notes))
    if images and notes:
        return (
            f"are images and what is known of them: {some(notes)} would become classes; masks are read by python -m "
            f"datamodules.prepare imagenet_s from SRC/SPLIT/CLASS and SRC/SPLIT-segmentation/CLASS; for images without "
            f"classes pass --src with {images[0]} and --unlabelled true"
        )
    if len(splits) == len(names):
        return f"are splits and no classes; take one of them by --src, such as {names[0]}"
    if len(splits) + len(images) + len(notes) == len(names):
        return f"are no classes; pass --unlabelled true, and --src with {(images or names)[0]} to read it alone"
    return None


def odd_among(names: Sequence[str]) -> list[str]:
    """Names of splits and the like among those of classes."""
    return [name for name in names if is_split(name) or is_images(name) or is_notes(name)]
