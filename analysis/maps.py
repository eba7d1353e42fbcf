"""Pictures of maps: a line for each picture and reading, with the maps' ROC curves.

Shapes: P pictures, h x w patch grid.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch

from analysis.figure_pages import KINDS, TOKENS, figure, table_row
from analysis.pages import COLOURS
from analysis.readings import READINGS
from analysis.runs import Run
from analysis.targets import Target
from metrics import masks_to_grid, roc_curve

NOTE = """Each map is stretched to its own range: yellow is high, violet low. A map whose mean AUC over all images is
below 0.5 is shown negated, curve included. Each picture has two lines: the stream that the family's published results
read, and the other; under each map stand the stream (branch is what the token mixer adds, residual the stream after
the block) and the AUC of that image. The table has the mean over all images, with its 95 % interval."""
PICTURES = 4


class Shown(NamedTuple):
    """A map that a grid shows: a column, in one reading or both."""

    run: Run
    title: str
    rows: dict[str, dict[str, Any]]
    """Reading -> the run's row."""
    values: dict[str, np.ndarray]
    """Reading -> (P, h, w), negated where the mean AUC is below 0.5."""


def foreground(data: dict[str, np.ndarray], size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Masks on a grid: (P, h, w) whether foreground, and whether they take part."""
    ids = masks_to_grid(torch.from_numpy(data["masks"]), size).numpy()
    return ids != 0, ids != int(data["ignore_index"])


def _title(target: Target, run: Run, row: dict[str, Any], several: bool) -> str:
    label, parts = target.label(run.model), []
    if several:
        parts.append(label["label"])
        if label["training"] not in parts[0]:
            parts.append(label["training"])
    if row["part"]:
        number = "" if row["index"] is None else f" {row['index']}"
        parts.append(TOKENS.get(row["part"], row["part"]) + number)
    elif any(fields.get("part") for fields in target.options["maps"]):
        parts.append("middle\nclass token")
    return "\n".join(parts).replace("class token at", "class token\nat") or "map"


def chosen(target: Target, runs: Sequence[Run]) -> list[Shown]:
    """The maps a grid shows: of the last block, that fit one of ``maps``.

    Each of ``maps`` names the fields of the rows that it wants: ``kind``, and ``part`` where it is not a whole block's.
    """
    wanted = [{"part": None} | fields for fields in target.options["maps"]]
    found: list[Shown] = []
    for run in runs:
        rows = [row for row in run.rows if row["kind"] in KINDS]
        last = max(row["block"] for row in rows)
        columns: dict[tuple[Any, ...], Shown] = {}
        for row in rows:
            if row["block"] != last or not any(fields.items() <= row.items() for fields in wanted):
                continue
            if (name := f"maps/{row['map']}") not in run.arrays:
                raise ValueError(f"{run.folder / 'results.npz'} holds no array {name}: run it again")
            title = _title(target, run, row, len(runs) > 1)
            one = columns.setdefault((row["kind"], row["part"], row["index"]), Shown(run, title, {}, {}))
            reading = row.get("reading", READINGS[0])
            one.rows[reading] = row
            one.values[reading] = (1 if row["auc"] >= 0.5 else -1) * run.arrays[name]
        found += columns.values()
    if not found:
        names = ", ".join(" ".join(filter(None, (fields["part"], fields["kind"]))) for fields in wanted)
        raise ValueError(f"{target.name}: none of {', '.join(run.folder.name for run in runs)} has a map {names}")
    return found


def pictures(target: Target, runs: Sequence[Run]) -> list[int]:
    """Numbers of the kept pictures that are shown: ``pictures`` from ``first_picture`` on, or the last ones there are.

    ValueError where the runs did not keep the same.
    """
    data = runs[0].arrays
    for run in runs[1:]:
        if run.arrays["keys"].tolist() != data["keys"].tolist():
            raise ValueError(f"{run.folder} kept other pictures than {runs[0].folder}; run both on the same data")
    there, count = len(data["keys"]), int(target.options.get("pictures", PICTURES))
    first = max(0, min(int(target.options.get("first_picture", 0)), there - count))
    return list(range(first, min(there, first + count)))


def _curve(one: Shown, reading: str, number: int) -> tuple[np.ndarray, np.ndarray] | None:
    """False and true positive rates of a map; None where the picture's mask has one class on its grid."""
    values = one.values[reading][number]
    positive, taking_part = (m[number] for m in foreground(one.run.arrays, values.shape))
    if not positive[taking_part].any() or positive[taking_part].all():
        return None
    return roc_curve(values[taking_part], positive[taking_part])


def frame_curves(axis: Any) -> None:
    """The unit square with its diagonal."""
    axis.plot([0, 1], [0, 1], ":", color="#888", linewidth=0.8)
    axis.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04), aspect="equal", xticks=[0, 1], yticks=[0, 1])
    axis.tick_params(labelsize=7)


