"""Pictures of maps: grids beside their ROC curves, and principal components of patch features as colours.

Shapes: P pictures, h x w patch grid, D embed_dim.
"""

from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch

from analysis.figure_pages import KINDS, figure, table_row
from analysis.pages import COLOURS
from analysis.runs import Run
from analysis.targets import Target
from metrics import masks_to_grid, roc_curve

THRESHOLD = 0.5
"""Of the first component, stretched to [0, 1] over a model's pictures; the same for every model and picture."""
GRID_NOTE = """Each map is stretched to its own range: yellow is high, violet low. A map whose mean AUC over all images
is below 0.5 is shown negated, curve included. Under each map stands the AUC of that image; the table has the mean over
all images."""
COMPONENT_NOTE = f"""Colours are three principal components of the last block's patch features, centred and of unit
length, of the patches whose first component, stretched to [0, 1] over a model's pictures, is above {THRESHOLD}: one
threshold for all models and pictures. The first component is turned so that the masks have its higher values. The
table's map is the similarity map of the same block."""


class Shown(NamedTuple):
    """A map that a grid shows."""

    run: Run
    row: dict[str, Any]
    title: str
    values: np.ndarray
    """(P, h, w), negated where the mean AUC is below 0.5."""


def foreground(data: dict[str, np.ndarray], size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Masks on a grid: (P, h, w) whether foreground, and whether they take part."""
    ids = masks_to_grid(torch.from_numpy(data["masks"]), size).numpy()
    return ids != 0, ids != int(data["ignore_index"])


def chosen(target: Target, runs: list[Run]) -> list[Shown]:
    """The maps a grid shows: of the last block, or of ``blocks`` blocks spread evenly, that fit one of ``maps``.

    Each of ``maps`` names the fields of the rows that it wants: ``kind``, and ``part`` where it is not a whole block's.
    """
    wanted = [{"part": None} | fields for fields in target.options["maps"]]
    found = []
    for run in runs:
        rows = [row for row in run.rows if row["kind"] in KINDS]
        last = max(row["block"] for row in rows)
        count = min(int(target.options.get("blocks", 1)), last + 1)
        blocks = {last} if count == 1 else {round(i * last / (count - 1)) for i in range(count)}
        for row in rows:
            if row["block"] not in blocks or not any(fields.items() <= row.items() for fields in wanted):
                continue
            parts = [target.label(run.model)["label"]] if len(runs) > 1 else []
            if len(runs) > 1 and target.label(run.model)["training"] not in parts[0]:
                parts[0] += f", {target.label(run.model)['training']}"
            if row["part"]:
                parts.append(f"{row['part']} {row['index']}")
            if count > 1:
                parts.append(f"block {row['block']}")
            if (name := f"maps/{row['map']}") not in run.arrays:
                raise ValueError(f"{run.folder / 'results.npz'} holds no array {name}: run it again")
            sign = 1 if row["auc"] >= 0.5 else -1
            found.append(Shown(run, row, "\n".join(parts) or "map", sign * run.arrays[name]))
    if not found:
        names = ", ".join(" ".join(filter(None, (fields["part"], fields["kind"]))) for fields in wanted)
        raise ValueError(f"{target.name}: none of {', '.join(run.folder.name for run in runs)} has a map {names}")
    return found


@figure("maps", GRID_NOTE, dpi=100)
def grid(target: Target, runs: list[Run]) -> tuple[Any, list[dict[str, Any]]]:
    """A row for each picture: image, mask, maps with their AUC, and the maps' ROC curves."""
    shown, data = chosen(target, runs), runs[0].arrays
    for run in runs[1:]:
        if run.arrays["keys"].tolist() != data["keys"].tolist():
            raise ValueError(f"{run.folder} kept other pictures than {runs[0].folder}; run both on the same data")
    count = min(len(data["images"]), 8 if len(shown) <= 4 else 5)
    columns = len(shown) + 3
    widths = [1] * (columns - 1) + [1.35]
    fig, axes = plt.subplots(
        count, columns, figsize=(1.45 * (columns + 0.35), 1.6 * count + 0.6), squeeze=False,
        gridspec_kw={"width_ratios": widths}, layout="constrained",
    )  # fmt: skip
    for number in range(count):
        image, mask = data["images"][number], data["masks"][number]
        axes[number, 0].imshow(image)
        axes[number, 1].imshow((mask != 0) & (mask != int(data["ignore_index"])), cmap="gray", vmin=0, vmax=1)
        curve = axes[number, -1]
        for at, one in enumerate(shown):
            values = one.values[number]
            positive, taking_part = (m[number] for m in foreground(one.run.arrays, values.shape))
            axis = axes[number, 2 + at]
            axis.imshow(values, cmap="viridis")
            if positive[taking_part].any() and not positive[taking_part].all():
                fpr, tpr = roc_curve(values[taking_part], positive[taking_part])
                axis.set_xlabel(f"AUC {np.trapezoid(tpr, fpr):.2f}", fontsize=8)
                style = "-" if at < len(COLOURS) else "--"
                curve.plot(fpr, tpr, style, color=COLOURS[at % len(COLOURS)], linewidth=1.1)
        curve.plot([0, 1], [0, 1], ":", color="#888", linewidth=0.8)
        curve.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04), aspect="equal", xticks=[0, 1], yticks=[0, 1])
        curve.tick_params(labelsize=7)
        for axis in axes[number, :-1]:
            axis.set(xticks=[], yticks=[])
    for axis, title in zip(axes[0], ["image", "mask", *(one.title for one in shown), "ROC"], strict=True):
        axis.set_title(title, fontsize=8)
    for at in range(len(shown)):
        axes[0, 2 + at].title.set_color(COLOURS[at % len(COLOURS)])
    axes[-1, -1].set_xlabel("false positives", fontsize=7)
    axes[-1, -1].set_ylabel("true positives", fontsize=7)
    return fig, [table_row(target, one.run, one.row) for one in shown]


