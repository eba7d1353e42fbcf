"""Lightning's command line with our rules on it; :mod:`cli` is its light front."""

import os
import signal
import sys
import traceback
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

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
from common.messages import explain, last_line, origin
from common.ranges import check_config, check_seed
from common.yaml_files import check as check_yaml

_load_yaml = get_loader("yaml")


def _load_checked(stream: str) -> Any:
    check_yaml(stream)
    return _load_yaml(stream)


class Parser(LightningArgumentParser):
    """Ends with one line that says what to change, after the usage hint; takes no name for another."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"allow_abbrev": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        text = explain(" ".join(line.strip() for line in str(message).splitlines() if line.strip()))
        sys.stderr.write(f"see dinomamba --help, and --print_config for what the files make together\nerror: {text}\n")
        sys.exit(2)


NOTHING = (
    "lightning.LightningModule", "lightning.LightningDataModule", "lightning.pytorch.core.module.LightningModule",
    "lightning.pytorch.core.datamodule.LightningDataModule",
)  # fmt: skip
"""What a model or data module without a class path are taken for."""


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
        if config.get("ckpt_path") not in (None, "auto", "best", "last", "hpc"):
            path = Path(config["ckpt_path"])
            if not path.is_file():
                raise FileNotFoundError(f"ckpt_path={path}: there is no such file; auto takes the newest of the run")
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
        """``ckpt_path: auto`` is the newest whole checkpoint of the run's folder, or a fresh start."""
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        if "weights_only" in self._subcommand_method_arguments[subcommand]:
            kwargs["weights_only"] = True
        if kwargs.get("ckpt_path") == "auto":
            folder = run_folder(self.trainer) / "checkpoints"
            kwargs["ckpt_path"] = found = newest(folder)
            rank_zero_info(
                f"starting fresh: no whole checkpoint in {folder}" if found is None else f"resuming from {found}"
            )
        if not self.trainer.fast_dev_run:
            self._check_folder(subcommand)
        if kwargs.get("ckpt_path") not in (None, "best", "last", "hpc"):
            self._check_settings(subcommand, Path(kwargs["ckpt_path"]))
        return kwargs

    @cached_property
    def _record(self) -> RunRecord:
        return next(callback for callback in self.trainer.callbacks if isinstance(callback, RunRecord))

    def _check_folder(self, subcommand: str) -> None:
        """ValueError where the run would write over what another left in its folder."""
        folder = run_folder(self.trainer)
        before = settings.of_folder(folder)
        if changes := settings.another_run(before, self._record.settings, subcommand != "fit") if before else []:
            raise ValueError(
                f"{folder} holds another run ({changes[0]}): give this one a folder of its own, "
                "--trainer.logger.init_args.name NAME"
            )

    def _check_settings(self, subcommand: str, path: Path) -> None:
        """Lists what is asked for otherwise than of the run that wrote a checkpoint; ValueError for what cannot be."""
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        changes = settings.compare(settings.of_checkpoint(checkpoint), self._record.settings)
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
            _check_end(self.trainer.max_epochs, checkpoint, path)

    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        # what follows does not depend on how many random numbers the construction took
        config = self.config[self.subcommand] if self.subcommand else self.config
        seed_everything(config["seed_everything"], workers=True, verbose=False)


def _check_end(max_epochs: int | None, checkpoint: Mapping[str, Any], path: Path) -> None:
    """ValueError where a run was to end before the place at which its checkpoint stands."""
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
