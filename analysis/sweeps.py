"""Models against one thing that is varied: ranks, Binary-AUC by both readings, probes and cost.

Reads RUNS/MODEL-TASK of each model and task of the target, and RUNS/TARGET-cost.json, which its benchmark leaves;
writes RUNS/TARGET.md, .csv and .html, and a chart as PNG and PDF. The target says what is varied, ``over: {key,
label}``, an argument that its models change or ``side``, and which script measures the ``cost``.
"""

import math
from collections.abc import Mapping, Sequence
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
from analysis.statements import sections
from analysis.tables import Table, show_value, write_page
from analysis.targets import Target

COLUMNS = {
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
    "step_ratio": "of the first's",
    "forward": "forward, ms",
    "forward_ratio": "of the first's",
    "peak_mib": "peak memory of training, MiB",
}
CHARTS = {
    "block_effective_rank": "effective rank of a block off the diagonal",
    "effective_rank": "effective rank of M",
    "similarity": "Binary-AUC of the similarity\n(dashed: other stream)",
    "linear_top1": "linear probe, top-1 %",
    "knn_top1": "k-NN, top-1 %",
    "step_ratio": "time of a DINO step / the first's",
    "forward_ratio": "time of a forward pass / the first's",
    "peak_mib": "peak memory of training, MiB",
}
BESIDE = {"similarity": "similarity_other"}
"""A dashed line in a chart."""
NOTE = """One recipe, the demo's; between the models of a line nothing differs but what is varied, and with it the
parameters. Ranks are of M in float64, of chunks of C tokens, over blocks, heads and images: of the blocks off the
diagonal, from the smallest to the largest, in both directions. Binary-AUC is max(m, 1−m) of the mean AUC m over images,
of the last block. Times are medians of rounds in which all take turns on one machine; memory is the peak of a process
that trains with that model alone."""


def point(target: Target, model: str) -> tuple[str, int]:
    """A model's series, its label, and where it lies in it."""
    entry = target.label(model)
    key = target.options["over"]["key"]
    return entry["family"], int(entry["side"] if key == "side" else entry["changes"][key])


def measure(target: Target, runs: Path, model: str) -> dict[str, Any]:
    """COLUMNS of one model, but for its cost. ValueError where a run is missing."""
    series, x = point(target, model)
    found: dict[str, Any] = {"series": series, "x": x}
    for task in target.tasks:
        run = complete_run(runs / f"{model}-{task}", f"run make {target.name}")
        found |= _READERS[task](run)
    return found


def _ranks(run: Run) -> dict[str, Any]:
    both = [row for row in run.rows if row["direction"] in ("both", "attention")]
    least, most = (find(row[f"block_rank_{which}"] for row in both) for which, find in (("min", min), ("max", max)))
    return {
        "block_rank": spread(least, most),
        "block_bound": both[0]["block_rank_bound"],
        "block_effective_rank": float(np.mean([row["block_effective_rank_mean"] for row in both])),
        "rank": spread(min(row["rank_min"] for row in both), max(row["rank_max"] for row in both)),
        "effective_rank": float(np.mean([row["effective_rank_mean"] for row in both])),
        "bound_holds": all(row["bound_holds"] for row in run.rows),
    }


def _auc(run: Run) -> dict[str, Any]:
    return {
        "parameters": run.results["backbone_parameters"],
        "similarity": run.maps("similarity")[-1][SCORE],
        "similarity_other": run.maps("similarity", reading="other")[-1][SCORE],
        "mixing": run.maps("mixing")[-1][SCORE],
    }


_READERS = {
    "ranks512": _ranks,
    "auc_both": _auc,
    "probe": lambda run: {"linear_top1": 100 * max(row["top1_last"] for row in run.rows)},
    "knn": lambda run: {"knn_top1": 100 * knn_top1(run, 20)},
}
"""What a task's run gives."""


def _cost_file(target: Target, runs: Path) -> Path:
    return runs / f"{target.name}-cost.json"


def cost(target: Target, runs: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """What each point costs, in the columns' units; empty where it was not measured."""
    path = _cost_file(target, runs)
    rows = read_json(path, "")["rows"] if path.is_file() else []
    return {
        (row["series"], row["x"]): {
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


def chart(rows: Sequence[Mapping[str, Any]], label: str, base: Path) -> list[Path]:
    """A panel for each of CHARTS that there is, over what is varied, a line a series."""
    there = [name for name in CHARTS if any(name in row for row in rows)]
    columns = min(4, len(there))
    fig, axes = plt.subplots(
        math.ceil(len(there) / columns), columns, figsize=(3.2 * columns, 5.4), squeeze=False, layout="constrained"
    )
    ticks = sorted({row["x"] for row in rows})
    for axis, name in zip(axes.flat, there, strict=False):
        for number, series in enumerate(dict.fromkeys(row["series"] for row in rows)):
            for key, style in ((name, "o-"), (BESIDE.get(name, ""), "o--")):
                points = [(row["x"], row[key]) for row in rows if row["series"] == series and key in row]
                if points:
                    label_of = series if key == name else None
                    axis.plot(*zip(*points, strict=True), style, color=COLOURS[number % len(COLOURS)], label=label_of)
        axis.legend(fontsize=8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(x) for x in ticks])
        axis.set_title(CHARTS[name], fontsize=10)
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(there) :]:
        axis.set_visible(False)
    return save_figure(fig, base)


@renderer("sweep")
def draw(target: Target, runs: Path) -> list[Path]:
    """RUNS/TARGET.md, .csv and .html, .png and .pdf."""
    costs, base, over = cost(target, runs), runs / target.name, target.options["over"]
    rows = [measure(target, runs, model) for model in target.models]
    rows = [row | costs.get((row["series"], row["x"]), {}) for row in rows]
    paths = chart(rows, over["label"], base)
    text = NOTE
    if not costs:
        text += f" Cost was not measured: python {target.options['cost']} --out {_cost_file(target, runs)}"
    if broken := [f"{row['series']} {row['x']}" for row in rows if not row.get("bound_holds", True)]:
        text += f" A bound does not hold for {', '.join(broken)}."
    text += f" {_origin(target, runs)}"
    table = Table({"series": "model", "x": over["label"]} | COLUMNS, rows, show).filled()
    below = picture(paths[0], f"each measure over {over['label']}")
    return [*write_page(base, target.title, text, table, below=below, sections=sections(target, [], SCORE)), *paths]


def _origin(target: Target, runs: Path) -> str:
    """Revision and date of the first run, and the machine on which cost was measured."""
    record = complete_run(runs / f"{target.models[0]}-{target.tasks[0]}", f"run make {target.name}").record
    path = _cost_file(target, runs)
    machine = f" Cost: {read_json(path, '')['machine']}." if path.is_file() else ""
    return f"Revision {record.get('revision', '')[:8]}, {record.get('started', '')[:10]}.{machine}"
