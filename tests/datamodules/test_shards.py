"""Exact sharded data: every sample where it should be, for any number of workers, ranks and shards."""

import io
import json
import subprocess
import tarfile
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import ImageNetDataModule, ImageNetSDataModule, MultiCropConfig
from datamodules.prepare import write_split
from datamodules.samples import ShardError, split_member
from datamodules.shard_index import index_shard
from datamodules.shards import ShardSet
from datamodules.span_plan import evaluation_plan, train_plan

SMALL = MultiCropConfig(global_size=16, local_size=8, num_local=2)


def png(array):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "png")
    return buffer.getvalue()


def make_samples(count, seed=0, start=0, masks=False):
    rng = np.random.default_rng(seed)
    for i in range(start, start + count):
        image = rng.integers(0, 256, (20 + i % 3, 24, 3), dtype=np.uint8)
        sample = {"__key__": f"{i:05d}", "png": png(image), "cls": str(i % 4).encode()}
        if masks:
            sample["mask.png"] = png(rng.integers(0, 3, image.shape[:2], dtype=np.uint8))
        yield sample


def write_uneven(folder, split, sizes, masks=False):
    """Shards of the given sizes, with an _info.json."""
    start, names = 0, []
    for number, size in enumerate(sizes):
        (path,) = write_split(folder / f"part-{split}-{number}", "x", make_samples(size, number, start, masks), 10**6)
        names.append(f"{split}-{number:04d}.tar")
        path.rename(folder / names[-1])
        start += size
    path = folder / "_info.json"
    info = json.loads(path.read_text()) if path.exists() else {"splits": {}}
    info["splits"][split] = {
        "name": split,
        "num_samples": start,
        "filenames": names,
        "shard_lengths": list(sizes),
    }
    path.write_text(json.dumps(info))


class FakeTrainer:
    """What a datamodule asks of a trainer."""

    accumulate_grad_batches = 1
    current_epoch = 0

    def __init__(self, rank, world_size):
        self.global_rank, self.world_size = rank, world_size
        self.lightning_module = torch.nn.Linear(1, 1)
        self.batches_trained = 0

    @property
    def fit_loop(self):
        """Lightning's counters of the epoch, and of the batches in it."""
        epochs, batches = (
            SimpleNamespace(current=SimpleNamespace(processed=n)) for n in (self.current_epoch, self.batches_trained)
        )
        return SimpleNamespace(epoch_progress=epochs, epoch_loop=SimpleNamespace(batch_progress=batches))

    class strategy:
        root_device = torch.device("cpu")


def module_for(folder, rank, world, workers, batch=2, epoch=0, **kwargs):
    data = ImageNetDataModule(
        str(folder), "train-*.tar", "val-*.tar", batch_size=batch * world, num_workers=workers, multicrop=SMALL,
        resize=16, crop=16, seed=3, shuffle_window=4, **kwargs,
    )  # fmt: skip
    data.trainer = FakeTrainer(rank, world)
    data.trainer.current_epoch = epoch
    return data


SIZES = [(5, 1, 4), (9, 2), (12,), (1,) * 100]


@pytest.fixture(scope="module", params=SIZES, ids=str)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("shards")
    write_uneven(path, "train", request.param)
    write_uneven(path, "val", request.param)
    return path


def crops_by_key(data):
    found, steps = {}, 0
    for batch in data.train_dataloader():
        steps += 1
        for i, key in enumerate(batch["key"]):
            assert key not in found
            found[key] = [view[i] for view in batch["crops"]]
    return found, steps


