"""Checkpoints are whole or not there, and the newest whole one is found."""

import logging
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from callbacks.checkpoint_files import FORMAT, AtomicCheckpointIO, fault, newest
from callbacks.checkpoints import Checkpoints
from callbacks.preemption import Preempted
from tests.tiny_runs import ROOT


def content(step=1, **more):
    return {
        "pytorch-lightning_version": "2.6",
        "global_step": step,
        "state_dict": {"w": torch.full((1000,), float(step))},
    } | more


def test_a_write_replaces_in_one_step(tmp_path, monkeypatch):
    path = tmp_path / "deep/last.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint(content(1), path)
    seen = []
    replace = Path.replace

    def watched(self, target):
        seen.append(
            (torch.load(self, weights_only=True)["global_step"], torch.load(target, weights_only=True)["global_step"])
        )
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    io.save_checkpoint(content(2), path)
    assert seen == [(2, 1)]  # whole aside while the old one still stood
    assert torch.load(path, weights_only=True)["global_step"] == 2
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]


FULL = """
import resource, signal, sys, torch
from callbacks.checkpoint_files import AtomicCheckpointIO
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    AtomicCheckpointIO().save_checkpoint({"w": torch.zeros(100_000)}, sys.argv[1])
except OSError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_good_one(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(content(1), path)
    run = subprocess.run([sys.executable, "-c", FULL, str(path)], cwd=ROOT, capture_output=True, text=True)
    assert f"checkpoint {path} could not be written (" in run.stdout and "File too large" in run.stdout, (
        run.stdout + run.stderr
    )
    assert "the one before it is untouched" in run.stdout
    assert fault(path) is None and [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


class Command:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_what_is_passed_over(tmp_path, caplog):
    io = AtomicCheckpointIO()
    good = tmp_path / "good.ckpt"
    io.save_checkpoint(content(5), good)
    bad = {
        "truncated": lambda p: p.write_bytes(good.read_bytes()[: good.stat().st_size // 2]),
        "empty": lambda p: p.write_bytes(b""),
        "foreign": lambda p: torch.save({"model": torch.zeros(3)}, p),
        "newer": lambda p: io.save_checkpoint(content(9, dinomamba_format=FORMAT + 1), p),
        "malicious": lambda p: torch.save({"pytorch-lightning_version": "2.6", "x": Command(str(tmp_path / "ran"))}, p),
        "pickle": lambda p: p.write_bytes(pickle.dumps(Command(str(tmp_path / "ran")))),
    }

    def flip(path):
        data = bytearray(good.read_bytes())
        at = data.index(torch.tensor(5.0).numpy().tobytes() * 8)
        data[at + 5] ^= 0xFF
        path.write_bytes(data)

    bad["one byte"] = flip
    for name, write in bad.items():
        write(tmp_path / f"{name}.ckpt")
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path) == good
    told = {name: next(r.getMessage() for r in caplog.records if f"{name}.ckpt" in r.getMessage()) for name in bad}
    assert "is damaged" in told["one byte"] and "no whole checkpoint" in told["truncated"]
    assert f"is of format {FORMAT + 1} and this version of dinomamba reads up to {FORMAT}" in told["newer"]
    assert "no checkpoint of a run" in told["foreign"] and not (tmp_path / "ran").exists()
    assert newest(tmp_path / "nowhere") is None


def test_the_newest_is_not_told_by_the_clock(tmp_path):
    """It was put back: what was written later looks older."""
    io = AtomicCheckpointIO()
    for step, name, when in ((10, "epoch=0", 5000), (20, "epoch=1", 4000), (23, "last", 3000)):
        io.save_checkpoint(content(step), tmp_path / f"{name}.ckpt")
        os.utime(tmp_path / f"{name}.ckpt", (when, when))
    assert newest(tmp_path).name == "last.ckpt"
    (tmp_path / "last.ckpt").write_bytes(b"")
    assert newest(tmp_path).name == "epoch=1.ckpt"
    # a fresh start in a folder that holds another run's further checkpoints goes on with its own
    io.save_checkpoint(content(3), tmp_path / "last.ckpt")
    assert newest(tmp_path).name == "last.ckpt"


class Ten(LightningModule):
    """One epoch of ten steps; the step ``asks`` gets SIGUSR1."""

    def __init__(self, asks=None):
        super().__init__()
        self.w, self.asks = torch.nn.Parameter(torch.ones(1)), asks

    def training_step(self, batch, batch_idx):
        if batch_idx == self.asks:
            os.kill(os.getpid(), signal.SIGUSR1)
        return (self.w * batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("minutes", "asks", "expected"),
    [(0.0, None, [*range(1, 9), 10]), (60.0, None, [10]), (None, None, [10]), (None, 3, [4, 10])],
)
def test_when_they_are_written(minutes, asks, expected, tmp_path, monkeypatch):
    """By the clock at every step but the one before the epoch's last, not before the hour is over, at the epoch's end
    only; and when a signal asks."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    before, saved = signal.getsignal(signal.SIGUSR1), []
    monkeypatch.setattr(Trainer, "save_checkpoint", lambda self, path, *_, **__: saved.append(self.global_step))
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, default_root_dir=tmp_path, callbacks=[Checkpoints(minutes)],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Ten(asks), torch.utils.data.DataLoader(torch.ones(10, 1), batch_size=1))
    assert saved == expected and trainer.global_step == 10 and signal.getsignal(signal.SIGUSR1) == before


class Insists(Callback):
    """What SLURM does to a job that is being requeued."""

    def on_exception(self, trainer, pl_module, exception):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_requeued_run_says_so_before_it_is_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr("callbacks.checkpoints.requeue", lambda: "SLURM starts job 7 again")
    monkeypatch.setattr(Trainer, "save_checkpoint", lambda *_, **__: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, default_root_dir=tmp_path, callbacks=[Checkpoints(), Insists()],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    at_barriers = []
    monkeypatch.setattr(trainer.strategy, "barrier", lambda *_: at_barriers.append(capsys.readouterr().err))
    try:
        with pytest.raises(Preempted) as stop:
            trainer.fit(Ten(3), torch.utils.data.DataLoader(torch.ones(10, 1), batch_size=1))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    said = "error: SLURM starts job 7 again; --ckpt_path auto goes on from the last checkpoint\n"
    assert stop.value.exit_code == 128 + signal.SIGUSR1 and trainer.global_step == 4
    assert sum(text.endswith(said) for text in at_barriers) == 1


def test_wrong_arguments():
    with pytest.raises(ValueError, match="every_n_steps=0 must be at least 1, or null"):
        Checkpoints(every_n_steps=0)
