"""What is left of an interrupted epoch."""

from pathlib import Path

import numpy as np
import pytest

from datamodules.shards import ShardSet
from datamodules.span_plan import EpochSegment, resume_plan, train_plan

SHARDS = ShardSet([Path(f"{i}.tar") for i in range(7)], [13, 8, 21, 5, 17, 30, 11])  # 105 samples


def rest(world, batch, done, epoch=3):
    return [resume_plan(SHARDS, batch, r, world, 0, epoch, 16, done) for r in range(world)]


def used(plans, batches):
    """Samples in the first batches of every rank."""
    return np.concatenate([plan.batch(i) for plan in plans for i in range(batches)])


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("batches", [0, 1, 4, 8])
def test_the_same_ranks_go_on_where_they_were(world, batches):
    batch = 12 // world
    for rank, plan in enumerate(rest(world, batch, [EpochSegment(world, batch, batches)])):
        whole = train_plan(SHARDS, batch, rank, world, 0, 3, 16)
        assert np.array_equal(plan.order, whole.order[batches * batch :])
        assert len(plan.bounds) - 1 == 8 - batches
        assert np.array_equal(plan.bounds, whole.bounds[: len(plan.bounds)])


@pytest.mark.parametrize("worlds", [(1, 2), (3, 1), (2, 4, 3), (4, 4, 1, 2)])
def test_other_ranks_share_what_is_left(worlds):
    """Each sample at most once in the epoch, every step full, over any row of restarts."""
    done, seen = [], []
    for number, world in enumerate(worlds):
        last = number == len(worlds) - 1
        plans = rest(world, 12 // world, done)
        steps = 8 - sum(segment.batches for segment in done)
        assert {len(plan.bounds) - 1 for plan in plans} == {steps}
        now = steps if last else 2
        seen.append(used(plans, now))
        done.append(EpochSegment(world, 12 // world, now))
    seen = np.concatenate(seen)
    assert len(seen) == 96 == len(set(seen.tolist())) and seen.max() < 105


def test_another_global_batch_is_refused():
    with pytest.raises(
        ValueError, match=r"inside an epoch of 12 samples a step, now they are 16: keep data.init_args.batch_size"
    ):
        rest(2, 8, [EpochSegment(1, 12, 3)])
