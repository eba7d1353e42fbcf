"""What a run is asked for, and which of it may change when it goes on from a checkpoint.

A checkpoint holds progress and settings. Progress is restored; settings are those asked for now. What changed is listed
and recorded; what would give the progress another meaning, such as the backbone, is refused.
"""

import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from lightning.pytorch.callbacks import Callback, Checkpoint
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

Settings = dict[str, Any]
"""Plain values by their keys on the command line, such as ``model.init_args.lr``."""

BACKBONE = "model.init_args.backbone."
PARTS = ("model", "data", "trainer", "seed_everything")
WEIGHTS = ("model.init_args.backbone_weights", "model.init_args.weights_key")
KEPT_BY_NULL = ("data.init_args.mean", "data.init_args.std")
"""Where null takes what the checkpoint says."""
SILENT = ("logger", "callbacks", "plugins", "default_root_dir", "enable_", "profiler", "log_every_n_steps", "barebones")
"""Of the trainer: what changes nothing that is computed."""


def whole(config: Mapping[str, Any]) -> Settings:
    """A configuration, such as ``config.yaml`` holds, by keys; entries of lists of groups by their number."""
    return dict(leaf for part in config for leaf in _leaves(part, config[part]))


def flat(config: Mapping[str, Any]) -> Settings:
    """Of a configuration the settings on which it hangs what a run computes."""
    settings = whole({part: config[part] for part in PARTS if part in config})
    return {key: value for key, value in settings.items() if not key.startswith(tuple(f"trainer.{s}" for s in SILENT))}


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    elif isinstance(value, list | tuple) and any(isinstance(inner, Mapping) for inner in value):
        for number, inner in enumerate(value):
            yield from _leaves(f"{key}.{number}", inner)
    else:
        yield key, list(value) if isinstance(value, tuple) else value


def of_checkpoint(checkpoint: Mapping[str, Any]) -> Settings:
    """What the run that wrote it was asked for; of a checkpoint of version 0.1 only the model's part is known."""
    if "settings" in checkpoint:
        return dict(checkpoint["settings"])
    given = dict(checkpoint.get("hyper_parameters", {}))
    class_path = given.pop("_class_path", None)
    known = flat({"model": {"init_args": {key: value for key, value in given.items() if not key.startswith("_")}}})
    return known | ({} if class_path is None else {"model.class_path": class_path})


def of_folder(folder: Path) -> Settings:
    """What the latest run in a folder was asked for; nothing where there was none."""
    paths = sorted(folder.glob("config*.yaml"), key=lambda path: path.stat().st_mtime_ns)
    return flat(yaml.safe_load(paths[-1].read_text(encoding="utf-8")) or {}) if paths else {}


class Change(NamedTuple):
    """A setting before and now."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.before)} -> {_shown(self.now)}"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def compare(before: Settings, now: Settings) -> list[Change]:
    """What differs, by key. An option that one side does not know at all, as versions differ, is left out."""
    changes = {}
    for key in sorted({*before, *now}):
        known = key in before and key in now
        above = next((k for k in _ancestors(key) if k in before or k in now), None)
        if known and not _same(key, before[key], now[key]) and not (key in KEPT_BY_NULL and now[key] is None):
            changes[key] = Change(key, before[key], now[key])
        elif not known and above is not None:  # such as null, which became a group of options
            changes[above] = Change(above, before.get(above, "options"), now.get(above, "options"))
        elif not known and before.get(key) != now.get(key) and any(name.isdigit() for name in key.split(".")):
            # an entry of a list that is longer on one side; null is what an option of an entry was before it came
            changes[key] = Change(key, before.get(key), now.get(key))
    return list(changes.values())


def _ancestors(key: str) -> Iterator[str]:
    names = key.split(".")
    return (".".join(names[:n]) for n in range(len(names) - 1, 0, -1))


def _same(key: str, before: Any, now: Any) -> bool:
    if key.endswith("class_path") and before != now and isinstance(before, str) and isinstance(now, str):
        return _class(before) is not None and _class(before) is _class(now)
    return bool(before == now)


def _class(path: str) -> Any:
    """The class of a path, which may be its older name; None where there is none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError):
        return None


def from_checkpoint(before: Settings, now: Settings) -> Settings:
    """What an evaluation of a checkpoint is asked for: weights that it does not name are those in the checkpoint."""
    if now.get(WEIGHTS[0]) is not None:
        return now
    return now | {key: before[key] for key in WEIGHTS if key in before and key in now}


