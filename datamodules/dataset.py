"""Whole batches out of samples by plan, the same ones for any number of workers.

Batches are dicts. Every batch has ``key`` and ``shard`` (lists of str, one for each sample), ``skipped`` (list of str,
what was left out and why) and ``split`` (str, the split's name), beside what the transform makes.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from datamodules.buffers import first_rows, rows_of
from datamodules.sample_seed import SampleKey
from datamodules.samples import SampleReader, ShardError, Source
from datamodules.span_plan import EpochPlan, EpochSegment, Plan
from datamodules.transforms import Transform

Policy = Literal["strict", "skip"]
POLICIES = ("strict", "skip")
MOST_SEGMENTS = 64
AHEAD = 8
"""Batches of a worker between asking for a remote shard and reading it."""


class ShardDataset(IterableDataset):
    """Yields whole batches of one rank.

    Args:
        source: where the samples are.
        transform: what a batch shows of them.
        plan: epoch and what was done of it -> this rank's EpochPlan of the rest.
        seed: of the augmentation.
        policy: ``strict`` stops at the first bad sample, naming it; ``skip`` leaves it out and says so in the batch.
        split: name of the split, for the batches.
        may_be_empty: whether a batch may end up without samples, as in evaluation, or that is an error: nothing can
            be learnt from it.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        plan: Plan,
        seed: int,
        policy: Policy = "strict",
        split: str = "train",
        may_be_empty: bool = False,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"data.init_args.policy={policy!r}; allowed: {', '.join(POLICIES)}")
        if unknown := sorted(set(transform.fields) - set(source.fields)):
            raise ValueError(
                f"{type(transform).__name__}.fields has {unknown[0]!r}, which {type(source).__name__} does not read; "
                f"allowed: {', '.join(source.fields)}"
            )
        self.source, self.transform, self.plan, self.seed, self.policy = source, transform, plan, seed, policy
        self.split, self.may_be_empty = split, may_be_empty
        # the epoch, the number of segments done, and these; shared, so that it reaches workers that live on
        self._state = torch.zeros(2 + 3 * MOST_SEGMENTS, dtype=torch.int64).share_memory_()
        transform.prepare()

    def set_epoch(self, epoch: int, done: Sequence[EpochSegment] = ()) -> None:
        """Takes effect at the next ``iter``, in living workers too; ``done`` is left out of the epoch."""
        if len(done) > MOST_SEGMENTS:
            raise ValueError(
                f"this epoch was interrupted {len(done)} times with other numbers of devices; start it over"
            )
        self._state[:2] = torch.tensor([epoch, len(done)])
        for number, segment in enumerate(done):
            self._state[2 + 3 * number : 5 + 3 * number] = torch.tensor(segment)

    @property
    def epoch(self) -> int:
        """The epoch last set."""
        return int(self._state[0])

    def _current(self) -> tuple[int, EpochPlan]:
        """The epoch last set, and what is left of it."""
        epoch, count = self._state[:2].tolist()
        done = self._state[2 : 2 + 3 * count].view(-1, 3).tolist()
        return epoch, self.plan(epoch, [EpochSegment(*segment) for segment in done])

    @property
    def num_batches(self) -> int:
        """Of a whole epoch."""
        return len(self.plan(0, ()).bounds) - 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        epoch, plan = self._current()
        reader = self.source.reader()
        try:
            for number in range(worker, len(plan.bounds) - 1, workers):
                if (soon := number + AHEAD * workers) < len(plan.bounds) - 1:
                    reader.look_ahead(plan.batch(soon))
                yield self._batch(reader, plan.batch(number), epoch)
        finally:
            reader.close()

    def _batch(self, reader: SampleReader, indices: np.ndarray, epoch: int) -> dict[str, Any]:
        transform = self.transform
        buffers = transform.allocate(len(indices))
        samples: list[dict[str, Any]] = []
        keys: list[str] = []
        shards: list[str] = []
        skipped: list[str] = []
        for index in indices.tolist():
            try:
                raw = reader.read(index, transform.fields)
                key = SampleKey(self.seed, epoch, index)
                samples.append(transform(raw, key, rows_of(buffers, len(samples))))
                keys.append(raw.key)
                shards.append(raw.shard)
            except ShardError as error:
                if self.policy == "strict":
                    raise
                skipped.append(str(error))
        if not samples and not self.may_be_empty:
            raise ShardError(f"all {len(indices)} samples of a batch are unreadable, the last: {skipped[-1]}")
        entries = transform.collate(samples) if samples else transform.empty()
        return (
            {"key": keys, "shard": shards}
            | entries
            | first_rows(buffers, len(samples))
            | {"skipped": skipped, "split": self.split}
        )
