"""What numbers in a configuration may be, by the arguments' names, which mean the same everywhere."""

import dataclasses
import importlib
import inspect
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

COUNT, SIZE = "[0, inf)", "[1, inf)"
FRACTION, POSITIVE, NON_NEGATIVE = "[0, 1]", "(0, inf)", "[0, inf)"

RANGES: dict[str, str] = {
    # backbones
    "img_size": SIZE, "patch_size": SIZE, "embed_dim": SIZE, "depth": SIZE, "num_heads": SIZE, "in_chans": SIZE,
    "mlp_ratio": POSITIVE, "drop_path": "[0, 1)", "num_registers": COUNT, "d_state": SIZE, "headdim": SIZE,
    "expand": SIZE, "d_conv": SIZE, "chunk_size": SIZE, "cls_reduce": SIZE,
    "dt_min": POSITIVE, "dt_max": POSITIVE, "A_init_range": POSITIVE,
    # methods
    "lr": NON_NEGATIVE, "min_lr": NON_NEGATIVE, "warmup_epochs": COUNT, "weight_decay": NON_NEGATIVE,
    "weight_decay_end": NON_NEGATIVE, "clip_grad": NON_NEGATIVE, "global_batch_size": SIZE, "knn_k": SIZE,
    "out_dim": SIZE, "hidden_dim": SIZE, "bottleneck_dim": SIZE, "head_layers": SIZE, "momentum": FRACTION,
    "momentum_end": FRACTION, "warmup_teacher_temp": POSITIVE, "teacher_temp": POSITIVE, "student_temp": POSITIVE,
    "warmup_teacher_temp_epochs": COUNT, "center_momentum": FRACTION, "freeze_last_layer_epochs": COUNT,
    "num_global_crops": SIZE, "label_smoothing": "[0, 1)", "num_classes": SIZE, "k": SIZE, "temperature": POSITIVE,
    "n_last_blocks": SIZE, "pictures": COUNT, "ignore_index": "(-inf, inf)", "chunk": SIZE, "max_heads": SIZE,
    "tolerance": NON_NEGATIVE, "blocks": "(-inf, inf)", "block": "(-inf, inf)",
    "outlier_factor": POSITIVE, "lazy_entropy": FRACTION, "lazy_share": FRACTION,
    # data
    "batch_size": SIZE, "num_workers": COUNT, "prefetch": SIZE, "shuffle_window": SIZE, "seed": COUNT, "resize": SIZE,
    "crop": SIZE, "probe_size": SIZE, "mean": "(-inf, inf)", "std": POSITIVE, "cache_gib": POSITIVE,
    "max_value": POSITIVE, "rgb": COUNT,
    "probe_scale": "(0, 1]", "global_size": SIZE, "local_size": SIZE, "num_local": COUNT, "global_scale": "(0, 1]",
    "local_scale": "(0, 1]", "jitter": NON_NEGATIVE, "jitter_prob": FRACTION, "gray_prob": FRACTION,
    "blur_sigma": NON_NEGATIVE, "blur_probs": FRACTION, "solarize_prob": FRACTION, "flip_prob": FRACTION,
    "largest_id": COUNT,
    # callbacks
    "minutes": NON_NEGATIVE, "every_n_steps": SIZE, "keep_every_n_epochs": SIZE, "check_every": SIZE, "count": SIZE,
    "every_n_epochs": SIZE,
}  # fmt: skip
"""Intervals; an argument that is a list has each of its entries in it, and null is for those whose type allows it."""

PAIRS = ("A_init_range", "probe_scale", "global_scale", "local_scale", "blur_sigma")
"""Least and most."""

ZERO_FOR_NONE = {"num_classes"}
"""In backbones: 0 is a model without a classifier."""

TRAINER: dict[str, str] = {
    "max_epochs": "[-1, inf)", "min_epochs": COUNT, "max_steps": "[-1, inf)", "min_steps": COUNT,
    "accumulate_grad_batches": SIZE, "check_val_every_n_epoch": SIZE, "log_every_n_steps": COUNT,
    "limit_train_batches": NON_NEGATIVE, "limit_val_batches": NON_NEGATIVE, "limit_test_batches": NON_NEGATIVE,
    "limit_predict_batches": NON_NEGATIVE, "overfit_batches": NON_NEGATIVE, "num_sanity_val_steps": "[-1, inf)",
    "reload_dataloaders_every_n_epochs": COUNT, "gradient_clip_val": NON_NEGATIVE, "val_check_interval": POSITIVE,
    "num_nodes": SIZE,
}  # fmt: skip
"""The same for Lightning's trainer."""

DURATIONS = {"max_time": "DD:HH:MM:SS", "val_check_interval": "a number in (0, inf), or DD:HH:MM:SS"}
"""Of Lightning's trainer: what may be a time, as text or as the parts of a timedelta."""
PARTS = ("days", "hours", "minutes", "seconds", "weeks", "milliseconds", "microseconds")

SEED = "[0, 4294967295]"
"""NumPy's."""

OURS = ("backbones", "lightning_modules", "datamodules", "callbacks", "heads")


class Interval(NamedTuple):
    """Of real numbers."""

    low: float
    high: float
    with_low: bool
    with_high: bool

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float) or math.isnan(value) or math.isinf(value):
            return False
        above = value >= self.low if self.with_low else value > self.low
        return above and (value <= self.high if self.with_high else value < self.high)


def interval(text: str) -> Interval:
    """``[0, 1)`` and the like."""
    found = re.fullmatch(r"([\[(])(-?[\w.]+), (-?[\w.]+)([\])])", text)
    assert found is not None, text
    return Interval(float(found[2]), float(found[3]), found[1] == "[", found[4] == "]")


