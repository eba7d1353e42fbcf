"""Principal components of patch features: three as colours, the first as a map.

Shapes: P pictures, h x w patch grid, D embed_dim.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch

from analysis.figure_pages import figure, models_shown, table_row
from analysis.maps import NOTE as GRID_NOTE
from analysis.maps import chosen, draw_grid, foreground, grid_size, numbers_of, pictures
from analysis.pages import COLOURS
from analysis.readings import named, readings
from analysis.runs import Run
from analysis.targets import Target
from metrics import binary_auc

THRESHOLD = 0.5
"""Of the first component, stretched to [0, 1] over a model's pictures; the same for every model and picture."""
ARRAYS = {"published": "patches", "other": "patches_other"}
FIRST_NOTE = f"""Shown is the first principal component of the last block's patch features, centred in each picture and
of unit length, stretched to [0, 1] over a model's pictures; what lies below {THRESHOLD} is black: one threshold for all
models and pictures. It is turned so that the masks have its higher values. Models stand in both readings. The table's
map is the similarity map of the same block and reading; beside it stands the AUC of the first component over the
pictures."""
COLOUR_NOTE = f"""Top: colours are three principal components of the last block's patch features, centred in each
picture and of unit length, of the patches whose first component, stretched to [0, 1] over a model's pictures, is above
{THRESHOLD}: one threshold for all models and pictures. Bottom: maps by size."""


class Column(NamedTuple):
    """A model in one reading, beside others."""

    run: Run
    title: str
    row: dict[str, Any]
    """The run's similarity map of the same block and reading."""
    values: np.ndarray
    """(P, h, w) the first component, or (P, h, w, 3) colours."""
    auc: float
    """Of the first component, the mean over the pictures."""


def first_component(patches: np.ndarray, positive: np.ndarray, taking_part: np.ndarray) -> np.ndarray:
    """The first principal component over all pictures, stretched to [0, 1]; (P, h, w).

    Features are centred in each picture and scaled to unit length, or one picture far from the others takes the first
    component. It is turned so that masks have the higher values in the mean.

    Args:
        patches: (P, D, h, w).
        positive, taking_part: (P, h, w) of the masks.
    """
    first = _components(_directions(patches), 1)[:, 0]
    inside, outside = (first[(positive == side).ravel() & taking_part.ravel()] for side in (True, False))
    if len(inside) and len(outside) and inside.mean() < outside.mean():
        first = -first
    return ((first - first.min()) / max(np.ptp(first), 1e-12)).reshape(positive.shape)


def component_colours(patches: np.ndarray, positive: np.ndarray, taking_part: np.ndarray) -> np.ndarray:
    """Principal components of patch features as colours, after Oquab et al. (2024); (P, h, w, 3) in [0, 1].

    :func:`first_component` says by THRESHOLD which patches are shown. Three components of those alone, each stretched
    between its 2nd and 98th percentile, are red, green and blue; the rest is black. Arguments as there.
    """
    shown = first_component(patches, positive, taking_part).ravel() > THRESHOLD
    colours = np.zeros((shown.size, 3))
    if shown.sum() > 3:
        values = _components(_directions(patches)[shown], 3)
        low, high = np.percentile(values, [2, 98], axis=0)
        colours[shown] = ((values - low) / np.maximum(high - low, 1e-12)).clip(0, 1)
    return colours.reshape(*positive.shape, 3)


def _directions(patches: np.ndarray) -> np.ndarray:
    """(P, D, h, w) to rows (P·h·w, D), centred in each picture and of unit length."""
    centred = patches.astype(np.float64) - patches.mean((2, 3), keepdims=True, dtype=np.float64)
    flat = centred.transpose(0, 2, 3, 1).reshape(-1, patches.shape[1])
    return flat / np.linalg.norm(flat, axis=1, keepdims=True).clip(min=1e-12)


