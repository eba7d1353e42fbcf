"""How images were fed to weights: what files and timm's configurations say of normalisation, size and interpolation."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
from safetensors import safe_open

from backbones.checkpoints import is_timm_name
from backbones.weight_files import fetch, is_safetensors, read

KEY = "pixels"
"""Where our checkpoints and exports keep these facts."""


@dataclass(frozen=True)
class Pixels:
    """What weights were trained on.

    Args:
        mean, std: by which pixels in [0, 1] are normalised, a number a channel.
        source: who says so.
        size: (height, width) in pixels; None where it is not said.
        interpolation: of the evaluation's resizing, in timm's terms; None where it is not said.
        crop_pct: side of the evaluation's crop over the resized image's shorter one.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str
    size: tuple[int, int] | None = None
    interpolation: str | None = None
    crop_pct: float | None = None

    def normalizes_as(self, mean: Sequence[float], std: Sequence[float]) -> bool:
        """Whether these are the same numbers, to three digits."""
        pairs = [*zip(self.mean, mean, strict=False), *zip(self.std, std, strict=False)]
        return len(mean) == len(self.mean) and all(abs(a - b) < 1e-3 for a, b in pairs)

    def record(self) -> dict[str, Any]:
        """For a file: plain values, without ``source``."""
        known = {key: value for key, value in asdict(self).items() if key != "source" and value is not None}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in known.items()}

    def __str__(self) -> str:
        more = [] if self.size is None else [f"{self.size[0]} x {self.size[1]} pixels"]
        more += [] if self.interpolation is None else [f"{self.interpolation} interpolation"]
        more += [] if self.crop_pct is None else [f"crop_pct {self.crop_pct:g}"]
        return ", ".join([f"mean {shown(self.mean)}", f"std {shown(self.std)}", *more])


def shown(values: Sequence[float]) -> str:
    """``[0.5, 0.5, 0.5]``, to four digits."""
    return f"[{', '.join(f'{value:.4g}' for value in values)}]"


def of_record(record: object, source: str) -> Pixels | None:
    """What a file's record or a configuration of timm's says; None where it does not tell mean and std."""
    if not isinstance(record, Mapping):
        return None
    mean, std = (_numbers(record.get(key)) for key in ("mean", "std"))
    if mean is None or std is None or len(mean) != len(std):
        return None
    size = record.get("size") or tuple(record.get("input_size") or ())[-2:]
    known = {key: record.get(key) for key in ("interpolation", "crop_pct")}
    return Pixels(mean, std, source, (int(size[0]), int(size[1])) if len(size) == 2 else None, **known)


def _numbers(value: object) -> tuple[float, ...] | None:
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(v, int | float) for v in value):
        return tuple(float(v) for v in value) or None
    return None


def of_timm(name: str) -> Pixels | None:
    """What timm's configuration of a model says of its published weights."""
    config = timm.get_pretrained_cfg(name)
    return None if config is None else of_record(config.to_dict(), f"timm's configuration of {name}")


def of_source(source: str | Path) -> Pixels | None:
    """What a file, an ``hf://`` address or a timm name says; None where it says nothing.

    Known are our checkpoints and exports, timm's training checkpoints, and timm's ``config.json`` beside a hub's file.
    """
    if is_timm_name(source):
        return of_timm(str(source))
    path = fetch(source)
    return _of_content(path, str(source)) or _of_neighbour(path)


def _of_content(path: Path, source: str) -> Pixels | None:
    if is_safetensors(path):
        with safe_open(path, "pt") as file:
            return of_record(json.loads((file.metadata() or {}).get(KEY, "null")), source)
    content = read(path, mmap=True)
    args = content.get("args")
    return of_checkpoint(content, source) or of_record(
        vars(args) if isinstance(args, argparse.Namespace) else args, source
    )


def of_checkpoint(content: Mapping[str, Any], source: str) -> Pixels | None:
    """What a checkpoint or export of ours says."""
    settings = content.get("settings")  # before there was a record, they said it whenever they were written
    init_args = {}
    if isinstance(settings, Mapping):
        init_args = {key: settings.get(f"data.init_args.{key}") for key in ("mean", "std")}
    return of_record(content.get(KEY), source) or of_record(init_args, source)


HUB_NAMES = ("model.safetensors", "pytorch_model.bin")
"""Files of which timm's ``config.json`` speaks; other files may lie beside it."""


def _of_neighbour(path: Path) -> Pixels | None:
    """timm's ``config.json`` in the folder of the hub's file."""
    if path.name not in HUB_NAMES:
        return None
    config = path.parent / "config.json"
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = content.get("pretrained_cfg", content) if isinstance(content, dict) else None
    return of_record(found, str(config))
