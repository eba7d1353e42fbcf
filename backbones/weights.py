"""Loads and saves backbone weights in every format in use, strictly; ``checkpoints.py`` tells the formats apart.

For people: ``python -m backbones.weights inspect FILE`` and ``... convert FILE OUT``, OUT an ONNX file too.
"""

import argparse
import json
import logging
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import adapt_input_conv
from torch import Tensor

from backbones import pixels
from backbones.base import CLASSIFIER_PREFIXES, Backbone
from backbones.building import unfilled
from backbones.checkpoints import bare, open_checkpoint, unwrappings
from backbones.export import OPSET, Outputs, to_onnx
from backbones.weight_files import read
from common.files import written_aside
from common.pipes import end_with_the_reader

logger = logging.getLogger(__name__)


def load(backbone: Backbone, source: str | Path, key: str = "teacher") -> str:
    """Loads a checkpoint into a backbone and returns the format found.

    What a family does to make a published state fit is its own (:meth:`~backbones.Backbone.adapt_state_dict`):
    positions learned at another image size are resampled, a classifier that it has no place for is left out. Weights of
    RGB are adapted to other channels as timm does, which a warning says. Everything else must match one to one.
    ``backbone.pixels`` says then how the weights were fed, where that is known.

    Args:
        backbone: what to fill.
        source: a path, ``hf://owner/repo/file``, or a timm name.
        key: which network of a full checkpoint, ``teacher`` or ``student``.

    Raises:
        ValueError: naming missing and unexpected keys and differing shapes; nothing is loaded then.
    """
    kind, state = open_checkpoint(source, key)
    found: list[tuple[int, str]] = []
    for candidate in unwrappings(state):
        try:
            adapted = backbone.adapt_state_dict(candidate)
        except ValueError as error:
            found.append((0, str(error)))
            continue
        adapted, changed = _fit_channels(backbone, adapted)
        matching, problems = _compare(backbone.state_dict(), adapted)
        if not problems:
            backbone.load_state_dict(adapted)
            backbone.pixels = pixels.of_source(source) or backbone.pixels_of(candidate)
            if changed:
                logger.warning("%s: %s", source, changed)
                backbone.pixels = None  # it is about other channels
            return kind
        found.append((matching, f"does not fit {type(backbone).__name__}: {problems}"))
    closest = max(found, key=lambda one: one[0])[1]  # the first of equals, which is least taken apart
    raise ValueError(f"{source} ({kind}) {closest}" if closest.startswith("does not") else f"{source}: {closest}")


