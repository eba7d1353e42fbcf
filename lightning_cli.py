"""Lightning's command line with our rules on it; :mod:`cli` is its light front."""

import os
import signal
import sys
import traceback
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jsonargparse import get_loader, set_loader
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

import backbones  # noqa: F401  # so that YAML can name classes without their module
import callbacks  # noqa: F401
import datamodules  # noqa: F401
import lightning_modules  # noqa: F401
from callbacks import RunRecord, settings
from callbacks.checkpoint_files import fault, newest
from callbacks.preemption import Preempted
from callbacks.run_folder import run_folder
from common.memory import keep_freed_memory
from common.messages import OneLine, last_line, origin
from common.ranges import check_config, check_seed
from common.yaml_files import check as check_yaml

_load_yaml = get_loader("yaml")


def _load_checked(stream: str) -> Any:
    check_yaml(stream)
    return _load_yaml(stream)


class Parser(OneLine, LightningArgumentParser):
    """Lightning's, that ends with one line."""

    hint = "see dinomamba --help, and --print_config for what the files make together"


NOTHING = (
    "lightning.LightningModule", "lightning.LightningDataModule", "lightning.pytorch.core.module.LightningModule",
    "lightning.pytorch.core.datamodule.LightningDataModule",
)  # fmt: skip
"""What a model or data module without a class path are taken for."""


OWN_CHECKPOINTS = ("auto", "last", "best")
"""Names of a run's own checkpoints."""


