"""What a run was: configuration, versions, revision, shards, world size."""

import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_info

from callbacks.run_folder import claim, run_folder
from callbacks.settings import Change, Settings, arguments, flat, options, put_back, put_schedule_back, whole
from common import native
from common.files import write_json, write_text

PACKAGES = (
    "dinomamba",
    "torch",
    "torchvision",
    "lightning",
    "timm",
    "torchmetrics",
    "albumentations",
    "webdataset",
    "mamba-ssm",
)


def git_revision() -> str:
    """The checkout's commit, with ``-dirty`` where files differ from it; ``unknown`` outside a checkout."""
    here = Path(__file__).parent
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=here,
            capture_output=True,
            encoding="utf-8",
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


class RunRecord(SaveConfigCallback):
    """Writes ``config.yaml`` (resolved) and ``run.json`` into the run's folder at the start.

    A second start in the same folder is a resumed run: an identical configuration is left as it is, a different one
    is kept as ``config-2.yaml`` and so on. Nothing is overwritten. Two runs cannot train in one folder at a time.

    Checkpoints hold the settings; a run that goes on from one with others says, and records, what changed, and trains
    with those of now: see :mod:`callbacks.settings`. With ``fast_dev_run`` nothing is written.
    """

    changed: Sequence[Change] = ()
    """What the run was asked for otherwise than the one that wrote the checkpoint."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # before a checkpoint's callbacks are restored
        self._callbacks = [(callback, arguments(callback)) for callback in getattr(trainer, "callbacks", [])]
        if self.already_saved or not trainer.is_global_zero or trainer.fast_dev_run:
            return
        self.already_saved = True
        folder = run_folder(trainer)
        self._claim = claim(folder) if stage == "fit" else None
        text = self._configuration
        number = 1
        while (path := folder / ("config.yaml" if number == 1 else f"config-{number}.yaml")).exists():
            if path.read_text(encoding="utf-8") == text:
                break
            number += 1
        else:
            write_text(path, text)
        record = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "stage": stage,
            "config": path.name,
            "revision": git_revision(),
            "versions": package_versions(),
            "world_size": trainer.world_size,
            "nodes": trainer.num_nodes,
            "device": str(trainer.strategy.root_device),
            "precision": trainer.precision,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "global_batch_size": getattr(trainer.datamodule, "batch_size", None),
            "shards": getattr(trainer.datamodule, "shard_files", []),
            "settings": whole(yaml.safe_load(self._configuration)),
            "changed_on_resume": [change._asdict() for change in self.changed],
        }
        self._path = folder / ("run.json" if number == 1 else f"run-{number}.json")
        self._record, self._start = record, time.perf_counter()
        write_json(self._path, record)

    @cached_property
    def _configuration(self) -> str:
        return self.parser.dump(self.config, skip_none=False)

    @cached_property
    def settings(self) -> Settings:
        """What the run is asked for."""
        return flat(yaml.safe_load(self._configuration))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["settings"] = self.settings

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before a checkpoint's optimisers are restored."""
        self._asked = [options(optimizer) for optimizer in trainer.optimizers]
        self._schedules = [dict(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]

    def _take_what_is_asked(self, trainer: Trainer) -> None:
        """Restored callbacks, optimisers and schedulers get their settings of now."""
        changed = [
            Change(f"callbacks.{type(callback).__name__}.{name}", vars(callback)[name], value)
            for callback, asked in self._callbacks
            for name, value in asked.items()
            if vars(callback).get(name, value) != value
        ]
        for callback, asked in self._callbacks:
            vars(callback).update(asked)
        if changed:
            rank_zero_info(f"asked for otherwise than before, and taken: {', '.join(map(str, changed))}")
            if trainer.is_global_zero and self.already_saved:
                self._record["changed_on_resume"] += [change._asdict() for change in changed]
        for optimizer, asked in zip(trainer.optimizers, self._asked, strict=True):
            put_back(optimizer, asked)
        for config, asked in zip(trainer.lr_scheduler_configs, self._schedules, strict=True):
            put_schedule_back(config.scheduler, asked)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says, and adds to the record, what the learning rate came to for this global batch."""
        if trainer.ckpt_path is not None:
            self._take_what_is_asked(trainer)
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        rates = sorted({float(group.get("initial_lr", group["lr"])) for group in groups})
        batch, accumulate = getattr(trainer.datamodule, "batch_size", None), trainer.accumulate_grad_batches
        shown = ", ".join(f"{rate:.6g}" for rate in rates[:4]) + (", …" if len(rates) > 4 else "")
        rank_zero_info(
            f"global batch {batch} over {trainer.world_size} processes x {accumulate} accumulated batches; "
            f"effective learning rate {shown}"
        )
        if trainer.is_global_zero and self.already_saved:
            self._record["effective_lr"] = rates
            write_json(self._path, self._record)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Adds how long the run took and which shards it read."""
        if not trainer.is_global_zero or not self.already_saved:
            return
        if self._claim is not None:
            self._claim.close()
        self._record |= {
            "seconds": round(time.perf_counter() - self._start, 1),
            "shards": getattr(trainer.datamodule, "shard_files", []),
            "skipped_samples": getattr(trainer.datamodule, "skipped", 0),
            "compiled": sorted({*native.loaded}),  # C that was there to be taken; else Python was
        }
        write_json(self._path, self._record)
