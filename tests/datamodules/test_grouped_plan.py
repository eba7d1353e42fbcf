"""Batches of one group each: the same samples and steps as without, at any number of ranks, whole or resumed."""

from pathlib import Path

import numpy as np
import pytest

from datamodules.selection import Selection
from datamodules.shards import ShardSet
from datamodules.span_plan import EpochSegment, by_group, resume_plan, train_plan

LENGTHS = [13, 8, 21, 5, 17, 30, 11]  # 105 samples


def shards(groups=None):
    source = ShardSet([Path(f"{i}.tar") for i in range(len(LENGTHS))], LENGTHS)
    source.groups = groups
    return source


def drawn_groups(seed, kinds=2, share=0.3):
    rng = np.random.default_rng(seed)
    return np.where(rng.random(sum(LENGTHS)) < share, rng.integers(0, kinds, sum(LENGTHS)), 0)


def buckets(order, groups, batch):
    """mmdetection's sampler, in its own words: a list for each group; full ones go out; the rest is chunked."""
    lists = {group: [] for group in sorted(set(groups.tolist()))}
    out = []
    for sample in order.tolist():
        lists[groups[sample]].append(sample)
        if len(lists[groups[sample]]) == batch:
            out += lists[groups[sample]]
            lists[groups[sample]] = []
    return out + [sample for left in lists.values() for sample in left]


def mixed(plan, groups):
    """Batches that hold several groups."""
    return sum(len(set(groups[plan.batch(i)])) > 1 for i in range(len(plan.bounds) - 1))


@pytest.mark.parametrize("kinds", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2, 5, 12])
def test_like_buckets_that_are_filled_one_by_one(batch, kinds):
    for seed in range(20):
        groups = drawn_groups(seed, kinds, 0.6)
        order = np.random.default_rng(seed).permutation(105)[: 105 // batch * batch]
        assert by_group(order, groups, batch).tolist() == buckets(order, groups, batch)


@pytest.mark.parametrize("window", [1, 16, 1000])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("batch", [1, 2, 4, 7])
def test_the_samples_and_steps_of_an_epoch_stay(batch, world, window):
    groups = drawn_groups(world)
    seen = []
    for epoch in range(3):
        for rank in range(world):
            args = batch, rank, world, 5, epoch, window
            plain, grouped = train_plan(shards(), *args), train_plan(shards(groups), *args)
            assert np.array_equal(plain.bounds, grouped.bounds)
            assert sorted(plain.order) == sorted(grouped.order)
            assert mixed(grouped, groups) <= 1  # of two groups
            seen.append(grouped.order + 1000 * epoch)
    seen = np.concatenate(seen)
    assert len(seen) == len(set(seen.tolist())) == 3 * (105 // (batch * world)) * batch * world


def test_one_group_is_none():
    for rank in range(3):
        args = 4, rank, 3, 0, 2, 16
        assert np.array_equal(train_plan(shards(), *args).order, train_plan(shards(np.ones(105)), *args).order)


def rest(groups, world, batch, done):
    return [resume_plan(shards(groups), batch, r, world, 0, 3, 16, done) for r in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("batches", [0, 1, 4, 8])
def test_the_same_ranks_go_on_where_they_were(world, batches):
    batch, groups = 12 // world, drawn_groups(1)
    for rank, plan in enumerate(rest(groups, world, batch, [EpochSegment(world, batch, batches)])):
        whole = train_plan(shards(groups), batch, rank, world, 0, 3, 16)
        assert np.array_equal(plan.order, whole.order[batches * batch :])
        assert np.array_equal(plan.bounds, whole.bounds[: 9 - batches])


@pytest.mark.parametrize("worlds", [(1, 2), (3, 1), (2, 4, 3), (4, 4, 1, 2), (1, 2, 1, 2)])
def test_other_ranks_share_what_is_left(worlds):
    groups, done, seen = drawn_groups(2), [], []
    for number, world in enumerate(worlds):
        plans = rest(groups, world, 12 // world, done)
        steps = 8 - sum(segment.batches for segment in done)
        assert {len(plan.bounds) - 1 for plan in plans} == {steps}
        assert all(mixed(plan, groups) <= 1 for plan in plans)
        now = steps if number == len(worlds) - 1 else 2
        seen += [plan.batch(i) for plan in plans for i in range(now)]
        done.append(EpochSegment(world, 12 // world, now))
    seen = np.concatenate(seen)
    assert len(seen) == 96 == len(set(seen.tolist())) and seen.max() < 105


# ---- selections -----------------------------------------------------------------------------------------------


class Reader:
    """Answers with the number that was asked for."""

    def __init__(self):
        self.ahead, self.closed = [], False

    def read(self, index, fields):
        return index, fields

    def look_ahead(self, indices):
        self.ahead += indices.tolist()

    def close(self):
        self.closed = True


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_a_selection_is_a_source_of_what_is_chosen(share, monkeypatch):
    source, groups = shards(), drawn_groups(3)
    chosen = np.random.default_rng(4).random(105) < share
    chosen[13:21] = False  # a shard of which nothing is
    reader = Reader()
    monkeypatch.setattr(source, "reader", lambda: reader)
    selection = Selection(source, chosen, groups)
    wanted = [i for i in range(105) if chosen[i]]
    assert len(selection) == len(wanted) and selection.paths == source.paths
    assert selection.lengths.tolist() == [int(chosen[a : a + n].sum()) for a, n in zip(source.starts, LENGTHS)]  # noqa: B905
    assert selection.starts.tolist() == [0, *np.cumsum(selection.lengths)]
    assert selection.groups.tolist() == groups[chosen].tolist()
    with_reader = selection.reader()
    assert [with_reader.read(i, "f") for i in range(len(selection))] == [(i, "f") for i in wanted]
    with_reader.look_ahead(np.arange(len(selection)))
    with_reader.close()
    assert reader.ahead == wanted and reader.closed
    if share == 0.5:
        plans = [train_plan(selection, 3, r, 2, 0, 0, 8) for r in range(2)]
        used = np.concatenate([plan.order for plan in plans])
        assert len(used) == len(set(used.tolist())) == len(selection) // 6 * 6 and used.max() < len(selection)


def test_a_selection_of_another_number_of_samples():
    with pytest.raises(ValueError, match=r"a selection of 105 samples needs as many values; there are \(104,\)"):
        Selection(shards(), np.ones(104, bool))