class CLI(LightningCLI):
    """Subclass mode for task and data; nothing but YAML and flags."""

    def __init__(self, args: ArgsType = None) -> None:
        super().__init__(
            LightningModule,
            LightningDataModule,
            save_config_callback=RunRecord,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=Parser,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            args=args,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        super().parse_arguments(parser, args)
        command = self.config.get("subcommand")
        check_seed((self.config[command] if command else self.config).get("seed_everything"))

    def _parse_ckpt_path(self) -> None:
        """Checks the file. Lightning would also put its hyper-parameters in the place of those asked for now."""
        config = self.config[self.config["subcommand"]] if self.config.get("subcommand") else {}
        if config.get("ckpt_path") not in (None, *OWN_CHECKPOINTS):
            path = Path(config["ckpt_path"])
            if not path.is_file():
                raise FileNotFoundError(
                    f"ckpt_path={path}: there is no such file; {', '.join(OWN_CHECKPOINTS)} are the run's own"
                )
            if (why := fault(path)) is not None:
                raise ValueError(f"ckpt_path={path} cannot be used: {why}")

    def before_instantiate_classes(self) -> None:
        """Refuses what would swallow a typo, and a job whose tasks would not find each other."""
        name, tasks = os.environ.get("SLURM_JOB_NAME"), os.environ.get("SLURM_STEP_NUM_TASKS", "1")
        if name in ("bash", "interactive") and tasks != "1":
            raise ValueError(
                f"SLURM's --job-name={name} with {tasks} tasks: Lightning takes a job of that name for a shell and "
                "would train in each task by itself; give the job another name"
            )
        config = self.config[self.subcommand] if self.subcommand else self.config
        for key in ("model", "data"):
            if not config.get(key) or config[key].get("class_path") in NOTHING:
                raise ValueError(f"{key} is not set; add -c task/….yaml, which names both, and a file that fills it")
            if "dict_kwargs" in config[key]:
                raise ValueError(f"{key}.dict_kwargs is not allowed; put arguments under {key}.init_args")
        check_config(config.as_dict())

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Checks what is gone on from, and the folder that is written into."""
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        if "weights_only" in self._subcommand_method_arguments[subcommand]:
            kwargs["weights_only"] = True
        if kwargs.get("ckpt_path") in OWN_CHECKPOINTS:
            kwargs["ckpt_path"] = self._own_checkpoint(kwargs["ckpt_path"], subcommand)
        if not self.trainer.fast_dev_run:
            self._check_folder(subcommand, kwargs.get("ckpt_path") is not None)
        limit = {"validate": "limit_val_batches", "test": "limit_test_batches"}.get(subcommand)
        if limit is not None and getattr(self.trainer, limit) == 0:
            raise ValueError(f"trainer.{limit}=0: nothing would be evaluated")
        part = getattr(self.model, "trained_part", "")
        if kwargs.get("ckpt_path") is not None:
            self._check_settings(subcommand, Path(kwargs["ckpt_path"]))
        elif part and subcommand in ("validate", "test"):
            raise ValueError(
                f"{subcommand} without a checkpoint would score a {part} that was never trained: give --ckpt_path "
                "RUN/checkpoints/last.ckpt (last, best: this run's own)"
            )
        return kwargs

    def _own_checkpoint(self, name: str, subcommand: str) -> Path | None:
        """``auto``: the newest whole checkpoint of the run's folder, or for a fit a fresh start; ``last``; ``best``."""
        folder = run_folder(self.trainer) / "checkpoints"
        path = folder / f"{name}.ckpt"
        found = newest(folder) if name == "auto" else path if path.is_file() else None
        if found is not None and name != "auto" and (why := fault(found)) is not None:
            raise ValueError(f"ckpt_path={name}: {found} cannot be used: {why}")
        if found is None and (name != "auto" or subcommand != "fit"):
            what = "no whole checkpoint" if name == "auto" else f"no {path.name}"
            raise FileNotFoundError(
                f"ckpt_path={name}: there is {what} in {folder}; name the run (--trainer.logger.init_args.name NAME), "
                "or give a file's path"
            )
        rank_zero_info(
            f"starting fresh: no whole checkpoint in {folder}" if found is None else f"resuming from {found}"
        )
        return found

    @cached_property
    def _record(self) -> RunRecord:
        return next(callback for callback in self.trainer.callbacks if isinstance(callback, RunRecord))

    def _check_folder(self, subcommand: str, of_checkpoint: bool) -> None:
        """ValueError where the run would write over what another left in its folder."""
        folder = run_folder(self.trainer)
        before = settings.of_folder(folder)
        free = getattr(getattr(self.model, "backbone", None), "free_on_resume", ())
        now, evaluation = self._record.settings, subcommand != "fit"
        now = settings.from_checkpoint(before, now) if evaluation and of_checkpoint else now
        changes = settings.another_run(before, now, evaluation, free) if before else []
        if changes:
            option = "--trainer.logger.init_args.name NAME" if self.trainer.logger else "--trainer.default_root_dir DIR"
            raise ValueError(f"{folder} holds another run ({changes[0]}): give this one a folder of its own, {option}")

    def _check_settings(self, subcommand: str, path: Path) -> None:
        """Lists what is asked for otherwise than of the run that wrote a checkpoint; ValueError for what cannot be."""
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        before, now = settings.of_checkpoint(checkpoint), self._record.settings
        changes = settings.compare(before, now if subcommand == "fit" else settings.from_checkpoint(before, now))
        model = [change for change in changes if change.key.startswith("model.")]
        if found := settings.refused(model, getattr(self.model, "backbone", None), self.model):
            raise ValueError(
                f"{path} is of a run with another {found[0].key}: {', '.join(map(str, found))}; keep what it was, or "
                "start a run of its own, which may take its weights"
            )
        if (why := settings.misshapen(checkpoint["state_dict"], self.model.state_dict())) is not None:
            others = f" ({', '.join(map(str, model))})" if model else ""
            raise ValueError(f"{path} does not fit this model{others}: {why}")
        if subcommand == "fit":
            self._record.changed = changes
            if changes:
                rank_zero_info(f"asked for otherwise than before, and taken: {', '.join(map(str, changes))}")
            _check_end(self.trainer.max_epochs, self.trainer.max_steps, checkpoint, path)

    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        # what follows does not depend on how many random numbers the construction took
        config = self.config[self.subcommand] if self.subcommand else self.config
        seed_everything(config["seed_everything"], workers=True, verbose=False)


def _check_end(max_epochs: int | None, max_steps: int, checkpoint: Mapping[str, Any], path: Path) -> None:
    """ValueError where a run was to end before the place at which its checkpoint stands."""
    steps = int(checkpoint["global_step"])
    if 0 <= max_steps < steps:
        raise ValueError(
            f"trainer.max_steps={max_steps}: {path} stands after step {steps}; set at least that, or take an earlier "
            "checkpoint"
        )
    loop = checkpoint["loops"]["fit_loop"]
    inside = not loop["epoch_loop.batch_progress"]["is_last_batch"]
    done = int(checkpoint["epoch"]) + (0 if inside else 1)
    if max_epochs not in (None, -1) and max_epochs < done + inside:
        where = f"in epoch {done}, counted from 0" if inside else f"at the end of epoch {done - 1}, counted from 0"
        raise ValueError(
            f"trainer.max_epochs={max_epochs}: {path} stands {where}; set at least {done + inside}, or take a "
            "checkpoint of an earlier epoch"
        )


def run(args: list[str] | None) -> None:
    """Runs one command, the process's own or ``args``; see :func:`cli.main`."""
    set_loader("yaml", _load_checked)
    keep_freed_memory()
    try:
        CLI(args)
    except Preempted as stop:  # callbacks.Checkpoints has said why
        sys.exit(stop.exit_code)
    except SIGTERMException:
        sys.stderr.write("error: stopped by SIGTERM\n")
        sys.exit(128 + signal.SIGTERM)
    except Exception as error:
        traceback.print_exc()
        sys.stderr.write(f"error: {last_line(origin(error))}\n")
        sys.exit(1)