def component_colours(patches: np.ndarray, positive: np.ndarray, taking_part: np.ndarray) -> np.ndarray:
    """Principal components of patch features as colours, after Oquab et al. (2024).

    Features are centred and scaled to unit length, or one picture far from the others takes the first component. The
    first component over all pictures, stretched to [0, 1], says by THRESHOLD which patches are shown; it is turned
    so that masks have the higher values in the mean. Three components of those patches alone, each stretched between
    its 2nd and 98th percentile, are red, green and blue; the rest is black.

    Args:
        patches: (P, D, h, w).
        positive, taking_part: (P, h, w) of the masks.

    Returns:
        (P, h, w, 3) in [0, 1].
    """
    count, _, h, w = patches.shape
    flat = patches.transpose(0, 2, 3, 1).reshape(count * h * w, -1).astype(np.float64)
    flat -= flat.mean(0)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True).clip(min=1e-12)
    first = _components(flat, 1)[:, 0]
    inside, outside = (first[(positive == side).ravel() & taking_part.ravel()] for side in (True, False))
    if len(inside) and len(outside) and inside.mean() < outside.mean():
        first = -first
    first = (first - first.min()) / max(np.ptp(first), 1e-12)
    shown = first > THRESHOLD
    colours = np.zeros((len(flat), 3))
    if shown.sum() > 3:
        values = _components(flat[shown], 3)
        low, high = np.percentile(values, [2, 98], axis=0)
        colours[shown] = ((values - low) / np.maximum(high - low, 1e-12)).clip(0, 1)
    return colours.reshape(count, h, w, 3)


def _components(rows: np.ndarray, count: int) -> np.ndarray:
    """(n, D) to its first principal components (n, count), their signs fixed by the largest weight."""
    centred = rows - rows.mean(0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    directions = directions[:count]
    signs = np.sign(np.take_along_axis(directions, np.abs(directions).argmax(1)[:, None], 1))
    return centred @ (directions * signs).T


@figure("components", COMPONENT_NOTE, dpi=100)
def components(target: Target, runs: list[Run]) -> tuple[Any, list[dict[str, Any]]]:
    """A row for each picture: the image with its mask's outline, then each model's colours."""
    data = runs[0].arrays
    count = len(data["images"])
    fig, axes = plt.subplots(
        count, len(runs) + 1, figsize=(1.7 * (len(runs) + 1), 1.65 * count + 0.4), squeeze=False, layout="constrained"
    )
    titles = ["image, mask outlined", *(target.label(run.model)["label"] for run in runs)]
    for column, run in enumerate(runs):
        kept = run.arrays
        size = (kept["patches"].shape[-2], kept["patches"].shape[-1])
        colours = component_colours(kept["patches"], *foreground(kept, size))
        for number in range(count):
            axes[number, 1 + column].imshow(colours[number])
    for number in range(count):
        axes[number, 0].imshow(data["images"][number])
        axes[number, 0].contour(data["masks"][number] != 0, levels=[0.5], colors=COLOURS[1], linewidths=1)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=9)
    return fig, [table_row(target, run, run.maps("similarity")[-1]) for run in runs]
