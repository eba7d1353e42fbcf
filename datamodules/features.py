"""Features of a split, encoded once and held in memory, as a loader.

Shapes: N samples of this rank, B samples of a batch, K x D features of a sample.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.collectives import all_reduce_min


class EncodedSplit(NamedTuple):
    """What this rank read of a split, in the order of the shards."""

    features: Tensor  # (N, K, D) on the CPU
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
        seed, rank, world_size: of the order; whose samples these are.
        progress: the epoch that the next ``iter`` starts or continues, and the batches trained on so far in it.

    Raises:
        ValueError: if a rank has fewer samples than a batch.
    """

    def __init__(
        self, data: EncodedSplit, batch: int, seed: int, rank: int, world_size: int,
        progress: Callable[[], tuple[int, int]],
    ) -> None:  # fmt: skip
        super().__init__(data, batch)
        self._key, self._world_size, self._progress = (seed, rank), world_size, progress
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

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "batches": self._progress()[1], "world_size": self._world_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Takes effect at the next ``iter`` of that epoch."""
        if state["world_size"] != self._world_size and 0 < state["batches"] < self._batches:
            raise ValueError(
                f"view=features: the checkpoint is from inside an epoch on {state['world_size']} processes, this run "
                f"has {self._world_size}; each holds its own samples, so go on with {state['world_size']}, or from an "
                "epoch's end"
            )
        self._done = (state["epoch"], state["batches"])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._epoch = self._progress()[0]
        seed, rank = self._key
        rng = np.random.Generator(np.random.Philox(key=[seed % 2**64, (self._epoch << 20) + rank]))
        rows = rng.permutation(len(self.data.keys))
        first = self._done[1] if self._done[0] == self._epoch else 0
        return (self.data.batch(rows[i * self.batch : (i + 1) * self.batch]) for i in range(first, self._batches))
