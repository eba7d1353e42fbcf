"""Shards over HTTP and pipes: the same samples as from the folder, whatever the network does."""

import json
import multiprocessing
import shutil
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from datamodules import ImageNetDataModule, prepare, remote
from datamodules.multicrop import MultiCropConfig
from datamodules.remote import ShardCache
from datamodules.samples import ShardError
from datamodules.shard_index import index_shard
from datamodules.shards import ShardSet


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("far")
    prepare.demo(str(out), train=120, validation=12, samples_per_shard=3)
    return out


class Server:
    """Serves a folder to curl, which webdataset opens URLs with; ``fault(number, name)`` says what goes wrong with a request: drop, short, lie, stall or None."""

    def __init__(self, folder, fault=lambda number, name: None):
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path[1:]
                with served.lock:
                    number = sum(served.requests.values())
                    served.requests[name] += 1
                    kind = fault(number, name)
                    served.faults[kind] += 1
                data = (folder / name).read_bytes() if (folder / name).is_file() else None
                if kind == "drop":  # before a single byte
                    self.connection.close()
                    return
                if data is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                if kind != "lie":  # without a length the client cannot tell that bytes are missing
                    self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data if kind is None else data[: len(data) // 2])
                self.wfile.flush()
                if kind == "stall":
                    time.sleep(3)
                self.close_connection = True

            def log_message(self, *_):
                pass

        self.lock, self.requests, self.faults = threading.Lock(), Counter(), Counter()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        if shutil.which("curl") is None:
            pytest.skip("webdataset opens URLs with curl")
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(remote.ShardCache.__init__, "__defaults__", (6, 0.01, 60.0))


def batches(root, cache, workers):
    data = ImageNetDataModule(
        str(root), view="multicrop", batch_size=8, num_workers=workers, resize=16, crop=16, cache_dir=str(cache),
        multicrop=MultiCropConfig(global_size=16, local_size=8, num_local=1), shuffle_window=7,
    )  # fmt: skip
    return list(data.train_dataloader()), list(data.val_dataloader())


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_over_a_bad_network_is_the_local_epoch(workers, folder, tmp_path, quick):
    def fault(number, name):
        return {7: "drop", 17: "short"}.get(number % 20) if name.endswith(".tar") else None  # 5 % each

    train, val = batches(folder, tmp_path, workers)
    with Server(folder, fault) as server:
        far_train, far_val = batches(server.url, tmp_path, workers)
    assert server.faults["drop"] >= 2 and server.faults["short"] >= 2
    for near, far in ((train, far_train), (val, far_val)):
        assert [b["key"] for b in far] == [b["key"] for b in near]
        assert not any(b["skipped"] for b in far)
    assert all((a["crops"][0] == b["crops"][0]).all() for a, b in zip(train, far_train, strict=True))
    assert far_train[0]["shard"][0].startswith(server.url)
    assert sum(len(b["key"]) for b in far_train) == 120 and sum(len(b["key"]) for b in far_val) == 12


@pytest.mark.parametrize("kind", ["drop", "short", "lie", "stall"])
def test_every_fault_is_tried_again(kind, folder, tmp_path):
    name = "train-000003.tar"
    with Server(folder, lambda number, _: kind if number == 0 else None) as server:
        cache = ShardCache(server.url, tmp_path, 1 << 30, first_wait=0.01, stall=0.5)
        path = cache.fetch(name, lambda aside: check(aside))
    assert path.read_bytes() == (folder / name).read_bytes() and server.requests[name] == 2
    assert sorted(p.name for p in cache.folder.iterdir()) == [".locks", name]


def check(path):
    assert len(index_shard(path)) == 3 or pytest.fail("a part was taken for the whole")


def test_a_shard_that_never_comes(folder, tmp_path, quick, caplog):
    with Server(folder, lambda number, name: "short" if name.endswith("4.tar") else None) as server:
        cache = ShardCache(server.url, tmp_path, 1 << 30)
        shards = ShardSet.find_remote(cache, "train-*.tar", "train_shards")
        reader = shards.reader()
        with pytest.raises(ShardError, match=rf"{server.url}/train-000004.tar could not be fetched in 6 attempts"):
            reader.read(12, ("png",))
        with pytest.raises(ShardError, match="could not be fetched"):
            reader.read(13, ("png",))  # is not tried again for each of its samples
        assert server.requests["train-000004.tar"] == 6 and "attempt 5 failed" in caplog.text
        assert reader.read(9, ("png",)).key == "00000009"
        reader.close()
    assert [p.name for p in cache.folder.iterdir() if p.is_file()] == ["train-000003.tar"]


def test_the_cache_keeps_its_size(folder, tmp_path):
    one = (folder / "train-000000.tar").stat().st_size
    with Server(folder) as server:
        cache = ShardCache(server.url, tmp_path, int(3.5 * one))
        shards = ShardSet.find_remote(cache, "train-*.tar", "train_shards")
        reader = shards.reader()
        for index in range(0, 60, 3):
            assert reader.read(index, ("cls",)).key == f"{index:08d}"
            assert sum(p.stat().st_size for p in cache.folder.glob("*.tar")) <= 3.5 * one
        assert reader.read(18, ("cls",)).key == "00000018"  # no longer in the folder, still open
        reader.close()
        assert server.requests["train-000006.tar"] == 1
        kept = {p.name for p in cache.folder.glob("*.tar")}
        assert kept <= {f"train-{i:06d}.tar" for i in range(16, 20)} and len(kept) == 3


def test_what_is_read_soon_is_fetched_in_the_meantime(folder, tmp_path):
    with Server(folder) as server:
        shards = ShardSet.find_remote(ShardCache(server.url, tmp_path, 1 << 30), "train-*.tar", "train_shards")
        reader = shards.reader()
        reader.look_ahead(np.array([31, 4, 30, 35]))
        wanted = {f"train-{number:06d}.tar" for number in (1, 10, 11)}
        deadline = time.time() + 20
        while {path.name for path in tmp_path.rglob("*.tar")} != wanted and time.time() < deadline:
            time.sleep(0.02)
        reader.look_ahead(np.array([30]))
        assert [reader.read(index, ("cls",)).key for index in (35, 30, 4)] == ["00000035", "00000030", "00000004"]
        reader.close()
        assert {n: c for n, c in server.requests.items() if n.endswith(".tar")} == dict.fromkeys(wanted, 1)


def test_what_the_disk_damaged_is_fetched_again(folder, tmp_path):
    with Server(folder) as server:
        cache = ShardCache(server.url, tmp_path, 1 << 30)
        shards = ShardSet.find_remote(cache, "train-*.tar", "train_shards")
        path = cache.fetch("train-000002.tar", lambda _: None)
        path.write_bytes(path.read_bytes()[:1000])
        assert shards.reader().read(6, ("cls",)).key == "00000006" and server.requests["train-000002.tar"] == 2


def test_roots_do_not_mix(folder, tmp_path):
    other = ShardCache("pipe:echo {name}", tmp_path, 1 << 30).fetch("train-000002.tar", lambda _: None)
    path = ShardCache(f"pipe:cat {folder}/{{name}}", tmp_path, 1 << 30).fetch("train-000002.tar", lambda _: None)
    assert other.read_bytes() == b"train-000002.tar\n" and path.read_bytes() == (folder / path.name).read_bytes()


def fetch_all(url, folder):
    shards = ShardSet.find_remote(ShardCache(url, folder, 1 << 30), "train-00000*.tar", "train_shards")
    for number in range(len(shards.paths)):
        shards.open(number)


def test_processes_share_what_one_fetched(folder, tmp_path):
    with Server(folder) as server:
        workers = [multiprocessing.Process(target=fetch_all, args=(server.url, tmp_path)) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert [w.exitcode for w in workers] == [0, 0, 0]
        assert {n: c for n, c in server.requests.items() if n.endswith(".tar")} == {
            f"train-00000{i}.tar": 1 for i in range(10)
        }


def test_a_pipe(folder, tmp_path):
    cache = ShardCache(f"pipe:cat {folder}/{{name}}", tmp_path, 1 << 30, attempts=2, first_wait=0.01)
    shards = ShardSet.find_remote(cache, "train-*.tar", "train_shards")
    assert len(shards) == 120 and shards.reader().read(100, ("cls",)).key == "00000100"
    with pytest.raises(ShardError, match=r"is a pipe without \{name\}"):
        ShardCache(f"pipe:cat {folder}/x.tar", tmp_path, 1)
    with pytest.raises(ShardError, match=r"could not be fetched in 2 attempts, the last: .*exit 1"):
        cache.fetch("absent.tar", lambda _: None)


@pytest.mark.parametrize("name", ["../../x.tar", "a/b.tar", "x;touch y", "$(touch y)", "a b.tar", "'", ""])
def test_names_that_are_more_than_names(name, tmp_path):
    info = {"splits": {"train": {"filenames": [name], "shard_lengths": [1]}}}
    (tmp_path / "_info.json").write_text(json.dumps(info))
    cache = ShardCache(f"pipe:cat {tmp_path}/{{name}}", tmp_path / "cache", 1 << 30)
    with pytest.raises(ShardError, match="is no file name"):
        ShardSet.find_remote(cache, "*", "train_shards")


def test_what_is_missing_is_named(folder, tmp_path, quick):
    unindexed = pytest.raises(
        ShardError, match=r"_info.json could not be fetched .*python -m datamodules.prepare index"
    )
    with Server(tmp_path) as server, unindexed:
        ShardSet.find_remote(ShardCache(server.url, tmp_path / "c", 1), "train-*.tar", "train_shards")
    with Server(folder) as server:
        cache = ShardCache(server.url, tmp_path / "c", 1)
        with pytest.raises(ShardError, match=r"2 shard\(s\) are missing from http.*the first: train-000040.tar"):
            ShardSet.find_remote(cache, "train-{000030..000041}.tar", "train_shards")
        with pytest.raises(ShardError, match=r"matches data.init_args.train_shards='imagenet-\*.tar' \(it names te"):
            ShardSet.find_remote(cache, "imagenet-*.tar", "train_shards")


def test_an_index_for_shards_that_have_none(folder, tmp_path):
    for path in folder.glob("*.tar"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    prepare.index(str(tmp_path), "train", "train-*.tar")
    prepare.index(str(tmp_path), "validation", "val*.tar")
    ours, theirs = (json.loads((f / "_info.json").read_text())["splits"] for f in (tmp_path, folder))
    for split in ("train", "validation"):
        assert {k: ours[split][k] for k in ("num_samples", "filenames", "shard_lengths")} == {
            k: theirs[split][k] for k in ("num_samples", "filenames", "shard_lengths")
        }
    with pytest.raises(ShardError, match="already holds the split 'train'"):
        prepare.index(str(tmp_path), "train", "train-*.tar")
