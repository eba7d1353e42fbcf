"""How Binary-AUC scores a map: one picture of a run, from its mask and map over thresholds to the curve."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import ListedColormap

from analysis.figure_pages import DATA, describe_map, write_figure
from analysis.maps import foreground, frame_curves
from analysis.pages import COLOURS
from analysis.readings import SCORE, named
from analysis.renderers import renderer
from analysis.runs import Run
from analysis.tables import Table
from analysis.targets import Target
from metrics import binary_auc, roc_curve

SHARES = (0.1, 0.3, 0.6)
"""Of the cells that lie above the thresholds drawn."""
SIDES = ("background, right", "background, taken for foreground", "foreground, missed", "foreground, right")
SIDE_COLOURS = ("#f2f2f2", COLOURS[1], COLOURS[5], COLOURS[2])
COLUMNS = {
    "what": "what",
    "threshold": "threshold",
    "true": "true positives",
    "false": "false positives",
    "value": "value",
}


def pick(run: Run) -> tuple[int, dict[str, Any]]:
    """The kept picture whose map of the last block has the median AUC, and the map's row."""
    row = run.maps("similarity")[-1]
    data = run.arrays
    maps, masks = torch.from_numpy(data[f"maps/{row['map']}"]), torch.from_numpy(data["masks"])
    scores = binary_auc(maps[:, None], masks, int(data["ignore_index"]))[:, 0].numpy()
    there = np.flatnonzero(~np.isnan(scores))
    if not len(there):
        raise ValueError(
            f"{run.folder} kept no picture with both foreground and background: keep more (model.pictures)"
        )
    return int(there[np.argsort(scores[there], kind="stable")[len(there) // 2]]), row


def rates(values: np.ndarray, positive: np.ndarray, threshold: float) -> tuple[float, float]:
    """True and false positive rates of the cells at or above a threshold."""
    above = values >= threshold
    return float(above[positive].mean()), float(above[~positive].mean())


@renderer("metric_drawing")
def draw(target: Target, runs: Path) -> list[Path]:
    """RUNS/TARGET.*: image, mask, map, three thresholds, curve."""
    run = target.some(runs)[0]
    number, row = pick(run)
    data = run.arrays
    values = data[f"maps/{row['map']}"][number]
    positive, counted = (m[number] for m in foreground(data, values.shape))
    flat, truth = values[counted], positive[counted]
    fpr, tpr = roc_curve(flat, truth)
    area = float(np.trapezoid(tpr, fpr))
    rows: list[dict[str, Any]] = []

    fig, axes = plt.subplots(2, 4, figsize=(11, 5.8), layout="constrained")
    axes[0, 0].imshow(data["images"][number])
    axes[0, 0].set_title("1. image", fontsize=10)
    mask = data["masks"][number]
    axes[0, 1].imshow((mask != 0) & (mask != int(data["ignore_index"])), cmap="gray", vmin=0, vmax=1)
    axes[0, 1].set_title("2. mask", fontsize=10)
    axes[0, 2].imshow(positive & counted, cmap="gray", vmin=0, vmax=1)
    axes[0, 2].set_title(f"3. mask on the map's grid, {values.shape[0]} x {values.shape[1]}", fontsize=10)
    axes[0, 3].imshow(values, cmap="viridis")
    axes[0, 3].set_title("4. map: cosine of CLS and patches", fontsize=10)
    ordered = np.sort(flat)[::-1]
    for axis, share, letter in zip(axes[1], SHARES, "abc", strict=False):
        threshold = float(ordered[max(0, round(share * len(ordered)) - 1)])
        true, false = rates(flat, truth, threshold)
        rows.append(
            {"what": f"{letter}: {share:.0%} of the cells above", "threshold": threshold, "true": true, "false": false}
        )
        sides = np.where(counted, 2 * positive + (values >= threshold), 0)
        axis.imshow(sides, cmap=ListedColormap(SIDE_COLOURS), vmin=0, vmax=3)
        axis.set_title(f"5{letter}. above {threshold:.2f}", fontsize=10)
        axis.set_xlabel(f"true positives {true:.2f}, false {false:.2f}", fontsize=9)
        axes[1, 3].plot(false, true, "o", color="black", markersize=5, zorder=3)
        axes[1, 3].annotate(letter, (false, true), (6, -11), textcoords="offset points", fontsize=10)
    for axis in axes.flat[:7]:
        axis.set(xticks=[], yticks=[])
    axes[1, 3].fill_between(fpr, tpr, color=COLOURS[0], alpha=0.15, linewidth=0)
    axes[1, 3].plot(fpr, tpr, color=COLOURS[0], linewidth=1.6)
    frame_curves(axes[1, 3])
    axes[1, 3].set_title(f"6. over all thresholds: AUC {area:.3f}", fontsize=10)
    axes[1, 3].set_xlabel("false positive rate", fontsize=9)
    axes[1, 3].set_ylabel("true positive rate", fontsize=9)
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor="#999") for colour in SIDE_COLOURS]
    fig.legend(handles, SIDES, loc="outside lower center", ncols=4, fontsize=9, frameon=False)

    exact = binary_auc(torch.from_numpy(values[None, None]), torch.from_numpy(data["masks"][number : number + 1]),
                       int(data["ignore_index"])).item()  # fmt: skip
    rows += [
        {"what": "area under the curve, by trapezoids", "value": area},
        {"what": "the same by ranks (metrics.binary_auc)", "value": exact},
        {"what": "max(AUC, 1 − AUC) of this image", "value": max(exact, 1 - exact)},
        {"what": "mean AUC m over all images of the run", "value": row["auc"]},
        {"what": "max(m, 1 − m)", "value": row["auc_of_mean_normalized"]},
        {"what": "mean of max(AUC, 1 − AUC) over all images", "value": row["auc_normalized"]},
    ]
    rows += [
        {"what": f"max(m, 1 − m) of the same map read from the other stream, {named(other)}", "value": other[SCORE]}
        for other in run.maps("similarity", reading="other")[-1:]
    ]
    text = (
        f"{target.label(run.model)['label']}, {describe_map(row)}, {named(row)}; of the pictures that the run kept, "
        f"the one of median AUC. Weights: {run.results['weights']}. Data: {DATA[target.data]}."
    )
    return write_figure(target, runs, fig, text, Table(COLUMNS, rows))
