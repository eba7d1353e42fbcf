"""Charts of Binary-AUC: by model, by head, by register, by layer."""

from typing import Any

import matplotlib.pyplot as plt

from analysis.figure_pages import KINDS, SCORE, SCORE_NAME, figure, table_row
from analysis.pages import COLOURS
from analysis.runs import Run, find_run
from analysis.targets import Target

NOTE = """Binary-AUC is the area under the ROC curve of a map's values as scores for foreground against background, per
image, on the map's grid. m is its mean over images; max(m, 1−m) leaves the sign of a map free. The mean of
max(AUC, 1−AUC) exceeds 0.5 for maps of no meaning too: read it beside that of shuffled maps. Images without both
classes are skipped."""


def _colour(training: str) -> str:
    return {"DINO": COLOURS[0], "supervised": COLOURS[1], "DINOv2": COLOURS[2]}.get(training, COLOURS[3])


def _axis(axis: Any, values: list[float]) -> None:
    """From a little under the lowest value, or chance, to a little above the highest."""
    axis.axhline(0.5, color="#888", linewidth=0.8, linestyle=":")
    axis.set_ylim(min(0.48, min(values) - 0.02), max(values) + 0.06)
    axis.spines[["top", "right"]].set_visible(False)


@figure("bars", NOTE)
def bars(target: Target, runs: list[Run]) -> tuple[Any, list[dict[str, Any]]]:
    """A bar for each model, a panel for each kind of map; of the last block."""
    fig, axes = plt.subplots(1, len(KINDS), figsize=(4 + 0.9 * len(runs), 3.6), sharey=True, layout="constrained")
    rows, seen = [], {}
    for axis, (kind, title) in zip(axes, KINDS.items(), strict=True):
        last = [run.maps(kind)[-1] for run in runs]
        for at, (run, row) in enumerate(zip(runs, last, strict=True)):
            who = target.label(run.model)
            (bar,) = axis.bar(at, row[SCORE] - 0.5, bottom=0.5, color=_colour(who["training"]), width=0.7)
            seen[who["training"]] = bar
            axis.text(at, row[SCORE] + 0.005, f"{row[SCORE]:.3f}", ha="center", fontsize=8)
            rows.append(table_row(target, run, row))
        axis.set_xticks(range(len(runs)), [target.label(run.model)["label"] for run in runs], rotation=30, ha="right")
        axis.set_title(f"{title}, last block", fontsize=10)
    values = [row[SCORE] for row in rows]
    for axis in axes:
        _axis(axis, values)
    axes[0].set_ylabel(SCORE_NAME)
    fig.legend(seen.values(), seen.keys(), loc="outside lower center", ncols=len(seen), fontsize=9, frameon=False)
    return fig, rows


