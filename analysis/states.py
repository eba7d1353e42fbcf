"""Vim against the size N of its state: ranks, Binary-AUC by both readings, probes and cost.

Reads RUNS/MODEL-{ranks512,auc_both,probe,knn} of each model, and RUNS/cost.json, which benchmarks/state_size.py leaves;
writes RUNS/states.md, .csv and .html, and a chart as PNG and PDF.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from analysis.figure_pages import SCORE
from analysis.pages import COLOURS, picture, save_figure
from analysis.rank_tables import spread
from analysis.readings import knn_top1
from analysis.renderers import renderer
from analysis.runs import Run, complete_run, read_json
from analysis.tables import Table, show_value, write_page
from analysis.targets import Target

COST = "cost.json"
COLUMNS = {
    "n": "N",
    "parameters": "backbone's parameters",
    "block_rank": "rank of a C x C block off the diagonal",
    "block_bound": "min(C, N)",
    "block_effective_rank": "its effective rank, mean",
    "rank": "rank of M, both directions",
    "effective_rank": "effective rank of M, both directions",
    "similarity": "Binary-AUC of the similarity, published stream",
    "similarity_other": "the same, other stream",
    "mixing": "Binary-AUC of the CLS row of M",
    "linear_top1": "linear probe, top-1 %",
    "knn_top1": "k-NN (k = 20), top-1 %",
    "step": "DINO step, ms",
    "step_ratio": "of the first N's",
    "forward": "forward, ms",
    "forward_ratio": "of the first N's",
    "peak_mib": "peak memory of training, MiB",
}
CHARTS = {
    "block_effective_rank": "effective rank of a block off the diagonal",
    "effective_rank": "effective rank of M",
    "similarity": "Binary-AUC of the similarity",
    "linear_top1": "linear probe, top-1 %",
    "knn_top1": "k-NN, top-1 %",
    "step_ratio": "time of a DINO step / first N's",
    "forward_ratio": "time of a forward pass / first N's",
    "peak_mib": "peak memory of training, MiB",
}
BESIDE = {"similarity": "similarity_other"}
"""A second line in a chart."""
NOTE = """One model and one recipe, the demo's; nothing but the size N of the state differs, and with it the
parameters. Ranks are of M in float64, of chunks of C tokens, over blocks, heads and images: of the blocks off the
diagonal, from the smallest to the largest, in both directions. Binary-AUC is max(m, 1−m) of the mean AUC m over
images, of the last block. Times are medians of rounds in which all N take turns on one machine; memory is the peak of
a process that trains with that N alone."""


def measure(runs: Path, model: str) -> dict[str, Any]:
    """COLUMNS of one model, but for its cost. ValueError where a run is missing."""

    def run(task: str) -> Run:
        return complete_run(runs / f"{model}-{task}", "run make states")

    ranks, auc = run("ranks512"), run("auc_both")
    both = [row for row in ranks.rows if row["direction"] == "both"]
    least, most = (find(row[f"block_rank_{which}"] for row in both) for which, find in (("min", min), ("max", max)))
    return {
        "n": both[0]["inner_size"],
        "parameters": auc.results["backbone_parameters"],
        "block_rank": spread(least, most),
        "block_bound": both[0]["block_rank_bound"],
        "block_effective_rank": float(np.mean([row["block_effective_rank_mean"] for row in both])),
        "rank": spread(min(row["rank_min"] for row in both), max(row["rank_max"] for row in both)),
        "effective_rank": float(np.mean([row["effective_rank_mean"] for row in both])),
        "similarity": auc.maps("similarity")[-1][SCORE],
        "similarity_other": auc.maps("similarity", reading="other")[-1][SCORE],
        "mixing": auc.maps("mixing")[-1][SCORE],
        "linear_top1": 100 * max(row["top1_last"] for row in run("probe").rows),
        "knn_top1": 100 * knn_top1(run("knn"), 20),
        "bound_holds": all(row["bound_holds"] for row in ranks.rows),
    }


def cost(runs: Path) -> dict[int, dict[str, Any]]:
    """What each N costs, in the columns' units; empty where it was not measured."""
    path = runs / COST
    rows = read_json(path, "")["rows"] if path.is_file() else []
    return {
        row["n"]: {
            "step": 1e3 * row["step_seconds"],
            "forward": 1e3 * row["forward_seconds"],
            **{key: row[key] for key in ("step_ratio", "forward_ratio", "peak_mib")},
        }
        for row in rows
    }


def show(row: Mapping[str, Any], column: str) -> str:
    """A cell as people read it."""
    value = row.get(column)
    if isinstance(value, float):
        return f"{value:.{3 if column.startswith(('similarity', 'mixing')) else 2 if 'ratio' in column else 1}f}"
    return show_value(row, column)


def chart(rows: list[dict[str, Any]], base: Path) -> list[Path]:
    """A panel for each of CHARTS that there is, over N."""
    there = [name for name in CHARTS if any(name in row for row in rows)]
    columns = min(4, len(there))
    fig, axes = plt.subplots(
        math.ceil(len(there) / columns), columns, figsize=(3.2 * columns, 5.4), squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes.flat, there, strict=False):
        for colour, key in zip(COLOURS, (name, BESIDE.get(name)), strict=False):
            points = [(row["n"], row[key]) for row in rows if key in row]
            if points:
                axis.plot(
                    *zip(*points, strict=True),
                    "o-",
                    color=colour,
                    label="published stream" if key == name else "other stream",
                )
        if name in BESIDE:
            axis.legend(fontsize=8)
        axis.set_xscale("log", base=2)
        axis.set_xticks([row["n"] for row in rows], [str(row["n"]) for row in rows])
        axis.set_title(CHARTS[name], fontsize=10)
        axis.set_xlabel("N")
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(there) :]:
        axis.set_visible(False)
    return save_figure(fig, base)


@renderer("states")
def draw(target: Target, runs: Path) -> list[Path]:
    """RUNS/states.md, .csv and .html, .png and .pdf."""
    costs, base = cost(runs), runs / target.name
    rows = [measure(runs, model) for model in target.models]
    rows = [row | costs.get(row["n"], {}) for row in rows]
    paths = chart(rows, base)
    text = NOTE
    if not costs:
        text += f" Cost was not measured: python benchmarks/state_size.py --out {runs / COST}"
    if broken := [str(row["n"]) for row in rows if not row["bound_holds"]]:
        text += f" A bound does not hold at N = {', '.join(broken)}."
    text += f" {_origin(runs, target)}"
    table = Table(COLUMNS, rows, show).filled()
    below = picture(paths[0], "each measure over the size of the state")
    return [*write_page(base, target.title, text, table, below=below), *paths]


def _origin(runs: Path, target: Target) -> str:
    """Revision and date of the first run, and the machine on which cost was measured."""
    record = complete_run(runs / f"{target.models[0]}-auc_both", "run make states").record
    path = runs / COST
    machine = f" Cost: {read_json(path, '')['machine']}." if path.is_file() else ""
    return f"Revision {record.get('revision', '')[:8]}, {record.get('started', '')[:10]}.{machine}"
