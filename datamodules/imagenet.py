"""ImageNet-1k (or anything of its kind) from WebDataset shards."""

import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule
from torch import Tensor

from datamodules.eval_transforms import EvalTransform
from datamodules.features import EncodedSplit, FeatureLoader, ShuffledFeatureLoader
from datamodules.multicrop import MultiCropConfig
from datamodules.remote import ShardCache, is_remote
from datamodules.samples import Source
from datamodules.shards import ShardSet
from datamodules.span_plan import EpochPlan, Part, evaluation_plan, rest_plan
from datamodules.stream import (
    EvalView,
    MultiCropView,
    ProbeView,
    ResumableLoader,
    ShardDataset,
    ShardLoader,
    View,
    normalize,
)

logger = logging.getLogger(__name__)

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageNetDataModule(LightningDataModule):
    """Labelled images in shards, as the tasks want to see them.

    Training batches hold ``crops`` (view ``multicrop``) or ``image`` (view ``probe``), with ``label`` and ``key``;
    evaluation batches hold ``image``, ``label``, ``key``, and ``mask`` where the shards have masks. Images leave the
    workers as uint8 and are normalised on the device. With view ``knn`` the evaluation loaders are two: the training
    set under the evaluation transform (the bank), and the validation set. With view ``features`` both sets go through
    the evaluation transform and the model's ``encode`` once, before the first step, and batches hold ``features``: no
    augmentation, and each process keeps what it read of the sets in memory.

    Args:
        root: folder with the shards, or where they are fetched from: a URL, or ``pipe:`` and a command with ``{name}``.
        train_shards, val_shards: globs (or {0000..1023} ranges) of shard names in it.
        view: ``multicrop``, ``probe``, ``features`` or ``knn``.
        batch_size: images per optimiser step over all devices and accumulated batches.
        num_workers: loading processes per device.
        multicrop: the views of ``multicrop``.
        probe_size, probe_scale: side and area range of the ``probe`` view.
        resize, crop: of the evaluation transform.
        seed: of order and augmentation; None takes seed_everything's.
        policy: what to do with bad samples: ``strict`` stops and names them, ``skip`` leaves them out and counts.
        shuffle_window: training samples shuffled together inside a rank's span.
        prefetch: batches each worker prepares ahead.
        mean, std: for normalisation.
        cache_dir, cache_gib: where shards from a URL are kept on each node, and how much of each URL's.
    """

    _masks_required = False
    _labels_required = True

    def __init__(
        self,
        root: str,
        train_shards: str = "train-*.tar",
        val_shards: str = "val*.tar",
        view: Literal["multicrop", "probe", "features", "knn"] = "multicrop",
        batch_size: int = 1024,
        num_workers: int = 8,
        multicrop: MultiCropConfig = MultiCropConfig(),  # noqa: B008  # a value, never changed
        probe_size: int = 224,
        probe_scale: tuple[float, float] = (0.08, 1.0),
        resize: int = 256,
        crop: int = 224,
        seed: int | None = None,
        policy: Literal["strict", "skip"] = "strict",
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
        self.root, self.train_shards, self.val_shards, self.view = root, train_shards, val_shards, view
        self.batch_size, self.num_workers, self.prefetch = batch_size, num_workers, prefetch
        self.multicrop, self.probe_size, self.probe_scale = multicrop, probe_size, probe_scale
        self.transform = EvalTransform(resize, crop)
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.policy, self.shuffle_window, self.mean, self.std = policy, shuffle_window, mean, std
        self.cache_dir, self.cache_gib = cache_dir, cache_gib
        self.skipped = 0
        self._found: dict[str, ShardSet] = {}
        self._encoded: dict[str, EncodedSplit] = {}

    # ---- where and how much -------------------------------------------------------------------------------

    def _shards(self, split: Literal["train", "val"]) -> ShardSet:
        if split not in self._found:
            pattern = self.train_shards if split == "train" else self.val_shards
            if is_remote(self.root):
                folder = Path(self.cache_dir).expanduser() if self.cache_dir else None
                cache = ShardCache(self.root, folder, int(self.cache_gib * 2**30))
                self._found[split] = ShardSet.find_remote(cache, pattern, f"{split}_shards")
            else:
                self._found[split] = ShardSet.find(Path(self.root), pattern, f"{split}_shards")
        return self._found[split]

    def prepare_data(self) -> None:
        """Counts the samples once per node, before the other processes ask."""
        for split in self._splits():
            self._shards(split)

    def _splits(self) -> list[Literal["train", "val"]]:
        return ["train", "val"]

    @property
    def shard_files(self) -> list[str]:
        """Every shard in use, for the run's record."""
        return [str(path) for shards in self._found.values() for path in shards.paths]

    @property
    def device_batch_size(self) -> int:
        """Training samples per device and batch. ValueError where the global batch does not split evenly."""
        assert self.trainer is not None
        world, accumulate = self.trainer.world_size, self.trainer.accumulate_grad_batches
        if self.batch_size % (world * accumulate):
            raise ValueError(
                f"data.init_args.batch_size={self.batch_size} does not divide evenly over {world} devices x "
                f"accumulate_grad_batches={accumulate}; choose a multiple of {world * accumulate}"
            )
        return self.batch_size // (world * accumulate)

    # ---- loaders ------------------------------------------------------------------------------------------

    def _loader(self, dataset: ShardDataset, persistent: bool = True) -> ShardLoader:
        trainer = self.trainer
        assert trainer is not None
        pin = trainer.strategy.root_device.type == "cuda"
        return ShardLoader(dataset, lambda: trainer.current_epoch, self.num_workers, pin, self.prefetch, persistent)

    def train_dataloader(self) -> ShardLoader | FeatureLoader:
        assert self.trainer is not None
        if self.view == "features":
            trainer = self.trainer
            return ShuffledFeatureLoader(
                self._features("train"), self.device_batch_size, self.seed, trainer.global_rank, trainer.world_size,
                lambda: _counters(trainer),
            )  # fmt: skip
        shards = self._shards("train")
        view: View
        if self.view == "multicrop":
            view = MultiCropView(self.multicrop)
        else:
            view = ProbeView(self.probe_size, self.probe_scale)
        trainer, batch = self.trainer, self.device_batch_size
        plan = partial(
            _train_plan, shards, batch, trainer.global_rank, trainer.world_size, self.seed, self.shuffle_window
        )
        return ResumableLoader(
            ShardDataset(shards, view, plan, self.seed, self.policy),
            lambda: _counters(trainer)[0], self.num_workers,
            trainer.strategy.root_device.type == "cuda", self.prefetch,
            lambda: _counters(trainer)[1], trainer.world_size, batch,
        )  # fmt: skip

    def _evaluation_loader(self, split: Literal["train", "val"], persistent: bool = True) -> ShardLoader:
        assert self.trainer is not None
        shards, world = self._shards(split), self.trainer.world_size
        view = EvalView(self.transform, self._masks_required, self._labels_required)
        plan = partial(_evaluation_plan, shards, max(1, self.batch_size // world), self.trainer.global_rank, world)
        return self._loader(ShardDataset(shards, view, plan, self.seed, self.policy), persistent)

    def _features(self, split: Literal["train", "val"]) -> EncodedSplit:
        """The split through the model, once for all epochs."""
        if split not in self._encoded:
            trainer = self.trainer
            assert trainer is not None
            module: Any = trainer.lightning_module
            if not hasattr(module, "encode"):
                raise ValueError(
                    f"data.init_args.view=features wants a model with encode(images), such as LinearProbe; "
                    f"{type(module).__name__} has none"
                )

            def encode(batch: dict[str, Any]) -> Tensor:
                moved = self.on_after_batch_transfer(move_data_to_device(batch, module.device), 0)
                with torch.no_grad(), trainer.precision_plugin.forward_context():
                    return module.encode(moved["image"])

            logger.info("encoding the %s images once", split)
            self._encoded[split] = EncodedSplit.of(iter(self._evaluation_loader(split, persistent=False)), encode)
        return self._encoded[split]

    def val_dataloader(self) -> ShardLoader | FeatureLoader | list[ShardLoader]:
        if self.view == "features":
            assert self.trainer is not None
            return FeatureLoader(self._features("val"), max(1, self.batch_size // self.trainer.world_size))
        if self.view == "knn":
            return [self._evaluation_loader("train"), self._evaluation_loader("val")]
        return self._evaluation_loader("val")

    def test_dataloader(self) -> ShardLoader | FeatureLoader | list[ShardLoader]:
        return self.val_dataloader()

    def predict_dataloader(self) -> ShardLoader:
        return self._evaluation_loader("val")

    # ---- on the device ------------------------------------------------------------------------------------

    def on_after_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> dict[str, Any]:
        """uint8 to normalised floats in the module's dtype, after the transfer."""
        assert self.trainer is not None
        if batch["skipped"]:
            self.skipped += len(batch["skipped"])
            logger.warning("left out %d samples so far, the last: %s", self.skipped, batch["skipped"][-1])
        dtype = next((p.dtype for p in self.trainer.lightning_module.parameters()), torch.float32)

        def ready(image: Tensor) -> Tensor:
            return normalize(image, self.mean, self.std, dtype)

        changed: dict[str, Any] = {}
        if "crops" in batch:
            changed["crops"] = [ready(view) for view in batch["crops"]]
        if "image" in batch:
            changed["image"] = ready(batch["image"])
        return batch | changed


def _counters(trainer: Any) -> tuple[int, int]:
    """The epoch to train, and the batches trained in it.

    Not ``trainer.current_epoch``: a checkpoint from the end of an epoch leaves that one behind until training starts.
    """
    fit = trainer.fit_loop
    return fit.epoch_progress.current.processed, fit.epoch_loop.batch_progress.current.processed


def _train_plan(
    shards: Source, batch: int, rank: int, world: int, seed: int, window: int, epoch: int, done: Sequence[Part]
) -> EpochPlan:
    return rest_plan(shards, batch, rank, world, seed, epoch, window, done)


def _evaluation_plan(shards: Source, batch: int, rank: int, world: int, epoch: int, done: Sequence[Part]) -> EpochPlan:
    return evaluation_plan(shards, batch, rank, world)
