"""Features of a split, encoded once and held in memory, as a loader.

Shapes: N samples of this rank; a sample's features are of any shape (...).
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from torch import Tensor

from common.collectives import all_reduce_min
from common.epoch_order import check_order

logger = logging.getLogger(__name__)


class Position(Protocol):
    """Where a run stands; the data module's says so."""

    rank: int
    world_size: int

    @property
    def batches(self) -> int:
        """Batches trained on so far in the epoch."""

    def start_epoch(self) -> int:
        """The epoch that an iteration starts or continues."""


class FeatureCache:
    """Puts a split's features in the place of its images: what a data module's ``wrap_loader`` asks for.

    Both splits go through the module's ``encode(images)`` once, when they are first asked for, without gradients and
    in the run's precision; each process holds what it read.

    Args:
        module: has ``encode``; of the Trainer that the data belong to.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module: Any = module
        self._encoded: dict[str, EncodedSplit] = {}

    def __call__(self, split: str, loader: Iterable[Any], batch_size: int, position: Position) -> "FeatureLoader":
        """A loader of the features.

        Args:
            split: ``train``, whose samples come in a new order each epoch, or ``val``.
            loader: of the images.
            batch_size: samples of a batch.
            position: of the run.
        """
        if split not in self._encoded:
            logger.info("encoding the %s images once", split)
            self._encoded[split] = EncodedSplit.of(iter(loader), self._encode)
        if split == "train":
            seed = self._module.trainer.datamodule.seed
            return ShuffledFeatureLoader(self._encoded[split], batch_size, seed, position)
        return FeatureLoader(self._encoded[split], batch_size)

    def _encode(self, batch: dict[str, Any]) -> Tensor:
        trainer = self._module.trainer
        moved = move_data_to_device(batch, self._module.device)
        moved = trainer.datamodule.on_after_batch_transfer(moved, 0)
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            return self._module.encode(moved["image"])


def cache_features(module: LightningModule) -> None:
    """Called in a module's ``setup``: where the data's view is ``features``, the module's ``encode`` makes them."""
    data: Any = module.trainer.datamodule
    if getattr(data, "view", None) == "features":
        data.wrap_loader = FeatureCache(module)


class EncodedSplit(NamedTuple):
    """What this rank read of a split, in the order of the shards."""

    features: Tensor  # (N, ...) on the CPU
    labels: Tensor  # (N)
    keys: list[str]
    shards: list[str]

    def batch(self, rows: np.ndarray) -> dict[str, Any]:
        at = torch.from_numpy(rows)
        return {
            "features": self.features[at], "label": self.labels[at], "key": [self.keys[i] for i in rows],
            "shard": [self.shards[i] for i in rows], "skipped": [],
        }  # fmt: skip

    @classmethod
    def of(cls, batches: Iterator[dict[str, Any]], encode: Callable[[dict[str, Any]], Tensor]) -> "EncodedSplit":
        """Every batch through ``encode``, once."""
        features, labels, keys, shards = [], [], [], []
        for batch in batches:
            if len(batch["key"]):
                features.append(encode(batch).cpu())
                labels.append(batch["label"].cpu())
                keys += batch["key"]
                shards += batch["shard"]
        if not features:
            raise ValueError("view=features: this process has no sample; use fewer devices, or more data")
        return cls(torch.cat(features), torch.cat(labels), keys, shards)


class FeatureLoader:
    """Batches in the order of the data: every sample once."""

    def __init__(self, data: EncodedSplit, batch: int) -> None:
        self.data, self.batch = data, batch

    def __len__(self) -> int:
        return -(-len(self.data.keys) // self.batch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = np.arange(len(self.data.keys))
        return (self.data.batch(rows[i : i + self.batch]) for i in range(0, len(rows), self.batch))


class ShuffledFeatureLoader(FeatureLoader):
    """Whole batches of a rank's samples in a new order each epoch; ranks have equally many.

    The order is a function of (seed, epoch, rank). A checkpoint inside an epoch can be taken up on as many ranks.

    Args:
        data, batch: this rank's samples, and how many make a batch.
        seed: of the order.
        position: whose samples these are, the epoch that an iteration starts or continues, and how much was done of it.

    Raises:
        ValueError: if a rank has fewer samples than a batch.
    """

    def __init__(self, data: EncodedSplit, batch: int, seed: int, position: Position) -> None:
        super().__init__(data, batch)
        self._seed, self._position = seed, position
        self._batches = all_reduce_min(len(data.keys)) // batch
        if not self._batches:
            raise ValueError(
                f"data.init_args.batch_size: a device's part of it, {batch}, is more than the {len(data.keys)} "
                "training samples of a device; make it smaller"
            )
        self._done = (-1, 0)  # of which epoch how many batches were trained on before this run
        self._epoch = 0

    def __len__(self) -> int:
        return self._batches

    def state_dict(self) -> dict[str, Any]:
        done, order = self._position.batches, self._order()
        return {
            "epoch": self._epoch, "batches": done, "world_size": self._position.world_size, "of": len(self),
            "order": order,
        }  # fmt: skip

    def _order(self) -> dict[str, Any]:
        position = self._position
        return {
            "batch_size": self.batch * position.world_size * position.accumulate, "accumulate": position.accumulate,
            "seed": self._seed, "samples": len(self.data.keys),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes effect at the next ``iter`` of that epoch."""
        inside = 0 < state["batches"] < state.get("of", self._batches)
        if inside and state["world_size"] != self._position.world_size:
            raise ValueError(
                f"view=features: the checkpoint is from inside an epoch on {state['world_size']} processes, this run "
                f"has {self._position.world_size}; each holds its own samples, so go on with {state['world_size']}, or "
                "from an epoch's end"
            )
        if inside:
            check_order(state.get("order", {}), self._order())
        self._done = (state["epoch"], state["batches"])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._epoch = self._position.start_epoch()
        rng = np.random.Generator(np.random.Philox(key=[self._seed % 2**64, (self._epoch << 20) + self._position.rank]))
        rows = rng.permutation(len(self.data.keys))
        first = self._done[1] if self._done[0] == self._epoch else 0
        return (self.data.batch(rows[i * self.batch : (i + 1) * self.batch]) for i in range(first, self._batches))