def _fit_channels(backbone: Backbone, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """A state whose first convolution takes RGB made to take the backbone's channels, and in words what was done.

    As ``timm.models.adapt_input_conv``: one channel gets the sum over red, green and blue; others get the three in
    turn, times 3 / C, so that equal channels give what grey RGB gave.
    """
    name = backbone.input_conv
    if name is None:
        return state, ""
    own, given = backbone.state_dict().get(name), state.get(name)
    if own is None or given is None or own.ndim != 4 or given.ndim != 4 or given.shape[1] != 3 or own.shape[1] == 3:
        return state, ""
    channels = own.shape[1]
    how = "summed over them" if channels == 1 else f"repeated over them and scaled by 3/{channels}"
    said = f"{name} is of 3 channels, the backbone takes in_chans={channels}: {how}, as timm does"
    return state | {name: adapt_input_conv(channels, given)}, said


def _compare(own: dict[str, Tensor], state: dict[str, Tensor]) -> tuple[int, str]:
    """How many names a model and a state share, and in words what keeps them apart."""
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
    return len(own.keys() & state.keys()), "; ".join(problems)


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

    How its images were fed, where that is known, stands beside (``pixels``). The file is written aside and renamed.
    """
    _write({k: v.detach().cpu().contiguous() for k, v in backbone.state_dict().items()}, Path(path), backbone.pixels)


def _write(state: dict[str, Tensor], path: Path, fed: pixels.Pixels | None) -> None:
    facts = {} if fed is None else {pixels.KEY: fed.record()}
    with written_aside(path) as aside:
        if path.suffix == ".safetensors":
            save_file(_unshared(state), aside, {key: json.dumps(value) for key, value in facts.items()} or None)
        else:
            torch.save({"teacher": {f"backbone.{k}": v for k, v in state.items()}} | facts, aside)


def _unshared(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of what several names share, such as CoaT's positions, since safetensors takes each name's by itself."""
    first: dict[int, str] = {}
    return {k: v if first.setdefault(v.data_ptr(), k) == k else v.clone() for k, v in state.items()}


def describe(source: str | Path, key: str = "teacher") -> str:
    """What a checkpoint holds, in lines for people: format, sizes, and names with block numbers folded."""
    kind, state = open_checkpoint(source, key)
    folded: dict[str, list[Tensor]] = {}
    for name, value in state.items():
        folded.setdefault(re.sub(r"\.\d+\.", ".*.", name, count=1), []).append(value)
    count = sum(v.numel() for k, v in state.items() if not k.startswith(CLASSIFIER_PREFIXES))
    lines = [f"{source}: {kind}, {len(state)} tensors, {count / 1e6:.1f} M parameters without the classifier"]
    fed = pixels.of_source(source)
    lines.append(
        "  images: it does not say how they were normalised" if fed is None else f"  images: {fed} ({fed.source})"
    )
    for name, values in folded.items():
        shapes = sorted({f"{tuple(v.shape)}" for v in values})
        lines.append(f"  {name}  {' '.join(shapes)}  {str(values[0].dtype).removeprefix('torch.')}  x {len(values)}")
    return "\n".join(lines)


def build(source: str | Path, key: str = "teacher", checkpoint: str | Path | None = None) -> Backbone:
    """A filled backbone, in evaluation mode, without being told its class.

    Args:
        source: a run's checkpoint, which says what its backbone is; weights of Vim or Mamba-Reg, on either Mamba, whose
            sizes their shapes tell; or a name in timm's registry, ours or timm's.
        key: which network of a full checkpoint, ``teacher`` or ``student``.
        checkpoint: weights for a name; None for those that timm publishes.

    Raises:
        ValueError: where the weights do not tell what they are of, or do not fit.
    """
    backbone, remaining = unfilled(source, key, checkpoint)
    if remaining is not None:
        load(backbone, remaining, key)
    return backbone.eval()


def _to_onnx(args: argparse.Namespace) -> str:
    backbone = build(args.source, args.key, args.checkpoint)
    fed = backbone.pixels
    if args.normalize and fed is None and backbone.in_chans not in (None, 3):
        raise ValueError(f"--normalize is ImageNet's, of 3 channels; this backbone takes in_chans={backbone.in_chans}")
    mean, std = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD) if fed is None else (fed.mean, fed.std)
    statistics = (mean, std) if args.normalize else (None, None)
    model = Outputs(backbone, [name.strip() for name in args.output.split(",")], *statistics)
    if args.img_size and len(args.img_size) > 2:
        raise ValueError(f"--img-size {' '.join(map(str, args.img_size))}: give a side, or height and width")
    size = (args.img_size[0], args.img_size[-1]) if args.img_size else None
    origin = {"source": str(args.checkpoint or args.source)}
    worst = to_onnx(model, args.out, size, not args.fixed_size, args.exporter, origin)
    told = ", ".join(f"{name} within {error:.1g}" for name, error in worst.items())
    return f"{args.out}: images -> {told} of {type(backbone).__name__}, opset {OPSET}, batches 1 and 5"


def main(arguments: list[str] | None = None) -> None:
    """``inspect SOURCE`` or ``convert SOURCE OUT``; OUT is .pth (Dino-Mamba's layout), .safetensors (flat) or .onnx."""
    parser = argparse.ArgumentParser(prog="python -m backbones.weights", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("inspect", "tell format, names, shapes and what images were fed"),
        ("convert", "write the backbone in our layout"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("source", help="a path, hf://owner/repo/file, or a timm name")
        command.add_argument("--key", default="teacher", help="network of a full checkpoint: teacher or student")
        if name == "convert":
            command.add_argument("out", type=Path)
            onnx = command.add_argument_group("for .onnx")
            onnx.add_argument("--checkpoint", help="weights, where SOURCE is a timm name")
            onnx.add_argument(
                "--output", default="embedding", help="embedding,logits,cls,patches,registers: any of them"
            )
            onnx.add_argument(
                "--normalize",
                action="store_true",
                help="take RGB in [0, 1] and normalise inside, as the weights were fed",
            )
            onnx.add_argument(
                "--fixed-size", action="store_true", help="one height and width; the batch is always free"
            )
            onnx.add_argument("--img-size", type=int, nargs="+", help="side, or height and width, to trace with")
            onnx.add_argument("--exporter", default="torchscript", help="torchscript, or dynamo (several times slower)")
    args = parser.parse_args(arguments)
    if args.command == "inspect":
        print(describe(args.source, args.key))
        return
    if args.out.suffix not in (".pth", ".safetensors", ".onnx"):
        raise ValueError(f"{args.out}: the name must end in .pth, .safetensors or .onnx")
    if args.out.suffix == ".onnx":
        print(_to_onnx(args))
        return
    for option in ("checkpoint", "output", "normalize", "fixed_size", "img_size", "exporter"):
        if getattr(args, option) != commands.choices["convert"].get_default(option):
            raise ValueError(f"{args.out}: --{option.replace('_', '-')} is for .onnx only")
    (kind, state), fed = open_checkpoint(args.source, args.key), pixels.of_source(args.source)
    _write({k: v.contiguous() for k, v in bare(state).items() if not k.startswith(CLASSIFIER_PREFIXES)}, args.out, fed)
    print(f"{args.out}: the backbone of {args.source} ({kind})")


if __name__ == "__main__":
    end_with_the_reader()
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
