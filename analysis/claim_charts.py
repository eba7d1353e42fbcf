"""Charts of the claims page: AUC against probes, and what tokens do by layer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D

from analysis.pages import COLOURS, save_figure
from analysis.readings import READINGS
from analysis.runs import Run
from analysis.targets import Target

MARKERS = "osD^vPX"
SCATTERS = {"layers": "layers, class token", "heads": "mixer's heads, last block", "registers": "registers, last block"}


def draw_chart(target: Target, points: Sequence[dict[str, Any]], runs: Sequence[Run], base: Path) -> list[Path]:
    """BASE.png and BASE.pdf.

    Args:
        target: says what models are called.
        points: of AUC against probes; see :func:`analysis.claims.points`.
        runs: of token statistics.
        base: the files' path without a suffix.
    """
    models = list(dict.fromkeys(run.model for run in runs))
    style: dict[str, dict[str, Any]] = {
        model: {"color": COLOURS[i % 7], "marker": MARKERS[i % 7]} for i, model in enumerate(models)
    }
    fig, axes = plt.subplots(2, 3, figsize=(13, 7.6), layout="constrained")
    for axis, (over, title) in zip(axes[0], SCATTERS.items(), strict=True):
        _scatter(axis, [point for point in points if point["over"] == over], style)
        axis.set_title(f"{title}: probe against AUC", fontsize=10)
    mixing = [(run, [row for row in run.rows if row["distance"] is not None]) for run in runs]
    _by_layer(axes[1, 0], mixing, "distance_of_diagonal", style)
    controls = {row["uniform_of_diagonal"] for _, rows in mixing for row in rows}
    for control in controls:
        axes[1, 0].axhline(control, color="#444", linewidth=1, linestyle=":", label="uniform M")
    axes[1, 0].set_title("mixing distance / diagonal, mean of heads (band: all heads)", fontsize=10)
    axes[1, 0].set_ylim(0, None)
    if controls:
        axes[1, 0].legend(*_once(axes[1, 0]), fontsize=8, frameon=False)
    for axis, key, title in (
        (axes[1, 1], "outlier_share", "outliers, share of patches"),
        (axes[1, 2], "patch_norm_median", "median norm of patches, before the final norm"),
    ):
        for reading in READINGS:
            read = [(run, [row for row in run.rows if row["reading"] == reading]) for run in runs]
            _by_layer(axis, read, key, style, "-" if reading == "published" else "--")
        axis.set_title(title, fontsize=10)
    if all(value > 0 for run in runs for row in run.rows if (value := row["patch_norm_median"]) is not None):
        axes[1, 2].set_yscale("log")
    for axis in axes[1]:
        axis.set_xlabel("block / last block")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    legend = [Line2D([], [], **style[model], label=target.label(model)["label"]) for model in models]
    legend += [
        Line2D([], [], color="#444", marker="o", markerfacecolor="#444", linestyle="-", label="published stream"),
        Line2D([], [], color="#444", marker="o", markerfacecolor="white", linestyle="--", label="other stream"),
    ]
    fig.legend(handles=legend, loc="outside lower center", ncols=len(legend), fontsize=9, frameon=False)
    return save_figure(fig, base)


def _scatter(axis: Any, points: Sequence[dict[str, Any]], style: dict[str, dict[str, Any]]) -> None:
    """A point for each place of each model and seed, hollow in the other stream."""
    if not points:
        axis.text(0.5, 0.5, "none of these models has any", ha="center", va="center", transform=axis.transAxes)
    for point in points:
        look = style[point["model"]]
        face = look["color"] if point["reading"] == "published" else "white"
        axis.plot(point["auc"], point["top1"], look["marker"], color=look["color"], markerfacecolor=face, markersize=5)
    axis.axvline(0.5, color="#888", linewidth=0.8, linestyle=":")
    axis.set_xlabel("mean AUC m")
    axis.set_ylabel("linear probe, top-1 %")


def _by_layer(
    axis: Any, found: Sequence[tuple[Run, list[dict[str, Any]]]], key: str, style: dict[str, dict[str, Any]],
    line: str = "-",
) -> None:  # fmt: skip
    """A model's mean over heads and seeds by block, in a band from the least to the most where there are heads."""
    for model, look in style.items():
        rows = [row for run, its in found if run.model == model for row in its]
        blocks = sorted({row["block"] for row in rows})
        if not blocks:
            continue
        share = [block / max(1, blocks[-1]) for block in blocks]
        values = [[row[key] for row in rows if row["block"] == block] for block in blocks]
        face = look["color"] if line == "-" else "white"
        axis.plot(share, [np.mean(v) for v in values], line, **look, markersize=5, markerfacecolor=face)
        if rows[0]["head"] is not None:
            ends: list[Callable[..., Any]] = [min, max]
            axis.fill_between(share, *([end(v) for v in values] for end in ends), color=look["color"], alpha=0.12)


def _once(axis: Any) -> tuple[list[Any], list[str]]:
    """Handles and labels of an axis, each label once."""
    handles, labels = axis.get_legend_handles_labels()
    found = dict(zip(labels, handles, strict=True))
    return list(found.values()), list(found)
