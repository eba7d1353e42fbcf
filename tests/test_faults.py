"""What goes wrong on clusters, done to real runs: each ends soon, says why, and loses nothing."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from callbacks.checkpoint_files import FORMAT, AtomicCheckpointIO, fault
from tests.test_resume import finish, history, many, same, start, state, wait_for_step, whole  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WORKERS = ("--data.init_args.num_workers", "2", "--data.init_args.prefetch", "2")


def failed(process, within=150):
    """What was said by a run that must end by itself, and not well."""
    text, _ = process.communicate(timeout=within)
    assert process.returncode != 0, text[-3000:]
    return text


@pytest.fixture
def data(many, tmp_path):  # noqa: F811
    """Shards that a test may harm."""
    return Path(shutil.copytree(many, tmp_path / "data"))


@pytest.fixture
def tmpfs(tmp_path):
    """Mounts a small file system of its own."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def crash(out, rank=0):
    return json.loads((out / f"run/crash-rank{rank}.json").read_text())


def test_the_disk_is_full(many, whole, tmpfs):  # noqa: F811
    process = start(many, tmpfs)
    wait_for_step(tmpfs, 4, process)
    with (tmpfs / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    text = failed(process)
    last = text.splitlines()[-1]  # a point of a curve may come before the checkpoint
    assert "No space left on device" in last and last.startswith(("error: checkpoint", "error: the disk is full")), text
    assert fault(tmpfs / "run/checkpoints/last.ckpt") is None and 4 <= state(tmpfs)[0] < 30
    (tmpfs / "filler").unlink()
    assert "resuming from" in finish(start(many, tmpfs))
    assert same(state(tmpfs), state(whole)) and history(tmpfs) == history(whole)


def test_a_shard_goes_during_the_run(data, tmp_path):
    process = start(data, tmp_path, "dino", *WORKERS)
    wait_for_step(tmp_path, 2, process)
    for path in sorted(data.glob("train-*.tar"))[3:]:
        path.unlink()
    text = failed(process)
    assert "is gone; restore it or take it out of _info.json" in text
    report = crash(tmp_path)
    assert (
        report["step"] >= 2 and report["last_keys"] and ".tar" in report["last_shard"] and "is gone" in report["error"]
    )


def test_a_shard_is_cut_during_the_run(data, tmp_path):
    process = start(data, tmp_path, "dino", *WORKERS)
    wait_for_step(tmp_path, 2, process)
    for path in data.glob("train-*.tar"):
        os.truncate(path, path.stat().st_size // 3)
    text = failed(process)
    assert "is cut off; fetch or write the shard again" in text or "is no whole tar" in text


def corrupt(folder, count):
    """Overwrites the beginnings of some training images."""
    from datamodules.shard_index import index_shard

    done = []
    for path in sorted(folder.glob("train-*.tar"))[:count]:
        sample = index_shard(path)[1]
        with path.open("r+b") as file:
            file.seek(sample.members["png"][0])
            file.write(b"\xff" * 64)
        done.append((path.name, sample.key))
    return done


def test_unreadable_images(data, tmp_path):
    """One of 80 (1 %): the strict run stops and names it, the other leaves it out, and says how many."""
    ((shard, key),) = corrupt(data, 1)
    (tmp_path / "strict").mkdir()
    text = failed(start(data, tmp_path / "strict", "dino", *WORKERS))
    assert f"the image of sample {key!r} in shard" in text and shard in text and "policy=skip" in text
    (tmp_path / "skip").mkdir()
    text = finish(start(data, tmp_path / "skip", "dino", *WORKERS, "--data.init_args.policy", "skip"))
    record = json.loads((tmp_path / "skip/run/run.json").read_text())
    assert record["skipped_samples"] == 3 and "left out 3 samples so far" in text  # once in each epoch
    steps = [step for step, _ in history(tmp_path / "skip")["train/loss"]]
    assert steps == list(range(30))


def test_one_rank_cannot_read(data, tmp_path):
    """The other does not wait for it."""
    ((_, key),) = corrupt(data, 1)
    text = failed(start(data, tmp_path, "dino", *WORKERS, "--trainer.devices", "2", "--trainer.strategy", "ddp"))
    assert f"the image of sample {key!r} in shard" in text
    reports = sorted((tmp_path / "run").glob("crash-rank*.json"), key=lambda path: path.stat().st_mtime)
    assert key in json.loads(reports[0].read_text())["error"] and time.time() - reports[0].stat().st_mtime < 60


def test_a_worker_is_killed(many, tmp_path):  # noqa: F811
    process = start(many, tmp_path, "dino", *WORKERS)
    wait_for_step(tmp_path, 2, process)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    assert len(children) >= 2
    began = time.time()
    os.kill(int(children[0]), signal.SIGKILL)
    text = failed(process)
    # by its signal handler, or, where that was swallowed, by the loader that waits for the worker
    assert time.time() - began < 60 and re.search(r"DataLoader worker.*(killed by signal: Killed|exited unexp)", text)
    assert "DataLoader worker" in crash(tmp_path)["error"] and fault(tmp_path / "run/checkpoints/last.ckpt") is None


def test_a_rank_is_killed(many, tmp_path):  # noqa: F811
    process = start(many, tmp_path, "dino", "--trainer.devices", "2", "--trainer.strategy", "ddp")
    wait_for_step(tmp_path, 4, process)
    children = subprocess.run(["pgrep", "-f", "-P", str(process.pid), "cli"], capture_output=True, text=True).stdout
    began = time.time()
    os.kill(int(children.split()[0]), signal.SIGKILL)
    text = failed(process)
    assert time.time() - began < 60, text[-2000:]
    assert fault(tmp_path / "run/checkpoints/last.ckpt") is None and state(tmp_path)[0] >= 4


def test_the_clock_is_put_back(many, whole, tmp_path, monkeypatch):  # noqa: F811
    """By a day, between two starts: what was written before looks later than what is written now."""
    process = start(many, tmp_path)
    wait_for_step(tmp_path, 13, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    at = state(tmp_path)[0]
    for path in (tmp_path / "run/checkpoints").glob("*.ckpt"):
        os.utime(path, (time.time() + 86400,) * 2)
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock/sitecustomize.py").write_text(
        "import time\nnow = time.time\ntime.time = lambda: now() - 86400\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "clock"))
    assert 13 <= at < 30 and "last.ckpt" in finish(start(many, tmp_path))
    assert same(state(tmp_path), state(whole)) and history(tmp_path) == history(whole)
    times = [int(path.name.split(".")[3]) for path in (tmp_path / "run").glob("events*")]
    assert len(times) == 2 and max(times) < time.time() - 80_000  # the earlier file was put before the later one


def test_two_runs_in_one_folder(many, tmp_path):  # noqa: F811
    first = start(many, tmp_path)
    wait_for_step(tmp_path, 1, first)
    first.send_signal(signal.SIGSTOP)  # so that it is still there
    text = failed(start(many, tmp_path))
    first.send_signal(signal.SIGCONT)
    assert f"another run is training in {tmp_path / 'run'} (process {first.pid} on" in text.splitlines()[-1]
    assert "give this one another trainer.logger.init_args.name" in text
    finish(first)
    assert state(tmp_path)[0] == 30


def test_a_folder_that_cannot_be_written(many, tmpfs):  # noqa: F811
    process = start(many, tmpfs)  # leaves its YAML files there
    process.kill()
    process.communicate()
    for path in tmpfs.glob("run*"):
        shutil.rmtree(path)
    command = process.args
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    from tests.tiny_runs import ROOT

    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("error:") and "Read-only file system" in last and str(tmpfs) in last


def test_a_checkpoint_that_cannot_be_used(many, tmp_path):  # noqa: F811
    later = {"pytorch-lightning_version": "2.6", "global_step": 3, "state_dict": {}, "dinomamba_format": FORMAT + 1}
    path = tmp_path / "later.ckpt"
    AtomicCheckpointIO().save_checkpoint(later, path)
    text = failed(start(many, tmp_path, "dino", "--ckpt_path", str(path)))
    assert f"error: ckpt_path={path} cannot be used: it is of format {FORMAT + 1}" in text.splitlines()[-1]
    evil = tmp_path / "evil.ckpt"
    torch.save({"pytorch-lightning_version": "2.6", "x": Command(str(tmp_path / "ran"))}, evil)
    text = failed(start(many, tmp_path, "dino", "--ckpt_path", str(evil)))
    assert f"error: ckpt_path={evil} cannot be used" in text.splitlines()[-1] and not (tmp_path / "ran").exists()
    text = failed(start(many, tmp_path, "dino", "--ckpt_path", str(tmp_path / "none.ckpt")))
    assert "none.ckpt: there is no such file" in text.splitlines()[-1]


class Command:
    """Runs when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)
