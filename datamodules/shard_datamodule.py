"""A DataModule made of splits: where samples are, and what batches show of them."""

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from datamodules.dataset import Policy, ShardDataset
from datamodules.loaders import ResumableLoader, ShardLoader
from datamodules.position import Position, TrainerPosition
from datamodules.remote import ShardCache, is_remote
from datamodules.samples import Source
from datamodules.shards import ShardSet
from datamodules.span_plan import EvaluationPlan, TrainPlan
from datamodules.transforms import Transform, finish_images, normalize

logger = logging.getLogger(__name__)

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Stage = Literal["train", "val", "test", "predict"]


@dataclass
class Split:
    """Samples, and what batches show of them.

    Args:
        shards: a glob (or {0000..1023} ranges) of shard names in the data module's root; or where the samples are, such
            as a ShardSet or an ImageTree.
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


class ShardDataModule(LightningDataModule):
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
        mean, std: for normalisation.
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
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
        cache_dir: str | None = None,
        cache_gib: float = 200.0,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"data.init_args.batch_size={batch_size} must be positive")
        self.root, self.batch_size, self.num_workers, self.prefetch = root, batch_size, num_workers, prefetch
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.policy: Policy = policy
        self.shuffle_window, self.mean, self.std = shuffle_window, mean, std
        self.cache_dir, self.cache_gib = cache_dir, cache_gib
        self.skipped = 0
        self.splits: dict[str, Split] = {}
        self._stages = {
            stage: self._add(stage, of)
            for stage, of in (("train", train), ("val", val), ("test", test), ("predict", predict))
        }
        self._position: Position | None = None
        self._sources: dict[str, Source] = {}
        self._found: dict[str, ShardSet] = {}

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
                folder = Path(self.cache_dir).expanduser() if self.cache_dir else None
                cache = ShardCache(self.root, folder, int(self.cache_gib * 2**30))
                self._found[shards] = ShardSet.find_remote(cache, shards, self._option(split))
            else:
                self._found[shards] = ShardSet.find(Path(self.root), shards, self._option(split))
        return self._found[shards]

    def _option(self, split: str) -> str:
        """The configuration key of a split's shards."""
        return f"{split}.shards"

    def prepare_data(self) -> None:
        """Counts the samples once per node, before the other processes ask."""
        for split in self.splits:
            self.source(split)

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
        return self._evaluation("predict" if self._stages["predict"] else "val")

    def _evaluation(self, stage: Stage) -> ShardLoader | list[ShardLoader]:
        loaders = [self._evaluation_loader(split) for split in self._stages[stage]]
        return loaders[0] if self._stages[stage] == [stage] else loaders

    def _evaluation_loader(self, split: str, persistent: bool = True) -> ShardLoader:
        source, position = self.source(split), self.position
        plan = EvaluationPlan(source, self._evaluation_batch(position), position.rank, position.world_size)
        dataset = ShardDataset(
            source, self.splits[split].transform, plan, self.seed, self.policy, split, may_be_empty=True
        )
        return ShardLoader(dataset, self.num_workers, self.prefetch, position.pin_memory, persistent)

    def _evaluation_batch(self, position: Position) -> int:
        """Evaluation samples per device and batch."""
        return max(1, self.batch_size // position.world_size)

    # ---- on the device ------------------------------------------------------------------------------------

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """What the split's transform still does on the device: uint8 images to floats in the model's dtype.

        Without a Trainer that is float32. Batches that come from elsewhere, and so name no split, have their ``image``
        and ``crops`` normalised.
        """
        if batch.get("skipped"):
            self.skipped += len(batch["skipped"])
            logger.warning("left out %d samples so far, the last: %s", self.skipped, batch["skipped"][-1])
        module = None if self.trainer is None else self.trainer.lightning_module
        dtype = torch.float32 if module is None else next((p.dtype for p in module.parameters()), torch.float32)

        def normalized(image: Tensor) -> Tensor:
            return normalize(image, self.mean, self.std, dtype)

        split = self.splits.get(batch.get("split", ""))
        return finish_images(batch, normalized) if split is None else split.transform.finish(batch, normalized)
