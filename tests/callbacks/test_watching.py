"""What is said of a run while it goes, and when it fails."""

import json
import re
import time
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks import CrashReport, GradientNorm, Progress, Throughput
from callbacks.curves import start_history


class Line(LightningModule):
    """y = wx with a gradient that is known."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        self.fails_at = fails_at

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == self.fails_at:
            raise RuntimeError("the device is on fire")
        loss = self.w @ batch["x"]
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


BATCHES = [
    {"x": torch.tensor([3.0 * i, 4.0 * i]), "key": [f"k{i}", f"l{i}"], "shard": [f"s{i}.tar"] * 2, "skipped": []}
    for i in range(1, 7)
]


def fit(out, module, **callbacks):
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, log_every_n_steps=1, enable_checkpointing=False, enable_model_summary=False,
        logger=TensorBoardLogger(out, name="run", version=""), num_sanity_val_steps=0,
        callbacks=[Throughput(2), GradientNorm(3), Progress(0, terminal=False), CrashReport()],
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None))


def test_curves(tmp_path, capfd):
    fit(tmp_path, Line())
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    # of (3i, 4i) the norm is 5i; every third step
    assert [(e.step, e.value) for e in events.Scalars("train/gradient_norm")] == [
        (2, 15.0),
        (5, 30.0),
        (8, 15.0),
        (11, 30.0),
    ]
    assert len(events.Scalars("perf/images_per_second")) == 6
    assert all(0 <= e.value <= 1 for e in events.Scalars("perf/data_wait"))
    memory = [e.value for e in events.Scalars("perf/memory_gib")]
    assert memory == sorted(memory) and 0.1 < memory[0] < 20
    assert [e.value for e in events.Scalars("perf/skipped")] == [0.0] * 6

    lines = [line for line in capfd.readouterr().out.splitlines() if re.match(r"\d{4}-\d\d-\d\d ", line)]
    assert len(lines) == 12 + 2  # of no seconds apart, and one at each epoch's end
    assert re.search(r" step 9 epoch 1 batch 3/6 train/loss \S+ .*data_wait \S+ .* left \S+ min$", lines[9])
    assert " step 12 epoch 1 done train/loss " in lines[-1]


def test_lines_of_an_evaluation(tmp_path, capfd):
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[Progress(0, terminal=False)], default_root_dir=tmp_path
    )
    loaders = [torch.utils.data.DataLoader(BATCHES[:n], batch_size=None) for n in (2, 3)]
    trainer.validate(Line(), loaders, verbose=False)
    lines = [line[20:] for line in capfd.readouterr().out.splitlines() if re.match(r"\d{4}-\d\d-\d\d ", line)]
    assert [line.partition(" left ")[0] for line in lines] == [
        f"validation set {number} batch {i + 1}/{total}" for number, total in enumerate((2, 3)) for i in range(total)
    ]


def test_a_terminal_gets_a_bar():
    assert Progress(terminal=True).is_enabled and not Progress(terminal=False).is_enabled
    bar = Progress(terminal=False)
    bar.enable()  # as Lightning does on the first rank
    assert not bar.is_enabled


def test_the_bar_reads_values_as_often_as_the_curves(tmp_path, monkeypatch):
    """Each reading waits for the device."""
    read = []
    monkeypatch.setattr(
        RichProgressBar, "get_metrics", lambda self, trainer, module: read.append(trainer.global_step) or {"x": 1}
    )
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, log_every_n_steps=4, enable_checkpointing=False, enable_model_summary=False,
        logger=False, callbacks=[Progress(terminal=True)],
    )  # fmt: skip
    trainer.fit(Line(), torch.utils.data.DataLoader(BATCHES, batch_size=None))
    assert {4, 8, 12} <= set(read) and not {2, 3, 7, 9, 10, 11} & set(read)


def test_crash_report(tmp_path, capfd):
    with pytest.raises(RuntimeError, match="on fire"):
        fit(tmp_path, Line(fails_at=8))
    report = json.loads((tmp_path / "run/crash-rank0.json").read_text())
    assert report["error"] == "RuntimeError: the device is on fire" and "training_step" in "".join(report["traceback"])
    assert {k: report[k] for k in ("stage", "epoch", "step", "batch", "rank")} == {
        "stage": "train", "epoch": 1, "step": 8, "batch": 2, "rank": 0,
    }  # fmt: skip
    assert (
        report["last_keys"] == ["k3", "l3"] and report["last_shard"] == "s3.tar" and report["last_shards"] == ["s3.tar"]
    )
    assert "step 8, last shard s3.tar: see " in capfd.readouterr().out


def test_a_crash_report_names_what_is_behind_an_error(tmp_path):
    """As when a worker's death is raised inside ``inspect.getfullargspec``, which makes a TypeError of anything."""

    class Dies(Line):
        def training_step(self, batch, batch_idx):
            try:
                raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
            except RuntimeError as error:
                raise TypeError("unsupported callable") from error

    with pytest.raises(TypeError):
        fit(tmp_path, Dies())
    assert json.loads((tmp_path / "run/crash-rank0.json").read_text())["error"] == (
        "TypeError: unsupported callable (after RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.)"
    )


def test_curves_of_a_run_whose_clock_was_put_back(tmp_path, monkeypatch):
    """TensorBoard reads event files in the order of the times in their names."""
    for start, now in ((0, 2_000_000_000), (4, 1_900_000_000), (6, 1_800_000_000)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        logger = TensorBoardLogger(tmp_path, name="run", version="")
        if start:
            start_history(SimpleNamespace(loggers=[logger]), start)
        for step in range(start, start + 5):
            logger.log_metrics({"x": float(now + step)}, step)
        logger.finalize("success")
    monkeypatch.undo()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [e.step for e in events.Scalars("x")] == list(range(11))
    assert [e.value > 1.85e9 for e in events.Scalars("x")] == [True] * 6 + [False] * 5


def test_wrong_arguments():
    with pytest.raises(ValueError, match="every_n_steps=0 must be at least 1"):
        GradientNorm(0)