def draw_grid(fig: Any, shown: list[Shown], numbers: list[int], curves: str = "none") -> None:
    """Pictures in lines, maps in columns.

    Args:
        fig: a figure or a part of one.
        shown: the columns.
        numbers: of the pictures.
        curves: ``right`` of each line, ``below`` each column (a curve for each picture, the other reading dashed), or
            ``none``.
    """
    data = shown[0].run.arrays
    kinds = [reading for reading in READINGS if any(reading in one.rows for one in shown)]
    lines = [(number, reading) for number in numbers for reading in kinds]
    right, below = curves == "right", curves == "below"
    widths = [1.0] * (2 + len(shown)) + [1.1] * right
    heights = [1.0] * len(lines) + [1.05] * below
    axes = fig.subplots(
        len(heights), len(widths), squeeze=False, gridspec_kw={"width_ratios": widths, "height_ratios": heights}
    )
    for line, (number, reading) in enumerate(lines):
        picture, mask = data["images"][number], data["masks"][number]
        for axis in axes[line]:
            axis.set(xticks=[], yticks=[])
        if reading == kinds[0]:
            axes[line, 0].imshow(picture)
            axes[line, 1].imshow((mask != 0) & (mask != int(data["ignore_index"])), cmap="gray", vmin=0, vmax=1)
        else:
            for axis in axes[line, :2]:
                axis.set_visible(False)
        axes[line, 2].set_ylabel(reading, fontsize=8)
        for at, one in enumerate(shown):
            axis, own = axes[line, 2 + at], COLOURS[at % len(COLOURS)]
            if reading not in one.rows:
                axis.set_facecolor("#f4f4f4")
                axis.set_xlabel("no such stream", fontsize=7)
                continue
            axis.imshow(one.values[reading][number], cmap="viridis")
            found, stream = _curve(one, reading, number), one.rows[reading].get("stream", "")
            axis.set_xlabel(f"{stream} {np.trapezoid(found[1], found[0]):.2f}" if found else stream, fontsize=8)
            if found and right:
                axes[line, -1].plot(*found, "-" if at < len(COLOURS) else "--", color=own, linewidth=1.1)
            if found and below:
                style = "-" if reading == kinds[0] else "--"
                place = COLOURS[numbers.index(number) % len(COLOURS)]
                axes[-1, 2 + at].plot(*found, style, color=place, linewidth=1.1)
        if right:
            frame_curves(axes[line, -1])
    if below:
        for axis in axes[-1, :2]:
            axis.set_visible(False)
        for axis in axes[-1, 2:]:
            frame_curves(axis)
        axes[-1, 2].set_ylabel("true positives", fontsize=7)
        axes[-1, 2].set_xlabel("false positives", fontsize=7)
    if right:
        axes[-1, -1].set_xlabel("false positives", fontsize=7)
        axes[-1, -1].set_ylabel("true positives", fontsize=7)
    for axis, title in zip(axes[0], ["image", "mask", *(one.title for one in shown), *["ROC"] * right], strict=True):
        axis.set_title(title, fontsize=8)
    if right:
        for at in range(len(shown)):
            axes[0, 2 + at].title.set_color(COLOURS[at % len(COLOURS)])


def grid_size(shown: list[Shown], numbers: list[int], curves: str = "none") -> tuple[float, float]:
    """Width and height in inches of what :func:`draw_grid` draws."""
    lines = len(numbers) * max(len(one.rows) for one in shown) + (curves == "below")
    return 1.42 * (len(shown) + 2 + 1.1 * (curves == "right")) + 0.4, 1.62 * lines + 0.7


def numbers_of(target: Target, shown: list[Shown]) -> list[dict[str, Any]]:
    """The table under a grid: each map in each reading."""
    return [table_row(target, one.run, row) for one in shown for row in one.rows.values()]


@figure("maps", NOTE, dpi=100)
def grid(target: Target, runs: list[Run]) -> tuple[Any, list[dict[str, Any]]]:
    """Two lines for each picture: image, mask, maps with their AUC; and the maps' ROC curves."""
    shown, numbers, curves = chosen(target, runs), pictures(target, runs), target.options.get("curves", "none")
    fig = plt.figure(figsize=grid_size(shown, numbers, curves), layout="constrained")
    draw_grid(fig, shown, numbers, curves)
    return fig, numbers_of(target, shown)