@figure("heads", NOTE)
def heads(target: Target, runs: list[Run]) -> tuple[Any, list[dict[str, Any]]]:
    """Points: each head of the last two blocks, a panel for each model; a dash is the mean over heads."""
    most = max((row["index"] for run in runs for row in run.maps("mixing", "head")), default=0) + 1
    width = max(3.6, 1 + 0.5 * most)
    fig, axes = plt.subplots(
        1, len(runs), figsize=(width * len(runs), 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    rows = []
    for axis, run in zip(axes[0], runs, strict=True):
        parts = run.maps("mixing", "head")
        blocks = sorted({row["block"] for row in parts})[-2:]
        for number, block in enumerate(blocks):
            mine = [row for row in parts if row["block"] == block]
            scores = [row[SCORE] for row in mine]
            places = [number + 0.6 * (i / max(1, len(mine) - 1) - 0.5) for i in range(len(mine))]
            axis.scatter(places, scores, color=COLOURS[number], s=28, zorder=2)
            axis.hlines(sum(scores) / len(scores), number - 0.38, number + 0.38, color=COLOURS[number], linewidth=1.5)
            for place, row in zip(places, mine, strict=True):
                axis.annotate(
                    str(row["index"]),
                    (place, row[SCORE]),
                    (0, 5),
                    textcoords="offset points",
                    fontsize=7,
                    ha="center",
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                )
            rows += [table_row(target, run, row) for row in mine]
        axis.set_xticks(range(len(blocks)), [f"block {block}" for block in blocks])
        axis.set_title(f"{target.label(run.model)['label']}, heads by number", fontsize=10)
    for axis in axes[0]:
        _axis(axis, [row[SCORE] for row in rows])
    axes[0, 0].set_ylabel(SCORE_NAME)
    return fig, rows


@figure("registers", NOTE)
def registers(target: Target, runs: list[Run]) -> tuple[Any, list[dict[str, Any]]]:
    """Each register of the last block: mean AUC before normalisation, and top-1 of a probe on it alone."""
    fig, axes = plt.subplots(2, len(runs), figsize=(4.4 * len(runs), 5), squeeze=False, layout="constrained")
    rows = []
    for column, run in enumerate(runs):
        parts = run.maps("similarity", "register")
        last = max((row["block"] for row in parts), default=0)
        mine = [row for row in parts if row["block"] == last]
        if not mine:
            raise ValueError(f"{run.folder} has no maps of registers: {run.model} has none, or maps leave them out")
        probe = find_run(run.folder.with_name(f"{run.model}-{target.tasks[1]}"))
        top1 = {} if probe is None else {row["pooling"]: 100 * row["top1_last"] for row in probe.rows}
        upper, lower = axes[:, column]
        numbers = [row["index"] for row in mine]
        upper.bar(numbers, [row["auc"] - 0.5 for row in mine], bottom=0.5, color=COLOURS[0], width=0.7)
        upper.axhline(0.5, color="#444", linewidth=0.8)
        upper.set_title(f"{target.label(run.model)['label']}, similarity of each register, last block", fontsize=10)
        lower.bar(numbers, [top1.get(f"register{n}", float("nan")) for n in numbers], color=COLOURS[1], width=0.7)
        if "cls" in top1:
            lower.axhline(top1["cls"], color="#444", linewidth=1, linestyle="--", label="mean of all registers")
            lower.legend(fontsize=8, frameon=False, loc="upper right")
            lower.set_ylim(0, 1.2 * max(top1.values()))
        lower.set_xlabel("register")
        for axis in (upper, lower):
            axis.set_xticks(numbers)
            axis.spines[["top", "right"]].set_visible(False)
        rows += [table_row(target, run, row, probe=top1.get(f"register{row['index']}")) for row in mine]
    axes[0, 0].set_ylabel("mean AUC m")
    axes[1, 0].set_ylabel("linear probe, top-1 %")
    return fig, rows


@figure("layers", NOTE)
def layers(target: Target, runs: list[Run]) -> tuple[Any, list[dict[str, Any]]]:
    """A line for each model over its blocks, a panel for each kind of map."""
    fig, axes = plt.subplots(1, len(KINDS), figsize=(9, 3.6), sharey=True, layout="constrained")
    rows = []
    for axis, (kind, title) in zip(axes, KINDS.items(), strict=True):
        for run, colour, marker in zip(runs, COLOURS, "osD^vPX", strict=False):
            mine = run.maps(kind)
            depth = mine[-1]["block"]
            share = [row["block"] / max(1, depth) for row in mine]
            axis.plot(share, [row[SCORE] for row in mine], marker=marker, color=colour, markersize=5,
                      label=f"{target.label(run.model)['label']} ({depth + 1} blocks)")  # fmt: skip
            rows += [table_row(target, run, row) for row in mine]
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("block / last block")
    for axis in axes:
        _axis(axis, [row[SCORE] for row in rows])
    axes[0].set_ylabel(SCORE_NAME)
    axes[0].legend(fontsize=8, frameon=False)
    return fig, rows
