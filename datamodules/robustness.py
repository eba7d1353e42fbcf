"""Test sets that share ImageNet's classes: V2, Sketch, A, R, ReaL, and any of their kind."""

from dataclasses import dataclass
from pathlib import Path

from datamodules.dataset import Policy
from datamodules.image_tree import ImageTree
from datamodules.labels import subset_classes
from datamodules.samples import ShardError, Source
from datamodules.shard_datamodule import ShardDataModule, Split
from datamodules.shards import ShardSet
from datamodules.transforms import AnswersTransform


@dataclass
class RobustnessSet:
    """One test set.

    Args:
        path: below the root: a tree CLASS/IMAGE as published, or shards (a pattern that ends in ``.tar``).
        classes: what an answer is sought among: ``all``, ``imagenet_a``, ``imagenet_r``, or class numbers.
        labels: instead of one class an image, the label lists of the ILSVRC validation images in their order:
            ``imagenet_real``, or a JSON file. Images with an empty list take no part.
        synsets: what class folders that are no numbers stand for: ``imagenet``, or a file with one name a line.
    """

    path: str
    classes: str | list[int] = "all"
    labels: str | None = None
    synsets: str = "imagenet"


class RobustnessDataModule(ShardDataModule):
    """One evaluation loader for each set, in the order listed; batches hold ``image`` and ``answers``.

    Args:
        root: folder that holds the sets.
        sets: name to set.
        batch_size: images per step over all devices.
        num_workers: loading processes per device and set.
        resize, crop: of the evaluation transform.
        policy: what to do with bad samples: ``strict`` stops and names them, ``skip`` leaves them out and counts.
        prefetch: batches each worker prepares ahead.
        mean, std: for normalisation; see ShardDataModule.
    """

    def __init__(
        self,
        root: str,
        sets: dict[str, RobustnessSet],
        batch_size: int = 256,
        num_workers: int = 8,
        resize: int = 256,
        crop: int = 224,
        policy: Policy = "strict",
        prefetch: int = 4,
        mean: tuple[float, float, float] | None = None,
        std: tuple[float, float, float] | None = None,
    ) -> None:
        if not sets:
            raise ValueError("data.init_args.sets is empty; list at least one, name: {path: folder or shards}")
        super().__init__(
            root,
            val={name: Split(one.path, AnswersTransform(resize, crop, one.labels)) for name, one in sets.items()},
            batch_size=batch_size,
            num_workers=num_workers,
            policy=policy,
            prefetch=prefetch,
            mean=mean,
            std=std,
        )
        self.sets = sets
        self.classes = {name: subset_classes(one.classes) for name, one in sets.items()}

    def _size_key(self, split: str, option: str) -> str:
        return option

    def _find(self, split: str) -> Source:
        """Shards, or a tree. ShardError where the folder is missing or holds something else."""
        name = split.removeprefix("val.")
        path, root = self.sets[name].path, Path(self.root).expanduser()
        if path.endswith(".tar"):
            folder, _, pattern = path.rpartition("/")
            return ShardSet.find(root / folder, pattern, f"sets.{name}.path")
        if not (root / path).is_dir():
            raise ShardError(
                f"data.init_args.sets.{name}: no folder {root / path}; unpack the set there, change the path, or leave "
                "the set out"
            )
        return ImageTree(root / path, self.sets[name].synsets)
