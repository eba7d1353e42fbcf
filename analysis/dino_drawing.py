"""DINO with visual Mamba as a drawing: crops, student, teacher, their moving average and the loss.

Every number comes from a run's resolved configuration, and from the backbone that is built by it.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
import yaml
from matplotlib.patches import FancyBboxPatch

from analysis.figure_pages import write_figure
from analysis.pages import COLOURS
from analysis.renderers import renderer
from analysis.tables import Table
from analysis.targets import Target

COLUMNS = {"what": "what", "paper": "paper", "ours": "ours", "difference": "difference"}
NOTE = """Every number is that of the configuration which this recipe resolves to, and of the backbone built by it, run
on images of both sizes. The table has what the paper says of its recipe, beside ours."""


class Sizes(NamedTuple):
    """What the backbone makes of images of one size."""

    side: int
    tokens: int
    width: int


class Outline(NamedTuple):
    """What the drawing shows."""

    model: Mapping[str, Any]
    """Arguments of the method."""
    crops: Mapping[str, Any]
    name: str
    """Of the backbone's class."""
    depth: int
    parameters: int
    views: tuple[Sizes, Sizes]
    """Global and local."""


def settings(path: Path) -> dict[str, Any]:
    """A configuration that a run printed. ValueError where there is none, or it is of another method."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: it is what dinomamba fit … --print_config says")
    text = path.read_text(encoding="utf-8")
    start = text.find("seed_everything:")  # warnings may stand before it
    content = yaml.safe_load(text[start:]) if start >= 0 else None
    if not isinstance(content, dict) or content.get("model", {}).get("class_path") != "lightning_modules.DINO":
        raise ValueError(f"{path} is no configuration of lightning_modules.DINO")
    return content


def outline(content: Mapping[str, Any]) -> Outline:
    """Builds the backbone and runs it on a blank image of each size."""
    model, data = content["model"]["init_args"], content["data"]["init_args"]
    module, _, name = model["backbone"]["class_path"].rpartition(".")
    arguments = dict(model["backbone"]["init_args"])
    arguments |= {"pretrained": False} if "pretrained" in arguments else {}  # sizes are all that is read
    backbone = getattr(importlib.import_module(module), name)(**arguments).eval()
    views = []
    for side in (data["multicrop"]["global_size"], data["multicrop"]["local_size"]):
        with torch.no_grad():
            blank = torch.zeros(1, backbone.in_chans or 3, side, side)
            tokens = backbone.forward_sequences(blank)[0][0] if hasattr(backbone, "forward_sequences") else None
        count = tokens.shape[1] if tokens is not None else (side // backbone.patch_size) ** 2
        views.append(Sizes(side, count, backbone.num_features))
    parameters = sum(p.numel() for p in backbone.parameters())
    return Outline(model, data["multicrop"], name, backbone.depth, parameters, (views[0], views[1]))


def recipe(target: Target, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of COLUMNS: what the paper says of its recipe, and ours."""
    rows = []
    for key, paper in target.options.get("recipe", {}).items():
        part, _, name = key.partition(".")
        ours = content[part]["init_args"].get(name)
        rows.append({"what": name.replace("_", " "), "paper": paper, "ours": ours,
                     "difference": None if ours is None else ours - paper})  # fmt: skip
    return rows


def show(row: Mapping[str, Any], column: str) -> str:
    """Numbers as they are written in a configuration."""
    value = row.get(column)
    if value is None:
        return "–"
    if column == "difference":
        return "0" if value == 0 else f"{value:+g}"
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _box(axis: Any, at: tuple[float, float], size: tuple[float, float], text: str, colour: str) -> None:
    """A rounded box with its text; ``at`` is the lower left corner."""
    axis.add_patch(FancyBboxPatch(at, *size, boxstyle="round,pad=0.02,rounding_size=0.06", facecolor=f"{colour}22",
                                  edgecolor=colour, linewidth=1.4))  # fmt: skip
    axis.text(at[0] + size[0] / 2, at[1] + size[1] / 2, text, ha="center", va="center", fontsize=8.5, linespacing=1.35)


def _arrow(axis: Any, start: tuple[float, float], end: tuple[float, float], text: str = "", style: str = "-",
           colour: str = "#333", side: float = 0.12) -> None:  # fmt: skip
    axis.annotate(
        "", end, start, arrowprops={"arrowstyle": "-|>", "linestyle": style, "color": colour, "linewidth": 1.3}
    )
    if text:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        axis.text(x, y + side, text, ha="center", va="bottom" if side > 0 else "top", fontsize=8.5, color=colour)