@pytest.mark.parametrize("world", [1, 2, 3])
def test_exact_over_ranks_and_workers(folder, world):
    total = sum(json.loads((folder / "_info.json").read_text())["splits"]["val"]["shard_lengths"])
    reference = None
    for workers in (0, 1, 3):
        seen, steps, evaluated, eval_steps, streams = Counter(), set(), Counter(), set(), []
        for rank in range(world):
            data = module_for(folder, rank, world, workers)
            found, n = crops_by_key(data)
            seen.update(found.keys())
            steps.add(n)
            assert n == len(data.train_dataloader())
            streams.append(found)
            loader = data.val_dataloader()
            batches = list(loader)
            eval_steps.add(len(batches))
            assert len(batches) == len(loader)
            for batch in batches:
                assert len(batch["image"]) == len(batch["key"]) == len(batch["label"])
                evaluated.update(batch["key"])
        assert max(seen.values()) == 1
        assert steps == {total // (2 * world)}
        assert len(eval_steps) == 1
        assert len(evaluated) == total and set(evaluated.values()) == {1}
        if reference is None:
            reference = streams
        for ours, theirs in zip(streams, reference, strict=True):
            assert list(ours) == list(theirs)  # the same order, too
            assert all(torch.equal(a, b) for k in ours for a, b in zip(ours[k], theirs[k], strict=True))


def test_epochs_differ_and_reruns_agree(folder):
    first, again, second = (crops_by_key(module_for(folder, 0, 1, 0, epoch=e))[0] for e in (0, 0, 1))
    assert list(first) == list(again)
    assert all(torch.equal(a, b) for k in first for a, b in zip(first[k], again[k], strict=True))
    assert list(first) != list(second)
    shared = next(k for k in first if k in second)
    assert not all(torch.equal(a, b) for a, b in zip(first[shared], second[shared], strict=True))


def test_living_workers_follow_the_epoch(folder):
    data = module_for(folder, 0, 1, 2)
    loader = data.train_dataloader()
    epochs = []
    for epoch in (0, 1, 0):
        data.trainer.current_epoch = epoch
        epochs.append([key for batch in loader for key in batch["key"]])
    assert epochs[0] == epochs[2] != epochs[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_inside_an_epoch(folder, workers):
    """The rest of the epoch's batches, crops included, and the next epoch whole; a state inside the rest holds both parts."""
    whole = module_for(folder, 0, 1, 0, epoch=1)
    wanted = list(whole.train_dataloader())
    assert len(wanted) >= 4
    whole.trainer.batches_trained = 2
    loader = whole.train_dataloader()
    iter(loader)
    data = module_for(folder, 0, 1, workers, epoch=1)
    data.trainer.batches_trained = 2
    resumed = data.train_dataloader()
    resumed.load_state_dict(loader.state_dict())
    rest = list(resumed)
    assert [b["key"] for b in rest] == [b["key"] for b in wanted[2:]] and len(resumed) == len(wanted)
    for a, b in zip(rest, wanted[2:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a["crops"], b["crops"], strict=True))
    data.trainer.batches_trained = 3
    state = resumed.state_dict()
    assert (state["epoch"], state["parts"], state["batches"]) == (1, [[1, 2, 3]], len(resumed))
    data.trainer.current_epoch = 2
    following = module_for(folder, 0, 1, 0, epoch=2)
    assert [b["key"] for b in resumed] == [b["key"] for b in following.train_dataloader()]


def signalled(pid):
    """As by a cluster: from another process than the run's."""
    subprocess.run(["/bin/sh", "-c", f"kill -TERM {pid}; kill -USR1 {pid}"], check=True)


def test_workers_outlast_the_signals_of_a_cluster(folder):
    expected = [b["key"] for b in module_for(folder, 0, 1, 2).train_dataloader()]
    batches = iter(module_for(folder, 0, 1, 2).train_dataloader())
    workers = batches._workers
    for worker in workers:
        signalled(worker.pid)
    found = [next(batches)["key"]]
    for worker in workers:
        signalled(worker.pid)
    assert found + [b["key"] for b in batches] == expected
    for worker in workers:
        assert worker.is_alive()
        worker.terminate()  # by this process, as at a run's end
        worker.join(20)
    assert [worker.exitcode for worker in workers] == [0, 0]


@pytest.mark.parametrize("sizes", [(7, 0, 3), (1,) * 37, (50, 1)])
@pytest.mark.parametrize("world", [1, 2, 5, 8])
def test_plans(tmp_path, sizes, world):
    shards = ShardSet([tmp_path / str(i) for i in range(len(sizes))], sizes)
    for batch in (1, 2):
        parts = [evaluation_plan(shards, batch, r, world) for r in range(world)]
        assert sorted(np.concatenate([p.order for p in parts])) == list(range(sum(sizes)))
        assert len({len(p.bounds) for p in parts}) == 1
        assert all(
            np.array_equal(np.concatenate([p.batch(i) for i in range(len(p.bounds) - 1)]), p.order) for p in parts
        )
        if batch * world <= sum(sizes):
            trains = [train_plan(shards, batch, r, world, 0, 0, 8) for r in range(world)]
            used = np.concatenate([t.order for t in trains])
            assert len(set(used.tolist())) == len(used) == sum(sizes) // (batch * world) * batch * world


def test_members_with_dots():
    assert split_member("a/n01.foo.v2.jpg") == ("a/n01.foo.v2", "jpg")
    assert split_member("x.y.mask.png") == ("x.y", "mask.png")
    assert split_member("x.JPEG") == ("x", "jpeg")
    assert split_member("readme.txt") is None


def test_counts_without_info_are_kept(tmp_path):
    write_uneven(tmp_path, "val", (3, 2))
    (tmp_path / "_info.json").unlink()
    assert ShardSet.find(tmp_path, "val-*.tar", "val_shards").lengths.tolist() == [3, 2]
    counts = json.loads((tmp_path / ".shard_counts.json").read_text())
    assert [entry[2] for entry in counts.values()] == [3, 2]
    (extra,) = write_split(tmp_path / "new", "x", make_samples(7), 100)
    extra.rename(tmp_path / "val-0001.tar")  # another file under the same name is counted anew
    assert ShardSet.find(tmp_path, "val-{0000..0001}.tar", "val_shards").lengths.tolist() == [3, 7]


def retar(source, target, change):
    """Copies a tar, letting ``change(name, data)`` drop (None) or replace a member's bytes."""
    with tarfile.open(source) as old, tarfile.open(target, "w") as new:
        for member in old:
            data = change(member.name, old.extractfile(member).read())
            if data is not None:
                member.size = len(data)
                new.addfile(member, io.BytesIO(data))


def damage(folder, name, change):
    path = folder / name
    path.rename(folder / "old")
    retar(folder / "old", path, change)
    (folder / "old").unlink()


def consume(folder, batch=3, masks=False, **kwargs):
    if masks:
        data = ImageNetSDataModule(str(folder), "val-*.tar", batch, 0, 16, 16, **kwargs)
        data.trainer = FakeTrainer(0, 1)
    else:
        data = module_for(folder, 0, 1, 0, batch, **kwargs)
    return list(data.val_dataloader())


FAULTS = {
    "unreadable": ("00001.png", lambda data: data[:40], "cannot be read"),
    "no image": ("00001.png", lambda data: None, "has no image"),
    "no class": ("00001.cls", lambda data: None, "no .cls"),
    "bad class": ("00001.cls", lambda data: b"dog", r"\.cls holds b'dog'; wanted the class.s number"),
    "no mask": ("00001.mask.png", lambda data: None, "no .mask.png"),
    "other mask": ("00001.mask.png", lambda data: png(np.zeros((5, 5), np.uint8)), "the mask is 5 x 5"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_samples(tmp_path, fault):
    name, change, words = FAULTS[fault]
    write_uneven(tmp_path, "val", (4,), masks=True)
    damage(tmp_path, "val-0000.tar", lambda member, data: change(data) if member == name else data)
    masks = "mask" in fault
    with pytest.raises(ShardError, match=words) as error:
        consume(tmp_path, masks=masks)
    assert "00001" in str(error.value) and "val-0000.tar" in str(error.value)
    batches = consume(tmp_path, masks=masks, policy="skip")
    assert [key for b in batches for key in b["key"]] == ["00000", "00002", "00003"]
    assert sum(len(b["skipped"]) for b in batches) == 1


def test_bad_shards(tmp_path):
    with pytest.raises(ShardError, match=r"no folder .*data\.init_args\.root"):
        consume(tmp_path / "nowhere")
    write_uneven(tmp_path, "val", (4, 3))
    with pytest.raises(ShardError, match=r"train_shards='train-\*.tar'.*val-0000.tar"):
        module_for(tmp_path, 0, 1, 0).train_dataloader()
    whole = (tmp_path / "val-0001.tar").read_bytes()
    (tmp_path / "val-0001.tar").write_bytes(whole[:700])
    with pytest.raises(ShardError, match=r"val-0001.tar is no whole tar"):
        consume(tmp_path)
    assert sum(len(b["skipped"]) for b in consume(tmp_path, policy="skip")) == 3
    (tmp_path / "val-0001.tar").unlink()
    with pytest.raises(ShardError, match=r"1 shard.* missing from .*val-0001.tar"):
        consume(tmp_path)


def test_announced_length_is_checked(tmp_path):
    write_uneven(tmp_path, "val", (4,))
    info = json.loads((tmp_path / "_info.json").read_text())
    info["splits"]["val"]["shard_lengths"] = [5]
    (tmp_path / "_info.json").write_text(json.dumps(info))
    with pytest.raises(ShardError, match=r"holds 4 samples, 5 were announced"):
        consume(tmp_path)
    (tmp_path / "_info.json").write_text('{"splits": []}')
    with pytest.raises(ShardError, match="schema"):
        consume(tmp_path)


def test_uneven_batch_names_both(tmp_path):
    write_uneven(tmp_path, "train", (8,))
    data = module_for(tmp_path, 0, 3, 0)
    data.batch_size = 8
    with pytest.raises(ValueError, match=r"batch_size=8 .* 3 devices"):
        data.train_dataloader()


def test_nothing_outside_is_written(tmp_path):
    inside = tmp_path / "in"
    inside.mkdir()
    with tarfile.open(inside / "val-0000.tar", "w") as tar:
        for name in ("../../evil.png", "../../evil.cls"):
            member = tarfile.TarInfo(name)
            data = png(np.zeros((20, 20, 3), np.uint8)) if name.endswith("png") else b"1"
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert [s.key for s in index_shard(inside / "val-0000.tar")] == ["../../evil"]
    assert [b["key"] for b in consume(inside)] == [["../../evil"]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