def _components(rows: np.ndarray, count: int) -> np.ndarray:
    """(n, D) to its first principal components (n, count), their signs fixed by the largest weight."""
    centred = rows - rows.mean(0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    directions = directions[:count]
    signs = np.sign(np.take_along_axis(directions, np.abs(directions).argmax(1)[:, None], 1))
    return centred @ (directions * signs).T


def columns(target: Target, runs: Sequence[Run], colours: bool) -> list[Column]:
    """Each model in the published reading, then each in the other where its run kept that."""
    found = []
    for reading, array in ARRAYS.items():
        for run in runs:
            data, rows = run.arrays, readings(run, "similarity")
            if array not in data or reading not in rows:
                continue
            sides = foreground(data, (data[array].shape[-2], data[array].shape[-1]))
            first = first_component(data[array], *sides)
            scores = binary_auc(
                torch.from_numpy(first[:, None]), torch.from_numpy(data["masks"]), int(data["ignore_index"])
            )
            row = rows[reading][-1]
            title = f"{target.label(run.model)['label']}\n{named(row)}"
            values = component_colours(data[array], *sides) if colours else first
            found.append(Column(run, title, row, values, float(np.nanmean(scores.numpy()))))
    return found


def draw_columns(fig: Any, shown: list[Column], numbers: list[int]) -> None:
    """A line for each picture: the image with its mask's outline, then each model's."""
    data = shown[0].run.arrays
    axes = fig.subplots(len(numbers), 1 + len(shown), squeeze=False)
    black = plt.get_cmap("viridis").with_extremes(under="black")
    for line, number in enumerate(numbers):
        axes[line, 0].imshow(data["images"][number])
        axes[line, 0].contour(data["masks"][number] != 0, levels=[0.5], colors=COLOURS[1], linewidths=1)
        for axis, one in zip(axes[line, 1:], shown, strict=True):
            axis.imshow(one.values[number], cmap=black, vmin=THRESHOLD, vmax=1)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for axis, title in zip(axes[0], ["image,\nmask outlined", *(one.title for one in shown)], strict=True):
        axis.set_title(title, fontsize=8)


def _size(shown: list[Column], numbers: list[int]) -> tuple[float, float]:
    return 1.5 * (1 + len(shown)), 1.5 * len(numbers) + 0.6


@figure("first_component", FIRST_NOTE, dpi=100)
def draw_first(target: Target, runs: list[Run]) -> tuple[Any, list[dict[str, Any]]]:
    """The first component of each model above the common threshold."""
    shown, numbers = columns(target, runs, colours=False), list(range(len(runs[0].arrays["images"])))
    fig = plt.figure(figsize=_size(shown, numbers), layout="constrained")
    draw_columns(fig, shown, numbers)
    return fig, [table_row(target, one.run, one.row, shown_auc=one.auc) for one in shown]


@figure("components_and_maps", f"{COLOUR_NOTE} {GRID_NOTE}", dpi=100)
def draw_both(target: Target, runs: list[Run]) -> tuple[Any, list[dict[str, Any]]]:
    """Components of the models of ``top`` above maps of those of ``bottom``."""
    above, below = (models_shown(target, target.options[half].get(target.data, []), runs) for half in ("top", "bottom"))
    colours, maps, numbers = columns(target, above, colours=True), chosen(target, below), pictures(target, runs)
    sizes = _size(colours, numbers), grid_size(maps, numbers)
    fig = plt.figure(figsize=(max(sizes[0][0], sizes[1][0]), sizes[0][1] + sizes[1][1]), layout="constrained")
    halves: Any = fig.subfigures(2, 1, height_ratios=[sizes[0][1], sizes[1][1]])
    room = [max(0.01, max(sizes)[0] - width) for width, _ in sizes]  # both halves start at the left
    for half, (width, _), rest in zip(halves, sizes, room, strict=True):
        left = half.subfigures(1, 2, width_ratios=[width, rest])[0]
        if half is halves[0]:
            draw_columns(left, colours, numbers)
        else:
            draw_grid(left, maps, numbers)
    rows = [table_row(target, one.run, one.row, shown_auc=one.auc) for one in colours]
    told = {(row["name"], row["map"]) for row in rows}
    return fig, rows + [row for row in numbers_of(target, maps) if (row["name"], row["map"]) not in told]
