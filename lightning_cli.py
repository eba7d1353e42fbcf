"""Lightning's command line with our rules on it; :mod:`cli` is its light front."""

import ast
import difflib
import errno
import inspect
import os
import re
import signal
import sys
import traceback
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
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
from common.ranges import check_config

_load_yaml = get_loader("yaml")


def _load_unique(stream: str) -> Any:
    """YAML in which a key said twice in one mapping is an error."""
    _refuse_duplicates(yaml.compose(stream, Loader=yaml.SafeLoader))
    return _load_yaml(stream)


def _refuse_duplicates(node: yaml.Node | None) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise yaml.YAMLError(
                    f"the key {key.value!r} stands in line {seen[key.value]} and in line {line}; keep one"
                )
            seen[key.value] = line
            _refuse_duplicates(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item)


def explain(message: str) -> str:
    """jsonargparse's message cut to what is wrong and what to change."""
    keys = re.findall(r'[Pp]arser key "([\w.]+)"', message)
    *_, innermost = message.split("Problem with given class_path ")
    problem = re.match(r"'([\w.]+)': (.+?)(?: - Expected a | Given value type|$)", innermost)
    if problem:
        message = f"{'.'.join(keys)} ({problem[1]}): {problem[2]}".strip()
        if problem[1] in ("lightning.LightningModule", "lightning.LightningDataModule"):
            kind = "model" if problem[1].endswith("LightningModule") else "data"
            return (
                f"{kind}: arguments stand before any class_path; files apply in their order, so name the task first "
                "(-c task/dino.yaml), or give the class_path where the arguments are"
            )
        option = re.search(r"Option '([\w.]+)' is not accepted", problem[2])
        if option:
            message += _nearest(problem[1], option[1])
    if (given := _given_class(message)) is not None:
        others = [name for name in given if name not in ("class_path", "init_args")]
        where = ".".join(keys)
        if "class_path" not in given:
            return f"{where}: class_path is missing; it has {', '.join(map(str, given)) or 'nothing'}"
        if not isinstance(given["class_path"], str):
            return f"{where}.class_path={given['class_path']!r} is no name of a class"
        if others:
            return f"{where}: {others[0]} stands beside class_path and init_args; put arguments under {where}.init_args"
        return f"{where}.init_args={str(given['init_args'])[:80]}: wanted the arguments by name"
    if "backbone" in message and "required" in message:
        message += "; add a backbone overlay, such as -c configs/backbone/vim_small.yaml"
    elif "required: root" in message:
        message += "; set data.init_args.root to the folder with the shards, or add -c configs/data/imagenet.yaml"
    return message


def _given_class(message: str) -> dict[str, Any] | None:
    """What stood where a class with its arguments was wanted, if jsonargparse says no more than that it is none."""
    found = re.search(r"Not a valid subclass of .* Given value: (\{.*\})", message)
    try:
        given = ast.literal_eval(found[1]) if found else None
    except (SyntaxError, ValueError):
        return None
    return given if isinstance(given, dict) else None


ADDRESS = "    For further information visit"
"""Pydantic's last line."""


def reason_of(message: str) -> str:
    """The line of an error's message that says why.

    jsonargparse lists what each type of a union objects to, ours among it, and ends with the value; others end with the
    reason.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith(ADDRESS)]
    objections = [
        f"{line.removeprefix('- ')} {after}" if line.endswith(":") else line.removeprefix("- ")
        for line, after in zip(lines, [*lines[1:], ""], strict=True)
        if line.startswith("- ")
    ]
    objections = [line for line in objections if not line.startswith("Expected a ")]
    if "Does not validate against any of the Union subtypes" in message and objections:
        return objections[-1]
    return lines[-1] if lines else ""


def _nearest(class_path: str, option: str) -> str:
    """Which argument of a class was probably meant."""
    module, _, name = class_path.rpartition(".")
    known = list(inspect.signature(getattr(sys.modules[module], name)).parameters) if module in sys.modules else []
    near = difflib.get_close_matches(option, known, 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; allowed: {', '.join(known)}"


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


ADVICE = {
    r"Bus error|out of shared memory|unable to (write to|allocate shared memory|open shared memory)|/dev/shm": (
        "the shared memory of the loading processes is full: make /dev/shm larger (docker run --shm-size 16g), or "
        "lower data.init_args.num_workers and data.init_args.prefetch"
    ),
    r"DataLoader worker .*(exited unexpectedly|killed by signal)": (
        "a loading process was ended from outside, most often as memory ran out: lower data.init_args.num_workers, "
        "prefetch or batch_size"
    ),
    r"out of memory|can't allocate memory|Unable to allocate": (
        "memory is full: lower data.init_args.batch_size, or raise trainer.accumulate_grad_batches, or set "
        "model.init_args.grad_checkpointing true where the method has it"
    ),
}
"""What to change, by what torch says."""


def advice(error: BaseException) -> str:
    """One line of an error that is none of ours: its reason, and what to change where that is known."""
    reason = f"{type(error).__name__}: {reason_of(str(error))}".removeprefix("MisconfigurationException: ")
    known = next(
        (text for pattern, text in ADVICE.items() if re.search(pattern, f"{type(error).__name__} {error}")), None
    )
    return reason if known is None else f"{known} ({reason})"


def run(args: list[str] | None) -> None:
    """Runs one command, the process's own or ``args``; see :func:`cli.main`."""
    set_loader("yaml", _load_unique)
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


def origin(error: BaseException) -> BaseException:
    """The error that ended a run, where Lightning's clean-up after it failed too."""
    while "iter(combined_loader)" in str(error) and error.__context__ is not None:
        error = error.__context__
    return error


def last_line(error: BaseException) -> str:
    """What to change, in one line."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full ({error}); make room and go on with --ckpt_path auto"
    if isinstance(error, ValueError | FloatingPointError | OSError | yaml.YAMLError):
        return reason_of(str(error)) or type(error).__name__
    return advice(error)