def check_seed(seed: object) -> None:
    """ValueError for a seed that NumPy does not take."""
    _check("seed_everything", seed, SEED)


def check_config(config: Mapping[str, Any]) -> None:
    """ValueError for the first number of a run's configuration that is not in its range, and the first null in place of
    something; naming the key, what was found, and what is allowed."""
    for name, text in TRAINER.items():
        _check(f"trainer.{name}", config.get("trainer", {}).get(name), text)
    for name, text in DURATIONS.items():
        _check_duration(f"trainer.{name}", config.get("trainer", {}).get(name), text)
    for part in ("model", "data"):
        _check_class(part, config.get(part))
    for number, callback in enumerate(config.get("trainer", {}).get("callbacks") or []):
        _check_class(f"trainer.callbacks.{number}", callback)


def _check_class(key: str, config: Any) -> None:
    """A ``class_path`` with its ``init_args``, and those inside."""
    if not isinstance(config, Mapping) or not isinstance(config.get("class_path"), str):
        return
    module, _, name = config["class_path"].rpartition(".")
    ours = module.split(".")[0] in OURS
    cls = getattr(importlib.import_module(module), name, None) if ours else None
    arguments = {f"{key}.init_args.{argument}": value for argument, value in (config.get("init_args") or {}).items()}
    _check_group(arguments, typing.get_type_hints(cls.__init__) if cls is not None else None, module)


def _check_group(arguments: Mapping[str, Any], hints: Mapping[str, Any] | None, module: str) -> None:
    """Arguments by their whole keys. Without type hints, of somebody else's class, only groups inside are looked at."""
    for key, value in arguments.items():
        name = key.rpartition(".")[2]
        wanted = Any if hints is None else hints.get(name, Any)
        group = next((a for a in (wanted, *typing.get_args(wanted)) if dataclasses.is_dataclass(a)), None)
        if value is None and not _takes_none(wanted):
            raise ValueError(f"{key}: null; allowed: {inspect.formatannotation(wanted)}")
        if isinstance(value, Mapping) and "class_path" in value:
            _check_class(key, value)
        elif (
            group is not None and isinstance(value, list | str | int | float) and typing.get_origin(wanted) is not list
        ):
            what = "a list" if isinstance(value, list) else "one value"
            raise ValueError(f"{key}={value}: {what}; wanted the options of {inspect.formatannotation(group)}")
        elif group is not None:
            of = typing.get_type_hints(group)
            entries = (
                {f"{key}.{number}": inner for number, inner in enumerate(value)} if isinstance(value, list) else {}
            )
            for place, inner in entries.items() if entries else ((key, value),):
                if isinstance(inner, Mapping):
                    _check_group({f"{place}.{option}": given for option, given in inner.items()}, of, module)
        elif hints is not None and (text := RANGES.get(name)) is not None:
            _check(key, value, COUNT if name in ZERO_FOR_NONE and module.startswith("backbones") else text)
            if name in PAIRS and isinstance(value, list | tuple) and not (len(value) == 2 and value[0] <= value[1]):
                raise ValueError(f"{key}={value}: wanted two numbers, the least and the most")


def _check(key: str, value: Any, text: str) -> None:
    numbers = [value] if isinstance(value, int | float) else list(_numbers(value))
    for number in numbers:
        if number not in interval(text):
            raise ValueError(f"{key}={value}; allowed: {'each in ' if number is not value else ''}{text}")


def _check_duration(key: str, value: Any, text: str) -> None:
    """ValueError for a time that Lightning would refuse without naming the key, or of no length."""
    if isinstance(value, str) and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", value.strip()):
        raise ValueError(f"{key}={value!r}; allowed: {text}, days first")
    if isinstance(value, str) and not re.search("[1-9]", value):
        raise ValueError(f"{key}={value!r}: no time at all; allowed: {text}")
    if isinstance(value, Mapping):
        if not value or not set(value) <= set(PARTS):
            raise ValueError(f"{key}={dict(value)}; allowed: numbers called {', '.join(PARTS[:4])}, or {text}")
        if not sum(value.values()) > 0:
            raise ValueError(f"{key}={dict(value)}: no time at all; allowed: {text}")


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, list | tuple):
        for inner in value:
            if isinstance(inner, int | float):
                yield inner
            else:
                yield from _numbers(inner)


def _takes_none(annotation: Any) -> bool:
    if annotation is Any or annotation is type(None):
        return True
    origin = typing.get_origin(annotation)
    return origin in (typing.Union, types.UnionType) and any(_takes_none(a) for a in typing.get_args(annotation))


def as_markdown() -> str:
    """All ranges as a page."""
    lines = [
        "# What numbers may be",
        "",
        "Made by `python -m common.ranges`. A number outside of its range ends a run before anything is built; a",
        "list has each of its entries in it. `null` is for arguments whose type allows it; no number may be infinite.",
        "",
        "| argument | range |",
        "| --- | --- |",
        *(f"| `{name}` | {text} |" for name, text in sorted(RANGES.items())),
        "| `num_classes` of a backbone | [0, inf); 0 for no classifier |",
        "",
        "| of `trainer` | range |",
        "| --- | --- |",
        *(f"| `{name}` | {text} |" for name, text in sorted(TRAINER.items()) if name not in DURATIONS),
        *(f"| `{name}` | {text}; or numbers called {', '.join(PARTS[:4])} |" for name, text in DURATIONS.items()),
        "",
        f"`seed_everything` is in {SEED}.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
