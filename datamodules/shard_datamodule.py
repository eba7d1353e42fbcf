"""A DataModule made of splits: where samples are, and what batches show of them."""

import copy
import logging
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from datamodules.dataset import Policy, ShardDataset
from datamodules.image_tree import ImageFolder
from datamodules.loaders import ResumableLoader, ShardLoader
from datamodules.masks import odd_ids
from datamodules.normalisation import NormalizesImages, check_normalisation
from datamodules.position import Position, TrainerPosition
from datamodules.remote import is_remote
from datamodules.samples import ARRAY_FIELD, IMAGE_FIELDS, Source
from datamodules.shards import ShardSet
from datamodules.span_plan import EvaluationPlan, TrainPlan
from datamodules.split_checks import (
    check_channels,
    check_classes,
    check_images,
    check_labels,
    check_records,
    check_sizes,
    colours_left_out,
    common_format,
    refuse_labels,
)
from datamodules.transforms import Transform, finish_images, normalize

logger = logging.getLogger(__name__)

Stage = Literal["train", "val", "test", "predict"]


@dataclass
class Split:
    """Samples, and what batches show of them.

    Args:
        shards: a glob (or {0000..1023} ranges) of shard names in the data module's root, where ``*`` stops at a folder
            and ``**/`` goes into all; or a folder there, such as ``.``, whose images are read as they are, without
            classes; or where the samples are, such as a ShardSet or an ImageTree.
        transform: what batches show.
    """

    shards: str | Source
    transform: Transform


class LoaderWrap(Protocol):
    """What a model may put in the place of a loader, such as features that it made of the images once."""

    def __call__(self, split: str, loader: ShardLoader, batch_size: int, position: Position) -> Iterable[Any]:
        """Wraps a loader.

        Args:
            split: ``train`` or ``val``.
            loader: every sample of the split over all ranks once, in order, under the evaluation transform.
            batch_size: samples that a batch of this process should hold.
            position: of the run.
        """
        ...


