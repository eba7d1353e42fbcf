"""Loads and saves backbone weights in every format in use, strictly; ``checkpoints.py`` tells the formats apart.

For people: ``python -m backbones.weights inspect FILE`` and ``... convert FILE OUT``.
"""

import argparse
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor

from backbones.base import Backbone
from backbones.checkpoints import CLASSIFIERS, open_checkpoint, read
from backbones.tokens import resample_pos_embed
from common.files import written_aside


def _fit_positions(backbone: Backbone, state: dict[str, Tensor], source: str | Path) -> None:
    """Resamples patch positions learned on another grid, in place; a timm model's as timm does."""
    model, pos = getattr(backbone, "model", None), state.get("model.pos_embed")
    if pos is not None and pos.ndim == 3 and hasattr(getattr(model, "patch_embed", None), "grid_size"):
        (h, w), wanted = model.patch_embed.grid_size, model.pos_embed
        if pos.shape[1] != wanted.shape[1] and pos.shape[2] == wanted.shape[2]:
            extra = wanted.shape[1] - h * w
            state["model.pos_embed"] = resample_abs_pos_embed(pos, [h, w], num_prefix_tokens=extra)
        return
    grid, wanted = getattr(backbone, "grid_size", None), getattr(backbone, "pos_embed", None)
    pos = state.get("pos_embed")
    if grid is None or wanted is None or pos is None or pos.shape == wanted.shape or pos.shape[2:] != wanted.shape[2:]:
        return
    extra = wanted.shape[1] - grid[0] * grid[1]
    side = round((pos.shape[1] - extra) ** 0.5)
    if side * side + extra != pos.shape[1]:
        raise ValueError(f"{source}: pos_embed of {pos.shape[1]} tokens is no square grid and {extra} extra tokens")
    learned, here = (backbone.extra_positions_at(g) for g in ((side, side), grid))
    patches = torch.cat([pos[:, :learned], pos[:, learned + extra :]], 1)
    patches = resample_pos_embed(patches.float(), (side, side), grid).to(pos.dtype)
    state["pos_embed"] = torch.cat([patches[:, :here], pos[:, learned : learned + extra], patches[:, here:]], 1)


def load(backbone: Backbone, source: str | Path, key: str = "teacher") -> str:
    """Loads a checkpoint into a backbone and returns the format found.

    Positions learned at another image size are resampled, and a classifier that the backbone has no place for is
    left out. Everything else must match one to one.

    Args:
        backbone: what to fill.
        source: a path, ``hf://owner/repo/file``, or a timm name.
        key: which network of a full checkpoint, ``teacher`` or ``student``.

    Raises:
        ValueError: naming missing and unexpected keys and differing shapes; nothing is loaded then.
    """
    kind, state = open_checkpoint(source, key)
    own = backbone.state_dict()
    if all(k.startswith("model.") for k in own) and not any(k.startswith("model.") for k in state):
        state = {f"model.{k}": v for k, v in state.items()}  # a timm model's own file, for TimmModel
    classifiers = tuple(f"{stem}{name}" for stem in ("", "model.") for name in CLASSIFIERS)
    state = {k: v for k, v in state.items() if k in own or not k.startswith(classifiers)}
    _fit_positions(backbone, state, source)
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
        raise ValueError(f"{source} ({kind}) does not fit {type(backbone).__name__}: {'; '.join(problems)}")
    backbone.load_state_dict(state)
    return kind


def _some(names: list[str], most: int = 6) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def linear(source: str | Path) -> tuple[Tensor, Tensor]:
    """The weight (C, F) and bias (C) of a published linear classifier (DINO's and Dino-Mamba's evaluation).

    Raises:
        ValueError: where the file holds anything else.
    """
    content = read(source)
    state = content.get("state_dict", content)
    found = {k.removeprefix("module.").removeprefix("linear."): v for k, v in state.items() if isinstance(v, Tensor)}
    if (
        set(found) != {"weight", "bias"}
        or found["weight"].ndim != 2
        or found["bias"].shape != found["weight"].shape[:1]
    ):
        held = ", ".join(f"{k} {tuple(v.shape)}" for k, v in list(found.items())[:6]) or "no tensors"
        raise ValueError(
            f"{source} is no linear classifier: wanted linear.weight (C, F) and linear.bias (C), has {held}"
        )
    return found["weight"], found["bias"]


def export(backbone: Backbone, path: str | Path) -> None:
    """Writes a backbone as Dino-Mamba's checkpoints hold it (``teacher`` → ``backbone.*``); flat for .safetensors.

    The file is written aside and renamed.
    """
    _write({k: v.detach().cpu().contiguous() for k, v in backbone.state_dict().items()}, Path(path))


def _write(state: dict[str, Tensor], path: Path) -> None:
    with written_aside(path) as aside:
        if path.suffix == ".safetensors":
            save_file(state, aside)
        else:
            torch.save({"teacher": {f"backbone.{k}": v for k, v in state.items()}}, aside)


def describe(source: str | Path, key: str = "teacher") -> str:
    """What a checkpoint holds, in lines for people: format, sizes, and names with block numbers folded."""
    kind, state = open_checkpoint(source, key)
    folded: dict[str, list[Tensor]] = {}
    for name, value in state.items():
        folded.setdefault(re.sub(r"\.\d+\.", ".*.", name, count=1), []).append(value)
    count = sum(v.numel() for k, v in state.items() if not k.startswith(CLASSIFIERS))
    lines = [f"{source}: {kind}, {len(state)} tensors, {count / 1e6:.1f} M parameters without the classifier"]
    for name, values in folded.items():
        shapes = sorted({f"{tuple(v.shape)}" for v in values})
        lines.append(f"  {name}  {' '.join(shapes)}  {str(values[0].dtype).removeprefix('torch.')}  x {len(values)}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """``inspect SOURCE`` or ``convert SOURCE OUT``; OUT ends in .pth (Dino-Mamba's layout) or .safetensors (flat)."""
    parser = argparse.ArgumentParser(prog="python -m backbones.weights", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("inspect", "tell format, names and shapes"), ("convert", "write the backbone in our layout")):
        command = commands.add_parser(name, help=text)
        command.add_argument("source", help="a path, hf://owner/repo/file, or a timm name")
        command.add_argument("--key", default="teacher", help="network of a full checkpoint: teacher or student")
        if name == "convert":
            command.add_argument("out", type=Path)
    args = parser.parse_args(arguments)
    if args.command == "inspect":
        print(describe(args.source, args.key))
        return
    if args.out.suffix not in (".pth", ".safetensors"):
        raise ValueError(f"{args.out}: the name must end in .pth or .safetensors")
    kind, state = open_checkpoint(args.source, args.key)
    _write({k: v.contiguous() for k, v in state.items() if not k.startswith(CLASSIFIERS)}, args.out)
    print(f"{args.out}: the backbone of {args.source} ({kind})")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
