"""Loads and saves backbone weights in every format in use, strictly and without running code from the file.

Read: Dino-Mamba's and DINO's full checkpoints (``student`` / ``teacher``), flat backbone files (DINO, timm), this
project's Lightning checkpoints, and safetensors. Written: Dino-Mamba's layout, or safetensors.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backbones.base import Backbone
from backbones.tokens import resample_pos_embed

# what published checkpoints hold beside tensors
_SAFE = [
    argparse.Namespace,
    np.dtype,
    np.ndarray,
    np.float64,
    np.float32,
    np.int64,
    type(np.dtype("float64")),
    type(np.dtype("float32")),
    type(np.dtype("int64")),
    np._core.multiarray.scalar,
    (np._core.multiarray.scalar, "numpy.core.multiarray.scalar"),
]


def read(path: str | Path) -> dict[str, Any]:
    """A checkpoint's content, on the CPU. ValueError where it is missing, damaged, or would run code."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"no weights at {path}: give the path of a .pth, .ckpt or .safetensors file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals(_SAFE):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler and zip reader raise many types
        raise ValueError(f"{path} cannot be read as weights ({type(error).__name__}: {error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, wanted a dict of tensors or a checkpoint")
    return content


def _strip(state: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def backbone_state(content: dict[str, Any], key: str, path: str | Path) -> tuple[str, dict[str, Tensor]]:
    """The format of a checkpoint's content and the backbone's tensors in it.

    Args:
        content: as :func:`read` returns it.
        key: which network of a full checkpoint, ``teacher`` or ``student``.
        path: for messages.
    """
    if "pytorch-lightning_version" in content:
        state = content["state_dict"]
        for prefix in (f"{key}.backbone.", "backbone."):
            if found := _strip(state, prefix):
                return "lightning", found
        raise ValueError(f"{path} is a Lightning checkpoint without {key}.backbone.* or backbone.* tensors")
    networks = [k for k, v in content.items() if isinstance(v, dict) and any(isinstance(t, Tensor) for t in v.values())]
    if key in networks:
        state = {k.removeprefix("module."): v for k, v in content[key].items()}
        return "dino", _strip(state, "backbone.") or state
    if "teacher" in networks or "student" in networks:
        raise ValueError(f"{path} has no network {key!r}; it holds {', '.join(networks)}")
    if content and all(isinstance(v, Tensor) for v in content.values()):
        return "flat", _strip(content, "backbone.") or content
    raise ValueError(f"{path}: unknown format with keys {', '.join(map(str, list(content)[:8]))}")


def _fit_positions(backbone: Backbone, state: dict[str, Tensor], path: str | Path) -> None:
    """Resamples patch positions learned on another grid, in place."""
    grid, wanted = getattr(backbone, "grid_size", None), getattr(backbone, "pos_embed", None)
    pos = state.get("pos_embed")
    if grid is None or wanted is None or pos is None or pos.shape == wanted.shape or pos.shape[2:] != wanted.shape[2:]:
        return
    extra = wanted.shape[1] - grid[0] * grid[1]
    side = round((pos.shape[1] - extra) ** 0.5)
    if side * side + extra != pos.shape[1]:
        raise ValueError(f"{path}: pos_embed of {pos.shape[1]} tokens is no square grid and {extra} extra tokens")
    patches = resample_pos_embed(pos[:, extra:].float(), (side, side), grid).to(pos.dtype)
    state["pos_embed"] = torch.cat([pos[:, :extra], patches], 1)


def load(backbone: Backbone, path: str | Path, key: str = "teacher") -> str:
    """Loads a checkpoint into a backbone and returns the format found.

    Positions learned at another image size are resampled. Everything else must match one to one.

    Args:
        backbone: what to fill.
        path: the file.
        key: which network of a full checkpoint, ``teacher`` or ``student``.

    Raises:
        ValueError: naming missing and unexpected keys and differing shapes; nothing is loaded then.
    """
    kind, state = backbone_state(read(path), key, path)
    state = dict(state)
    own = backbone.state_dict()
    if all(k.startswith("model.") for k in own) and not any(k.startswith("model.") for k in state):
        state = {f"model.{k}": v for k, v in state.items()}  # a timm model's own file, for TimmModel
    _fit_positions(backbone, state, path)
    problems = []
    if missing := sorted(own.keys() - state.keys()):
        problems.append(f"missing: {_some(missing)}")
    if unexpected := sorted(state.keys() - own.keys()):
        problems.append(f"unexpected: {_some(unexpected)}")
    shapes = [
        f"{k} is {tuple(state[k].shape)}, wanted {tuple(own[k].shape)}"
        for k in own.keys() & state.keys()
        if state[k].shape != own[k].shape
    ]
    if shapes:
        problems.append(f"shapes: {_some(sorted(shapes))}")
    if problems:
        raise ValueError(f"{path} ({kind}) does not fit {type(backbone).__name__}: {'; '.join(problems)}")
    backbone.load_state_dict(state)
    return kind


def _some(names: list[str], most: int = 6) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def export(backbone: Backbone, path: str | Path) -> None:
    """Writes a backbone as Dino-Mamba's checkpoints hold it (``teacher`` → ``backbone.*``); flat for .safetensors.

    The file is written aside and renamed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().cpu().contiguous() for k, v in backbone.state_dict().items()}
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.suffix == ".safetensors":
            save_file(state, aside)
        else:
            torch.save({"teacher": {f"backbone.{k}": v for k, v in state.items()}}, aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