class ShardDataModule(NormalizesImages, LightningDataModule):
    """Samples in shards under any transforms; with a Trainer, or by itself in a notebook or a test.

    Every training sample is seen at most once an epoch, every evaluation sample exactly once, whatever the number of
    devices, workers and shards. Images leave the workers as uint8 and are normalised on the device. Batches are dicts
    with ``key``, ``shard``, ``skipped``, ``split``, and what the split's transform makes.

    Args:
        root: folder with the shards, or where they are fetched from: a URL, or ``pipe:`` and a command with ``{name}``.
        train: what is trained on; None for nothing.
        val: what is validated on; several by name are as many loaders, in this order.
        test: what is tested on; None for the same as ``val``.
        predict: what is predicted; None for the same as ``val``.
        batch_size: samples per optimiser step over all devices and accumulated batches.
        num_workers: loading processes per device.
        seed: of order and augmentation; None takes seed_everything's.
        policy: what to do with bad samples: ``strict`` stops and names them, ``skip`` leaves them out and counts.
        shuffle_window: training samples shuffled together inside a rank's span.
        prefetch: batches each worker prepares ahead.
        mean, std: for normalisation, a value for each channel; None takes what the backbone's weights were trained
            with, where they say so (``backbone.pixels``), else ImageNet's for ordinary images, and for others what
            ``python -m datamodules.prepare`` recorded with the training split's shards.
        cache_dir, cache_gib: where shards from a URL are kept on each node, and how much of each URL's.

    Attributes:
        position: where the run stands: the Trainer's, where there is one; else what was set, else the first epoch's
            start in a single process.
        skipped: samples of this process left out so far.
    """

    def __init__(
        self,
        root: str = ".",
        train: Split | None = None,
        val: Split | dict[str, Split] | None = None,
        test: Split | dict[str, Split] | None = None,
        predict: Split | dict[str, Split] | None = None,
        batch_size: int = 256,
        num_workers: int = 8,
        seed: int | None = None,
        policy: Policy = "strict",
        shuffle_window: int = 2048,
        prefetch: int = 4,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        cache_dir: str | None = None,
        cache_gib: float = 200.0,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"data.init_args.batch_size={batch_size} must be positive")
        self.root, self.batch_size, self.num_workers, self.prefetch = root, batch_size, num_workers, prefetch
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.policy: Policy = policy
        self.shuffle_window, self._mean, self._std = shuffle_window, mean, std
        self.cache_dir, self.cache_gib = cache_dir, cache_gib
        self.skipped = 0
        self.splits: dict[str, Split] = {}
        self._stages = {
            stage: self._add(stage, of)
            for stage, of in (("train", train), ("val", val), ("test", test), ("predict", predict))
        }
        self.pixels = common_format({name: split.transform.pixels for name, split in self.splits.items()})
        check_normalisation(mean, std, self.pixels)
        self._position: Position | None = None
        self._masks_looked_at = False
        self._sources: dict[str, Source] = {}
        self._found: dict[str, Source] = {}

    def _add(self, stage: str, of: Split | dict[str, Split] | None) -> list[str]:
        """Names of a stage's splits: where each stands in the configuration."""
        named = (
            {} if of is None else {stage: of} if isinstance(of, Split) else {f"{stage}.{k}": s for k, s in of.items()}
        )
        self.splits |= named
        return list(named)

    def __str__(self) -> str:
        """The splits. Lightning's own would read a batch of each."""
        splits = [f"  {name}: {s.shards}, {type(s.transform).__name__}" for name, s in self.splits.items()]
        return "\n".join([f"{type(self).__name__}({self.root})", *splits])

    # ---- what images consist of ---------------------------------------------------------------------------

    def _check_format(self) -> None:
        """ValueError where shards in use are known to hold other images, or the model takes other channels or
        sizes."""
        splits = {name: self.splits[name] for name in self._in_use()}
        check_records([split.shards for split in splits.values()], self._info, self.root, self.pixels)
        module = None if self.trainer is None else self.trainer.lightning_module
        backbone = getattr(module, "backbone", None)
        check_channels(getattr(backbone, "in_chans", None), self.in_chans)
        if backbone is not None and hasattr(backbone, "check_size"):
            for name, split in splits.items():
                check_sizes(backbone, {self._size_key(name, key): side for key, side in split.transform.sizes.items()})
        if "train" in splits and (text := colours_left_out(splits["train"].transform)):
            rank_zero_info(text)

    def image_size(self, stage: Stage) -> int | None:
        """Side of the images that a stage's first split shows, of the global views where there are several; None where
        its transform does not say."""
        split = next(iter(self._stages[stage]), None)
        return None if split is None else getattr(self.splits[split].transform, "size", None)

    # ---- where and how much -------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Where the run stands."""
        if self.trainer is not None:
            return TrainerPosition(self.trainer)
        return Position() if self._position is None else self._position

    @position.setter
    def position(self, position: Position) -> None:
        self._position = position

    def source(self, split: str) -> Source:
        """Where a split's samples are. ShardError where they cannot be found."""
        if split not in self._sources:
            self._sources[split] = self._find(split)
        return self._sources[split]

    def _find(self, split: str) -> Source:
        shards = self.splits[split].shards
        if not isinstance(shards, str):
            return shards
        if shards not in self._found:  # splits may share them
            if is_remote(self.root):
                self._found[shards] = ShardSet.find_remote(self._cache, shards, self._option(split))
            elif shards and (Path(self.root).expanduser() / shards).is_dir():
                self._found[shards] = ImageFolder(
                    Path(self.root).expanduser() / shards, self._option(split), self.pixels
                )
            else:
                self._found[shards] = ShardSet.find(Path(self.root), shards, self._option(split))
        return self._found[shards]

    def _option(self, split: str) -> str:
        """The configuration key of a split's shards."""
        return f"{split}.shards"

    def _size_key(self, split: str, option: str) -> str:
        """The configuration key of a size that a split's transform has."""
        return f"{split}.transform.init_args.{option}"

    def prepare_data(self) -> None:
        """Counts the samples once per node, before the other processes ask."""
        for split in self._in_use():
            self.source(split)

    def _in_use(self) -> list[str]:
        """Splits that the Trainer's command reads; all without one."""
        command = getattr(getattr(self.trainer, "state", None), "fn", None)
        if command is None:
            return list(self.splits)
        stages: dict[str, list[Stage]] = {"fit": ["train", "val"], "validate": ["val"]}
        named = stages.get(str(command.value), [command.value] if self._stages.get(command.value) else ["val"])
        return [split for stage in named for split in self._stages[stage]]

    def setup(self, stage: str) -> None:
        """Holds what is known of the splits' classes against each other and the model, before the first step.

        ValueError where lists of classes differ, or the model needs classes that there are not or has fewer.
        """
        module = None if self.trainer is None else self.trainer.lightning_module
        if module is None:
            return
        splits, count = self._in_use(), getattr(module, "label_count", None)
        self._check_format()
        check_classes({self._option(split): self.source(split) for split in splits})
        for split in splits:
            transform, known = self.splits[split].transform, self.source(split).labels
            if {*IMAGE_FIELDS, ARRAY_FIELD} & {*transform.fields}:
                check_images(self.source(split), self._option(split), self.policy == "strict")
            if stage == "predict" or not transform.labels_required:
                if known is not None and known.unreadable:
                    rank_zero_info(
                        f"data.init_args.{self._option(split)}: the class of {known.unreadable} samples is no number "
                        f"({known.example}) and counts as none"
                    )
                continue
            if getattr(module, "needs_labels", True):
                check_labels(self.source(split), self._option(split), count, self.policy == "strict")
            elif self._unlabelled(split):
                rank_zero_info(f"data.init_args.{self._option(split)}: no sample has a class, so none is scored")
            else:
                check_labels(self.source(split), self._option(split), None, self.policy == "strict")
        names = self.class_names
        if stage == "fit" and names and count and count > len(names):
            rank_zero_info(f"model.init_args.num_classes is {count}; the data name {len(names)} classes")
        if stage == "fit" and not self._stages["val"]:
            rank_zero_info("no validation split: no score, no best.ckpt, no pictures of maps")

    @property
    def _predicting(self) -> bool:
        return bool(getattr(self.trainer, "predicting", False))

    def _unlabelled(self, split: str) -> bool:
        """Whether, as far as is known, no sample of a split has a class."""
        labels = self.source(split).labels
        return labels is not None and labels.samples > 0 and not labels.labelled

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes in the order of their numbers, from the first source in use that knows them."""
        found = (source.classes for source in self._sources.values())
        return next((list(names) for names in found if names is not None), None)

    @property
    def shard_files(self) -> list[str]:
        """Every shard in use, for the run's record."""
        return list(dict.fromkeys(str(path) for source in self._sources.values() for path in source.paths))

    @property
    def device_batch_size(self) -> int:
        """Training samples per device and batch. ValueError where the global batch does not split evenly."""
        position = self.position
        world, accumulate = position.world_size, position.accumulate
        if self.batch_size % (world * accumulate):
            raise ValueError(
                f"data.init_args.batch_size={self.batch_size} does not divide evenly over {world} devices x "
                f"accumulate_grad_batches={accumulate}; choose a multiple of {world * accumulate}"
            )
        return self.batch_size // (world * accumulate)

    # ---- loaders ------------------------------------------------------------------------------------------

    def train_dataloader(self) -> Iterable[Any]:
        """Batches of ``device_batch_size``. ValueError where there is no split to train on, or it is too small."""
        if not self._stages["train"]:
            raise ValueError("data.init_args.train is not set: there is nothing to train on")
        source, position, batch = self.source("train"), self.position, self.device_batch_size
        plan = TrainPlan(source, batch, position.rank, position.world_size, self.seed, self.shuffle_window)
        dataset = ShardDataset(source, self.splits["train"].transform, plan, self.seed, self.policy)
        return ResumableLoader(dataset, position, batch, self.num_workers, self.prefetch)

    def val_dataloader(self) -> Any:
        """A loader; a list of them where the splits have names."""
        return self._evaluation("val")

    def test_dataloader(self) -> Any:
        """Those of ``val`` where nothing else was given."""
        return self._evaluation("test") if self._stages["test"] else self.val_dataloader()

    def predict_dataloader(self) -> Any:
        """Those of ``val`` where nothing else was given."""
        # batches name their samples by key, so nobody asks Lightning for their numbers
        warnings.filterwarnings("ignore", f"Couldn't infer the batch indices.*{ShardLoader.__name__}")
        return self._evaluation("predict" if self._stages["predict"] else "val", labels_required=False)

    def _evaluation(self, stage: Stage, labels_required: bool = True) -> ShardLoader | list[ShardLoader]:
        loaders = [self._evaluation_loader(split, True, labels_required) for split in self._stages[stage]]
        if not loaders:
            warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
        return loaders[0] if self._stages[stage] == [stage] else loaders

    def _evaluation_loader(self, split: str, persistent: bool = True, labels_required: bool = True) -> ShardLoader:
        source, position, transform = self.source(split), self.position, self.splits[split].transform
        module = None if self.trainer is None else self.trainer.lightning_module
        if transform.labels_required and (
            not labels_required or (not getattr(module, "needs_labels", True) and self._unlabelled(split))
        ):
            transform = copy.copy(transform)
            transform.labels_required = False
        plan = EvaluationPlan(source, self._evaluation_batch(position), position.rank, position.world_size)
        dataset = ShardDataset(source, transform, plan, self.seed, self.policy, split, may_be_empty=True)
        return ShardLoader(dataset, self.num_workers, self.prefetch, position.pin_memory, persistent)

    def _evaluation_batch(self, position: Position) -> int:
        """Evaluation samples per device and batch."""
        return max(1, self.batch_size // position.world_size)

    # ---- on the device ------------------------------------------------------------------------------------

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The batch. ValueError for a class that the model has not, while that costs no wait for a device."""
        module = None if self.trainer is None else self.trainer.lightning_module
        count, labels = getattr(module, "label_count", None), batch.get("label") if isinstance(batch, dict) else None
        if count is not None and isinstance(labels, Tensor) and len(labels) and not self._predicting:
            wrong = next((i for i, label in enumerate(labels.tolist()) if not 0 <= label < count), None)
            if wrong is not None:
                where = f"sample {batch.get('key', [''])[wrong]!r} in shard {batch.get('shard', [''])[wrong]}"
                refuse_labels(int(labels.min()), int(labels.max()), count, where)
        if not self._masks_looked_at and isinstance(batch, dict) and len(masks := batch.get("mask", ())):
            self._masks_looked_at = True
            ignored = getattr(module, "ignore_index", -1)
            odd = next((odd for mask in masks if (odd := odd_ids(mask[mask != ignored].numpy()))), None)
            if odd is not None:
                rank_zero_warn(f"data: there are masks {odd}")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """What the split's transform still does on the device: images to normalised floats in the model's dtype.

        Without a Trainer that is float32. Batches that come from elsewhere, and so name no split, have their ``image``
        and ``crops`` normalised.
        """
        if batch.get("skipped"):
            self.skipped += len(batch["skipped"])
            logger.warning("left out %d samples so far, the last: %s", self.skipped, batch["skipped"][-1])
        module = None if self.trainer is None else self.trainer.lightning_module
        dtype = torch.float32 if module is None else next((p.dtype for p in module.parameters()), torch.float32)

        def normalized(image: Tensor) -> Tensor:
            return normalize(image, self.mean, self.std, dtype, self.pixels.scale)

        split = self.splits.get(batch.get("split", ""))
        return (
            finish_images(batch, normalized, raw=self.pixels.buffer)
            if split is None
            else split.transform.finish(batch, normalized)
        )
