"""Charts of Binary-AUC within a model: by head, by register, by layer."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from analysis.figure_pages import KINDS, SCORE_NAME, figure, table_row
from analysis.figures import HATCH, NOTE, frame, legend_of
from analysis.pages import COLOURS
from analysis.readings import SCORE, bars, ends, named, readings
from analysis.runs import Run, find_run
from analysis.targets import Target


@figure("heads", NOTE)
def heads(target: Target, runs: list[Run]) -> tuple[Any, list[dict[str, Any]]]:
    """Points: each head of the last two blocks, a panel for each model; a line is the mean over heads."""
    most = max((row["index"] for run in runs for row in run.maps("mixing", "head")), default=0) + 1
    width = max(3.6, 1 + 0.5 * most)
    fig, axes = plt.subplots(
        1, len(runs), figsize=(width * len(runs), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    rows = []
    for axis, run in zip(axes[0], runs, strict=True):
        parts = run.maps("mixing", "head")
        blocks = sorted({row["block"] for row in parts})[-2:]
        for number, block in enumerate(blocks):
            mine = [table_row(target, run, row) for row in parts if row["block"] == block]
            scores = [row[SCORE] for row in mine]
            places = [number + 0.6 * (i / max(1, len(mine) - 1) - 0.5) for i in range(len(mine))]
            for place, row in zip(places, mine, strict=True):
                axis.errorbar(
                    place, row[SCORE], yerr=bars(row), fmt="o", color=COLOURS[number], markersize=5, capsize=2
                )
                top = row[SCORE] + (bars(row) or [[0.0], [0.0]])[1][0]
                axis.annotate(
                    str(row["index"]), (place, top), (0, 3), textcoords="offset points", fontsize=7, ha="center"
                )
            axis.hlines(np.mean(scores), number - 0.38, number + 0.38, color=COLOURS[number], linewidth=1.5, alpha=0.6)
            rows += mine
        axis.set_xlim(-0.5, len(blocks) - 0.5)
        axis.set_xticks(range(len(blocks)), [f"block {block}" for block in blocks])
        axis.set_title(f"{target.label(run.model)['label']}, heads by number", fontsize=10)
    if not rows:
        raise ValueError(
            f"{target.name}: none of {', '.join(run.folder.name for run in runs)} has a map of a head of M"
        )
    for axis in axes[0]:
        frame(axis, [row[SCORE] for row in rows])
    axes[0, 0].set_ylabel(SCORE_NAME)
    return fig, rows


@figure("registers", NOTE)
def registers(target: Target, runs: list[Run]) -> tuple[Any, list[dict[str, Any]]]:
    """Each register of the last block: mean AUC before normalisation, and top-1 of a probe on it, in both readings."""
    fig, axes = plt.subplots(2, len(runs), figsize=(5.4 * len(runs), 5.4), squeeze=False, layout="constrained")
    rows = []
    for column, run in enumerate(runs):
        found = readings(run, "similarity", "register")
        if not found:
            raise ValueError(f"{run.folder} has no maps of registers: {run.model} has none, or maps leave them out")
        last = max(row["block"] for row in next(iter(found.values())))
        probe = find_run(run.folder.with_name(f"{run.model}-{target.tasks[1]}"))
        top1 = {} if probe is None else {(r["stream"], r["pooling"]): 100 * r["top1_last"] for r in probe.rows}
        upper, lower = axes[:, column]
        width = 0.8 / len(found)
        for number, (reading, every) in enumerate(found.items()):
            mine = [table_row(target, run, row, probe=top1.get((row["stream"], f"register{row['index']}")))
                    for row in every if row["block"] == last]  # fmt: skip
            numbers, aucs = [row["index"] for row in mine], [row["auc"] for row in mine]
            probes = [float("nan") if row["probe"] is None else row["probe"] for row in mine]
            errors = [bars(row, "auc") or [[0.0], [0.0]] for row in mine]
            places = [n + width * (number - (len(found) - 1) / 2) for n in numbers]
            face = "white" if reading != "published" else None
            upper.bar(
                places, [auc - 0.5 for auc in aucs], bottom=0.5, width=0.92 * width, color=face or COLOURS[0],
                edgecolor=COLOURS[0], hatch=HATCH[reading], yerr=[[e[side][0] for e in errors] for side in (0, 1)],
                capsize=2, error_kw={"linewidth": 0.8}, label=named(mine[0]),
            )  # fmt: skip
            lower.bar(
                places, probes, width=0.92 * width, color=face or COLOURS[1], edgecolor=COLOURS[1],
                hatch=HATCH[reading], label=named(mine[0]),
            )  # fmt: skip
            if (mean := top1.get((mine[0]["stream"], "cls"))) is not None:
                lower.axhline(mean, color="#444", linewidth=1, linestyle="--" if face is None else ":",
                              label=f"mean of all registers, {mine[0]['stream']}")  # fmt: skip
            rows += mine
        upper.axhline(0.5, color="#444", linewidth=0.8)
        low, high = upper.get_ylim()
        upper.set_ylim(low, high + 0.35 * (high - low))
        upper.legend(fontsize=8, frameon=False, loc="upper left")
        upper.set_title(f"{target.label(run.model)['label']}, similarity of each register, last block", fontsize=10)
        if top1:
            lower.legend(fontsize=7, frameon=False, loc="upper right", ncols=2)
            lower.set_ylim(0, 1.35 * max(top1.values()))
        lower.set_xlabel("register")
        for axis in (upper, lower):
            axis.set_xticks(numbers)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("mean AUC m")
    axes[1, 0].set_ylabel("linear probe, top-1 %")
    return fig, rows


@figure("layers", NOTE)
def layers(target: Target, runs: list[Run]) -> tuple[Any, list[dict[str, Any]]]:
    """The mean AUC before normalisation over the blocks, in both readings; a panel for each kind of map."""
    fig, axes = plt.subplots(1, len(KINDS), figsize=(11, 4.6), sharey=True, layout="constrained")
    rows, seen = [], {}
    for axis, (kind, title) in zip(axes, KINDS.items(), strict=True):
        for run, colour, marker in zip(runs, COLOURS, "osD^vPX", strict=False):
            for reading, every in readings(run, kind).items():
                mine = [table_row(target, run, row) for row in every]
                depth = mine[-1]["block"]
                share, aucs = [row["block"] / max(1, depth) for row in mine], [row["auc"] for row in mine]
                style, filled = ("-", colour) if reading == "published" else ("--", "white")
                line = axis.plot(share, aucs, style, marker=marker, color=colour, markersize=5, markerfacecolor=filled)
                intervals = [ends(row, "auc") or (auc, auc) for row, auc in zip(mine, aucs, strict=True)]
                axis.fill_between(share, *zip(*intervals, strict=True), color=colour, alpha=0.12, linewidth=0)
                if kind == "similarity":
                    seen[f"{legend_of(run, target, mine[0])}, {depth + 1} blocks"] = line[0]
                rows += mine
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("block / last block")
    for axis in axes:
        frame(axis, [row["auc"] for row in rows])
    axes[0].set_ylabel("mean AUC m, before normalisation")
    fig.legend(seen.values(), seen.keys(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return fig, rows
