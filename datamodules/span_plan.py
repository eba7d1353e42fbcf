"""Which rank sees which sample in which batch of an epoch: pure functions of (seed, epoch, world size).

An epoch is a permutation of shards laid end to end; each rank gets one contiguous span of it. Inside its span a
training rank shuffles windows of samples. A rank's batches are consecutive pieces of that order, so what a batch holds
does not depend on the number of workers: worker w of W simply makes batches w, w + W, ...

Where a source's samples are in groups, such as tall and wide images, a rank's order is rearranged within its span so
that batches are of one group: which samples an epoch uses, and in how many batches, stays as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from datamodules.samples import Source


class EpochPlan(NamedTuple):
    """One rank's share of an epoch."""

    order: np.ndarray
    """Sample numbers over all shards, in the order they are used."""
    bounds: np.ndarray
    """(batches + 1) where each batch starts in ``order``."""

    def batch(self, number: int) -> np.ndarray:
        return self.order[self.bounds[number] : self.bounds[number + 1]]


def laid_out(shards: Source, order: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Sample numbers at positions [start, stop) of the shards laid end to end in ``order``."""
    pieces, position = [], 0
    for shard in order:
        length = int(shards.lengths[shard])
        low, high = max(start - position, 0), min(stop - position, length)
        if low < high:
            pieces.append(np.arange(low, high) + shards.starts[shard])
        position += length
        if position >= stop:
            break
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def train_steps(total: int, global_batch: int) -> int:
    """Batches an epoch, the same on every rank. ValueError where the data do not fill one."""
    if not total:
        raise ValueError("there are no training samples: the shards that data.init_args names hold none")
    if total < global_batch:
        raise ValueError(
            f"data.init_args.batch_size={global_batch} is more than the {total} training samples; lower it"
        )
    return total // global_batch


def by_group(order: np.ndarray, groups: np.ndarray, batch: int) -> np.ndarray:
    """An order whose batches are of one group each, as far as that goes; mmdetection's aspect ratio batches.

    Samples fill a bucket for each group, and a full bucket is the next batch. What is left in the buckets makes the
    last batches, which are mixed and fewer than there are groups.

    Args:
        order: sample numbers, a multiple of ``batch``.
        groups: of all samples, by their numbers.
        batch: samples in a batch.
    """
    of = groups[order]
    places = [np.flatnonzero(of == group) for group in np.unique(of)]
    full = np.concatenate([at[: len(at) // batch * batch].reshape(-1, batch) for at in places])
    full = full[np.argsort(full[:, -1])]  # a batch is there when its last sample is
    left = [at[len(at) // batch * batch :] for at in places]
    return order[np.concatenate([full.ravel(), *left])]


def _grouped(shards: Source, order: np.ndarray, batch: int) -> np.ndarray:
    return order if shards.groups is None or not len(order) else by_group(order, shards.groups, batch)


def train_plan(shards: Source, batch: int, rank: int, world_size: int, seed: int, epoch: int, window: int) -> EpochPlan:
    """Every sample at most once over all ranks, ``train_steps`` full batches of ``batch`` on each.

    Batches are of one group where the source has groups; see :func:`by_group`.

    Args:
        batch: samples a rank takes per batch.
        window: samples shuffled together; larger mixes better and reads more randomly.
    """
    span = train_steps(len(shards), batch * world_size) * batch
    rng = np.random.Generator(np.random.Philox(key=[seed % 2**64, epoch]))
    order = rng.permutation(len(shards.lengths))
    # what an epoch drops differs from epoch to epoch, as the permutation does
    mine = laid_out(shards, order, rank * span, (rank + 1) * span)
    mixing = np.random.Generator(np.random.Philox(key=[seed % 2**64, (epoch << 20) + rank + 2**40]))
    for start in range(0, len(mine), window):
        mine[start : start + window] = mixing.permutation(mine[start : start + window])
    return EpochPlan(_grouped(shards, mine, batch), np.arange(0, span + 1, batch))


class EpochSegment(NamedTuple):
    """A stretch of an epoch that ran before a checkpoint, on one number of ranks."""

    world_size: int
    batch: int
    """Samples a rank took per batch."""
    batches: int
    """Batches every rank took."""


def resume_plan(
    shards: Source,
    batch: int,
    rank: int,
    world_size: int,
    seed: int,
    epoch: int,
    window: int,
    done: Sequence[EpochSegment],
) -> EpochPlan:
    """What is left of an epoch of :func:`train_plan` after ``done``; on the ranks there are now, however many.

    With the ranks and the batch of the last segment it is the rest of that segment's own plan, so nothing changes by
    the interruption. With others, the samples no rank has taken are laid end to end and shared out again: each is still
    used at most once. ValueError where the samples of a step over all ranks changed, as steps would no longer match.

    Args:
        done: the segments that ran, in order.
    """
    if not done:
        return train_plan(shards, batch, rank, world_size, seed, epoch, window)
    steps = train_steps(len(shards), batch * world_size)
    if all(segment[:2] == (world_size, batch) for segment in done):
        plan, past = train_plan(shards, batch, rank, world_size, seed, epoch, window), sum(p.batches for p in done)
        return EpochPlan(plan.order[past * batch :], np.arange(0, (steps - past) * batch + 1, batch))
    orders: list[np.ndarray] = []
    for number, segment in enumerate([*done, EpochSegment(world_size, batch, 0)]):
        if segment.world_size * segment.batch != batch * world_size:
            raise ValueError(
                f"the checkpoint lies inside an epoch of {segment.world_size * segment.batch} samples a step, now they "
                f"are {batch * world_size}: keep data.init_args.batch_size, or resume from the end of an epoch"
            )
        if number == 0:
            orders = [
                train_plan(shards, segment.batch, r, segment.world_size, seed, epoch, window).order
                for r in range(segment.world_size)
            ]
        elif segment.world_size != len(orders):
            left = np.concatenate(orders)
            shares = np.split(left[: steps * segment.batch * segment.world_size], segment.world_size)
            orders = [_grouped(shards, share, segment.batch) for share in shares]
        orders = [order[segment.batches * segment.batch :] for order in orders]
        steps -= segment.batches
    mine = orders[rank]
    return EpochPlan(mine, np.arange(0, steps * batch + 1, batch))


def evaluation_plan(shards: Source, batch: int, rank: int, world_size: int) -> EpochPlan:
    """Every sample exactly once over all ranks, in order, in the same number of batches on each.

    Ranks differ by at most one sample. Where a rank has fewer samples than batches, its last batches are empty: no
    rank waits for another.
    """
    total = len(shards)
    bounds = [total * r // world_size for r in range(world_size + 1)]
    batches = -(-max(b - a for a, b in zip(bounds[:-1], bounds[1:], strict=True)) // batch)
    mine = laid_out(shards, np.arange(len(shards.lengths)), bounds[rank], bounds[rank + 1])
    ends = np.minimum(np.arange(batches + 1) * batch, len(mine))
    return EpochPlan(mine, ends)


class Plan(Protocol):
    """What a rank reads of an epoch of which some was done."""

    def __call__(self, epoch: int, done: Sequence[EpochSegment]) -> EpochPlan: ...


@dataclass(frozen=True)
class TrainPlan:
    """:func:`resume_plan` for one rank of a run; the arguments are explained there."""

    source: Source
    batch: int
    rank: int
    world_size: int
    seed: int
    window: int

    def __call__(self, epoch: int, done: Sequence[EpochSegment]) -> EpochPlan:
        return resume_plan(self.source, self.batch, self.rank, self.world_size, self.seed, epoch, self.window, done)


@dataclass(frozen=True)
class EvaluationPlan:
    """:func:`evaluation_plan` for one rank of a run: the same in every epoch."""

    source: Source
    batch: int
    rank: int
    world_size: int

    def __call__(self, epoch: int, done: Sequence[EpochSegment]) -> EpochPlan:
        return evaluation_plan(self.source, self.batch, self.rank, self.world_size)
