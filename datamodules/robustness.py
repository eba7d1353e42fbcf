"""Test sets that share ImageNet's classes: V2, Sketch, A, R, ReaL, and any of their kind."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.image_tree import ImageTree
from datamodules.imagenet import IMAGENET_MEAN, IMAGENET_STD, ImageNetDataModule, _evaluation_plan
from datamodules.labels import subset_classes, validation_labels, validation_number
from datamodules.samples import RawSample, ShardError, Source
from datamodules.shards import ShardSet
from datamodules.stream import EvalView, ShardDataset, ShardLoader, Space


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


class AnswersView(EvalView):
    """``image`` under the evaluation transform, and ``answers`` (A): the classes that are right, padded with -1.

    Args:
        labels: lists in validation order, or None for the sample's own class.
        width: A.
    """

    def __init__(self, transform: Any, labels: list[list[int]] | None) -> None:
        super().__init__(transform)
        self.fields = tuple(field for field in (*self.fields, "json") if field != "mask.png")
        self.labels = labels
        self.width = 1 if labels is None else max(1, max(map(len, labels), default=1))

    def __call__(self, raw: RawSample, seed: int, epoch: int, index: int, space: Space, row: int) -> dict[str, Any]:
        sample = super().__call__(raw, seed, epoch, index, space, row)
        right = [sample["label"]]
        if self.labels is not None:
            number = validation_number(f"{raw.key} {raw.fields.get('json', b'').decode(errors='replace')}")
            if number >= len(self.labels):
                raise ShardError(f"{raw.name} is image {number + 1}; there are labels for {len(self.labels)}")
            right = self.labels[number]
        return sample | {"answers": np.array(right + [-1] * (self.width - len(right)), dtype=np.int64)}

    def empty(self) -> dict[str, Any]:
        batch = super().empty()
        return batch | {"answers": batch["label"].new_empty(0, self.width)}


class RobustnessDataModule(ImageNetDataModule):
    """One evaluation loader for each set, in the order listed; batches hold ``image`` and ``answers``.

    Args:
        root: folder that holds the sets.
        sets: name to set.
        batch_size: images per step over all devices.
        num_workers: loading processes per device and set.
        resize, crop: of the evaluation transform.
        policy: what to do with bad samples: ``strict`` stops and names them, ``skip`` leaves them out and counts.
        prefetch: batches each worker prepares ahead.
        mean, std: for normalisation.
    """

    def __init__(
        self,
        root: str,
        sets: dict[str, RobustnessSet],
        batch_size: int = 256,
        num_workers: int = 8,
        resize: int = 256,
        crop: int = 224,
        policy: Literal["strict", "skip"] = "strict",
        prefetch: int = 4,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
    ) -> None:
        super().__init__(
            root=root, batch_size=batch_size, num_workers=num_workers, resize=resize, crop=crop, policy=policy,
            prefetch=prefetch, mean=mean, std=std,
        )  # fmt: skip
        if not sets:
            raise ValueError("data.init_args.sets is empty; list at least one, name: {path: folder or shards}")
        self.sets = sets
        self.classes = {name: subset_classes(spec.classes) for name, spec in sets.items()}
        self._sources: dict[str, Source] = {}

    def source(self, name: str) -> Source:
        """Where a set's samples are. ShardError where its folder is missing or holds something else."""
        if name not in self._sources:
            spec, root = self.sets[name], Path(self.root).expanduser()
            if spec.path.endswith(".tar"):
                folder, _, pattern = spec.path.rpartition("/")
                self._sources[name] = ShardSet.find(root / folder, pattern, f"sets.{name}.path")
            elif not (root / spec.path).is_dir():
                raise ShardError(
                    f"data.init_args.sets.{name}: no folder {root / spec.path}; unpack the set there, change the path, "
                    "or leave the set out"
                )
            else:
                self._sources[name] = ImageTree(root / spec.path, spec.synsets)
        return self._sources[name]

    def prepare_data(self) -> None:
        for name in self.sets:
            self.source(name)

    @property
    def shard_files(self) -> list[str]:
        return [str(path) for source in self._sources.values() for path in source.paths]

    def val_dataloader(self) -> list[ShardLoader]:
        assert self.trainer is not None
        rank, world = self.trainer.global_rank, self.trainer.world_size
        loaders = []
        for name, spec in self.sets.items():
            source = self.source(name)
            view = AnswersView(self.transform, None if spec.labels is None else validation_labels(spec.labels))
            plan = partial(_evaluation_plan, source, max(1, self.batch_size // world), rank, world)
            loaders.append(self._loader(ShardDataset(source, view, plan, self.seed, self.policy)))
        return loaders

    def test_dataloader(self) -> list[ShardLoader]:
        return self.val_dataloader()