def refused(changes: Iterable[Change], backbone: Any, module: Any) -> list[Change]:
    """What cannot be changed when a run goes on: the method, the backbone, and what the method names.

    Args:
        changes: of the settings.
        backbone: of this run; its ``free_on_resume`` names the arguments that may change.
        module: of this run; its ``fixed_on_resume`` names arguments that may not, ``*`` for any entry of a list.
    """
    free = getattr(backbone, "free_on_resume", ())
    fixed = [f"model.init_args.{name}".split(".") for name in getattr(module, "fixed_on_resume", ())]

    def is_fixed(key: str) -> bool:
        if key == "model.class_path":
            return True
        if key.startswith(BACKBONE):
            return _argument(key) not in free
        names = key.split(".")
        return any(all(a in (b, "*") for a, b in zip(pattern, names, strict=False)) for pattern in fixed)

    return [change for change in changes if is_fixed(change.key)]


def _argument(key: str) -> str:
    """Which argument of the backbone a key belongs to."""
    return key.removeprefix(BACKBONE).removeprefix("init_args.").split(".")[0]


def misshapen(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> str | None:
    """In words, the first of a model's tensors that a checkpoint lacks, holds in another shape, or has besides."""
    for name, tensor in now.items():
        if name not in before:
            return f"it does not hold {name} {tuple(tensor.shape)}"
        if before[name].shape != tensor.shape:
            return f"it holds {name} as {tuple(before[name].shape)}, this run needs {tuple(tensor.shape)}"
    extra = next((name for name in before if name not in now), None)
    return None if extra is None else f"it holds {extra} {tuple(before[extra].shape)}, which this run does not have"


def another_run(before: Settings, now: Settings, evaluation: bool, free: Iterable[str]) -> list[Change]:
    """What makes a run another than the one whose folder it would write into: method, model, and what it measures.

    Args:
        before, now: of the run before, and of this one.
        evaluation: whether it is no training.
        free: arguments with which a backbone is still the same.
    """
    data = [key for key in now if key.startswith("data.") and (key.endswith("shards") or key == "data.init_args.root")]
    weights = [f"model.init_args.{name}" for name in ("backbone_weights", "weights_key", "stream")]
    telling = {"model.class_path", "data.class_path", *weights, *data} if evaluation else {"model.class_path"}
    return [
        change
        for change in compare(before, now)
        if (change.key in telling and not _same_place(change))
        or (change.key.startswith(BACKBONE) and _argument(change.key) not in free)
    ]


def _same_place(change: Change) -> bool:
    """Whether a path is said in another way only."""
    paths = change.before, change.now
    return all(isinstance(p, str) for p in paths) and len({Path(p).expanduser().resolve() for p in paths}) == 1


# ---- callbacks and optimisers ---------------------------------------------------------------------------------------

PROGRESS = ("last_epoch", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step")
"""Of a scheduler's state; the rest are its settings."""


def arguments(callback: Callback) -> dict[str, Any]:
    """What a callback was made with and keeps in its state too, as EarlyStopping its patience."""
    names = inspect.signature(type(callback).__init__).parameters
    state = {} if isinstance(callback, Checkpoint) else callback.state_dict()
    return {name: value for name, value in vars(callback).items() if name in names and name in state}


def options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of an optimiser's groups of parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def put_back(optimizer: Optimizer, asked: list[dict[str, Any]]) -> None:
    """Gives an optimiser whose state was restored the settings that it was made with."""
    for group, settings in zip(optimizer.param_groups, asked, strict=True):
        for key in [key for key in group if key != "params" and key not in settings]:
            del group[key]
        group |= settings


def put_schedule_back(scheduler: LRScheduler, asked: Mapping[str, Any]) -> None:
    """The same for a scheduler of torch's: it stands where it stood, on the schedule that it was made with.

    Raises:
        ValueError: its settings are others than in the checkpoint, and its rate cannot be told from its position.
    """
    restored = scheduler.state_dict()
    changed = [key for key in asked if key not in PROGRESS and asked[key] != restored.get(key, asked[key])]
    if changed:
        scheduler.__dict__ |= {key: asked[key] for key in changed}
    if isinstance(scheduler, LambdaLR):  # a state does not say what its functions are
        rates = scheduler.get_lr()
    elif not changed:
        rates = scheduler.get_last_lr()
    elif hasattr(scheduler, "_get_closed_form_lr"):
        rates = scheduler._get_closed_form_lr()
    else:
        key = changed[0]
        raise ValueError(
            f"{type(scheduler).__name__}: {key} was {restored[key]} and is {asked[key]}, and this schedule cannot be "
            "taken up with another: keep what it was, or start a run of its own"
        )
    scheduler._last_lr = list(rates)
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
