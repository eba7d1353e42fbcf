"""A run that is cut off and resumed is the run that was not: to the last bit."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from datamodules import prepare
from tests.key_log import read_keys
from tests.processes import free_port
from tests.tiny_runs import BACKBONES, CONFIGS, EXTRA, ROOT, TINY

DROP = BACKBONES["vim"].replace("depth: 2", "depth: 2, drop_path: 0.3")


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    out = tmp_path_factory.mktemp("many")
    prepare.demo(str(out), train=80, validation=16, samples_per_shard=9)
    return out


def command(shards, out, task="dino", *extra):
    """A tiny run of 3 epochs x 10 steps with stochastic depth and a checkpoint every 2 steps."""
    files = {
        "tiny": TINY.format(root=shards).replace("max_epochs: 2", "max_epochs: 3"),
        "extra": EXTRA[task],
        "vim": f"model: {{init_args: {{backbone: {{class_path: backbones.{DROP}}}}}}}",
    }
    for name, text in files.items():
        (out / f"{name}.yaml").write_text(text)
    base = yaml.safe_load((CONFIGS / "base.yaml").read_text())
    next(c for c in base["trainer"]["callbacks"] if c["class_path"] == "callbacks.Checkpoints")["init_args"] |= {
        "every_n_steps": 2,
        "keep_every_n_epochs": 1,
        "check_every": 2,
    }
    base["trainer"]["callbacks"] += [
        {"class_path": "callbacks.GradientNorm", "init_args": {"every_n_steps": 3}},
        {"class_path": "tests.key_log.KeyLog"},
    ]
    (out / "base.yaml").write_text(yaml.safe_dump(base))
    configs = [
        out / "base.yaml",
        CONFIGS / f"task/{task}.yaml",
        CONFIGS / "data/demo.yaml",
        *(out / f"{n}.yaml" for n in ("vim", "tiny", "extra")),
    ]
    return [
        sys.executable, "-m", "cli", "fit", *[a for f in configs for a in ("-c", str(f))], "--ckpt_path", "auto",
        "--trainer.logger.init_args.save_dir", str(out), "--trainer.logger.init_args.name", "run", *extra,
    ]  # fmt: skip


def start(shards, out, task="dino", *extra):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return subprocess.Popen(
        command(shards, out, task, *extra),
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process, timeout=200):
    text, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, text[-3000:]
    return text


def state(out):
    content = torch.load(out / "run/checkpoints/last.ckpt", weights_only=True, map_location="cpu")
    return content["global_step"], content["state_dict"], content["optimizer_states"]


def history(out):
    """Every curve as TensorBoard reads it, without timings."""
    events = EventAccumulator(str(out / "run"), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    curves = {
        tag: [(e.step, e.value) for e in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if not tag.startswith("perf/")
    }
    return curves | {
        tag: [(e.step, e.encoded_image_string) for e in events.Images(tag)] for tag in events.Tags()["images"]
    }


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.fixture(scope="module")
def whole(many, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    text = finish(start(many, out))
    assert "starting fresh" in text
    return out


def wait_for_step(out, step, process):
    """Until a checkpoint of at least that step is there."""
    path = out / "run/checkpoints/last.ckpt"
    deadline = time.time() + 120
    while time.time() < deadline and process.poll() is None:
        if path.is_file() and torch.load(path, weights_only=True, map_location="cpu")["global_step"] >= step:
            return
        time.sleep(0.05)


def wait_for_a_write(out, process):
    """Until a checkpoint is being written, aside."""
    deadline = time.time() + 20
    while (
        time.time() < deadline and process.poll() is None and not list((out / "run/checkpoints").glob(".last.ckpt.*"))
    ):
        pass


def interrupted(many, out, kills, rng, *extra):
    """Kills a run once a checkpoint of each step is there, a random moment later; starts it again each time.

    Every second SIGKILL waits for a checkpoint to be written. Returns how many of them left a part of one.
    """
    reached = killed = torn = 0
    for step, how in kills:
        process = start(many, out, "dino", *extra)
        step = max(step, reached + 1)  # not while it starts
        wait_for_step(out, step, process)
        if how == signal.SIGKILL and killed % 2:
            wait_for_a_write(out, process)
        else:
            time.sleep(rng.uniform(0, 0.2))
        if how == signal.SIGKILL:
            os.killpg(process.pid, how)
        else:  # one rank is told, all stop
            process.send_signal(how)
        text = process.communicate(timeout=60)[0]
        if process.returncode == 0:  # on a busy machine the run may end before the last kill
            break
        killed += 1
        torn += bool(list((out / "run/checkpoints").glob(".last.ckpt.*")))
        assert process.returncode in (-how, 128 + how), text[-3000:]
        at = state(out)[0]
        assert at >= max(reached, step)  # never behind a checkpoint that was there
        reached = at
    assert killed >= len(kills) - 1
    assert "resuming from" in finish(start(many, out, "dino", *extra))
    return torn


@pytest.mark.slow
def test_killed_inside_epochs_and_resumed(many, whole, tmp_path):
    kills = [(3, signal.SIGKILL), (9, signal.SIGTERM), (17, signal.SIGKILL)]
    interrupted(many, tmp_path, kills, random.Random(0))
    assert same(state(tmp_path), state(whole))
    expected = history(whole)
    assert [step for step, _ in expected["train/loss"]] == list(range(30)) and len(expected["val/knn_top1"]) == 3
    assert history(tmp_path) == expected


@pytest.mark.parametrize("epoch", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_resumed_from_the_end_of_an_epoch(epoch, many, whole, tmp_path):
    finish(start(many, tmp_path, "dino", "--ckpt_path", str(whole / f"run/checkpoints/epoch={epoch}.ckpt")))
    assert same(state(tmp_path), state(whole))
    first = 10 * (epoch + 1)
    assert history(tmp_path) == {
        tag: rest for tag, curve in history(whole).items() if (rest := [point for point in curve if point[0] >= first])
    }


TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
WORKER = ("--data.init_args.num_workers", "1")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_probe_of_features_killed_inside_an_epoch(processes, many, tmp_path, monkeypatch):
    """What was encoded is encoded again; the orders go on."""
    extra = ["--data.init_args.view", "features"]
    extra += ["--trainer.devices", str(processes), "--trainer.strategy", "ddp"] if processes > 1 else []
    (tmp_path / "whole").mkdir()
    finish(start(many, tmp_path / "whole", "linear_probe", *extra))
    monkeypatch.setenv("SECONDS_A_BATCH", "0.2")
    process = start(many, tmp_path, "linear_probe", *extra)
    wait_for_step(tmp_path, 14, process)
    monkeypatch.undo()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    at = state(tmp_path)[0]
    assert 14 <= at < 30 and at % 10
    assert "resuming from" in finish(start(many, tmp_path, "linear_probe", *extra))
    assert same(state(tmp_path), state(tmp_path / "whole")) and history(tmp_path) == history(tmp_path / "whole")
    keys = [key for line in read_keys(tmp_path / "whole/run") if line["epoch"] == 1 for key in line["keys"]]
    assert len(keys) == len(set(keys)) == 80


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_ten_times(processes, how, many, tmp_path):
    """In eight epochs. Two processes are plain ddp over gloo; when cut off, their data come from a worker each."""
    long = ("--trainer.max_epochs", "8")
    whole, cut, rng = tmp_path / "whole", tmp_path / "cut", random.Random(int(how))
    whole.mkdir()
    cut.mkdir()
    finish(start(many, whole, "dino", *long, *(TWO if processes == 2 else ())))
    extra = (*long, *TWO, *WORKER) if processes == 2 else long
    torn = interrupted(many, cut, [(step, how) for step in sorted(rng.sample(range(1, 65), 10))], rng, *extra)
    assert torn or how == signal.SIGTERM
    assert same(state(cut), state(whole)) and history(cut) == history(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "numbers"), [("dino", (2, 1)), ("dino", (1, 2)), ("supervised", (2, 1)), ("linear_probe", (1, 2))]
)
def test_another_number_of_processes_after_a_kill(task, numbers, many, tmp_path):
    """Each sample at most once in the epoch that was interrupted, every step once, as many steps as planned."""
    before, after = ((*TWO[:1], str(n), *TWO[2:]) for n in numbers)
    process = start(many, tmp_path, task, *before)
    wait_for_step(tmp_path, 13, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    at = state(tmp_path)[0]
    epoch, done = divmod(at, 10)
    assert 13 <= at < 30
    kept = [line for line in read_keys(tmp_path / "run") if (line["epoch"], line["batch"]) < (epoch, done)]
    for path in (tmp_path / "run").glob("keys-*"):
        path.unlink()
    text = finish(start(many, tmp_path, task, *after))
    assert "resuming from" in text and state(tmp_path)[0] == 30
    rest = read_keys(tmp_path / "run")
    assert {line["rank"] for line in kept} == set(range(numbers[0])) and {line["rank"] for line in rest} == set(
        range(numbers[1])
    )
    assert_once(kept + rest, range(3))
    assert [step for step, _ in history(tmp_path)["train/loss"]] == list(range(30))

    boundary = tmp_path / "boundary"  # from the first epoch's end, which the killed run left
    boundary.mkdir()
    finish(start(many, boundary, task, *after, "--ckpt_path", str(tmp_path / "run/checkpoints/epoch=0.ckpt")))
    assert_once(read_keys(boundary / "run"), (1, 2))


def assert_once(lines, epochs):
    for number in epochs:
        keys = [key for line in lines if line["epoch"] == number for key in line["keys"]]
        assert len(keys) == 80 == len(set(keys))