def draw_outline(axis: Any, found: Outline) -> None:
    """Crops left, the student above and the teacher below, the loss right."""
    model, crops = found.model, found.crops
    (glob, local), wide, high = found.views, 2.15, 1.15
    top, bottom = 2.5, 0.35
    globals_, locals_ = model["num_global_crops"], crops["num_local"]
    views = globals_ + locals_

    def scale(name: str) -> str:
        low, high = crops[name]
        return f"{100 * low:g}–{100 * high:g} % of the area"

    _box(axis, (0, top), (wide, high), f"{globals_} global crops {glob.side}²\n{scale('global_scale')}\n"
         f"{locals_} local crops {local.side}²\n{scale('local_scale')}", "#555555")  # fmt: skip
    _box(axis, (0, bottom), (wide, high), f"{globals_} global crops {glob.side}²\n{scale('global_scale')}", "#555555")
    head = " → ".join(
        map(str, [glob.width, *[model["hidden_dim"]] * (model["head_layers"] - 1), model["bottleneck_dim"]])
    )
    for y, who, colour, seen in (
        (top, "student", COLOURS[0], f"{glob.tokens} and {local.tokens} tokens x {glob.width}"),
        (bottom, "teacher", COLOURS[1], f"{glob.tokens} tokens x {glob.width}"),
    ):
        _box(axis, (2.9, y), (wide, high),
             f"{who}\n{found.name}, {found.depth} blocks\n{found.parameters / 1e6:.2f} M parameters\n{seen}",
             colour)  # fmt: skip
        _box(
            axis,
            (5.8, y),
            (wide, high),
            f"{who}'s head\n{head}\nunit length, then\n{model['out_dim']:,} prototypes",
            colour,
        )
        _arrow(axis, (wide + 0.06, y + high / 2), (2.84, y + high / 2))
        _arrow(axis, (2.9 + wide + 0.06, y + high / 2), (5.74, y + high / 2))
    epochs = model["warmup_teacher_temp_epochs"]
    temps = (
        f"{model['warmup_teacher_temp']:g} → {model['teacher_temp']:g} in {epochs} epochs"
        if epochs
        else f"{model['teacher_temp']:g}"
    )
    centre = {"mean": f"centre: running mean, {model['center_momentum']:g}", "sinkhorn": "centre: Sinkhorn-Knopp"}
    _box(axis, (8.7, top), (wide, high), f"softmax\ntemperature {model['student_temp']:g}", COLOURS[0])
    _box(axis, (8.7, bottom), (wide, high),
         f"{centre.get(model['centering'], model['centering'])}\nsoftmax, temperature\n{temps}\nno gradient",
         COLOURS[1])  # fmt: skip
    for y in (top, bottom):
        _arrow(axis, (5.8 + wide + 0.06, y + high / 2), (8.64, y + high / 2))
    middle = (top + bottom + high) / 2
    pairs = globals_ * (views - 1)
    _box(
        axis,
        (11.6, middle - 0.75),
        (1.9, 1.5),
        f"loss\ncross-entropy over\n{pairs} pairs of views\n({globals_} x {views} less\nthe same view)",
        COLOURS[2],
    )
    _arrow(axis, (8.7 + wide + 0.06, top + high / 2), (11.54, middle + 0.35))
    _arrow(axis, (8.7 + wide + 0.06, bottom + high / 2), (11.54, middle - 0.35))
    _arrow(axis, (3.97, top - 0.06), (3.97, bottom + high + 0.06), colour=COLOURS[3], style="--")
    _arrow(axis, (6.87, top - 0.06), (6.87, bottom + high + 0.06), colour=COLOURS[3], style="--")
    axis.text(5.42, middle, f"moving average\nmomentum {model['momentum']:g} → {model['momentum_end']:g}", ha="center",
              va="center", fontsize=8.5, color=COLOURS[3])  # fmt: skip
    axis.set(xlim=(-0.15, 13.65), ylim=(0.1, top + high + 0.2))
    axis.axis("off")


@renderer("dino_drawing")
def draw(target: Target, runs: Path) -> list[Path]:
    """RUNS/TARGET.*: the drawing, and the recipe beside the paper's."""
    path = runs / f"{target.models[0]}-{target.tasks[0]}" / "config.yaml"
    content = settings(path)
    fig, axis = plt.subplots(figsize=(13.2, 3.9), layout="constrained")
    draw_outline(axis, outline(content))
    return write_figure(
        target, runs, fig, f"{NOTE} Configuration: {path.parent.name}.", Table(COLUMNS, recipe(target, content), show)
    )
