"""Charts of Binary-AUC: by model, by head, by register, by layer. PNG, PDF, CSV and an HTML page with the numbers."""

import csv
import html
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt

from analysis.pages import COLOURS, html_table, page, picture, save_figure
from common.files import write_text

if TYPE_CHECKING:
    from analysis.paper import Run, Target

SCORE = "auc_of_mean_normalized"
SCORE_NAME = "Binary-AUC, max(m, 1−m)"
KINDS = {"similarity": "CLS–patch similarity", "mixing": "CLS row of M"}
NAME = re.compile(r"block(\d+)/(?:(head|register)(\d+)/)?(\w+)")
COLUMNS = {
    "model": "model",
    "training": "training",
    "map": "map",
    "auc": "mean AUC m",
    SCORE: "max(m, 1−m)",
    "auc_normalized": "mean of max(AUC, 1−AUC)",
    "shuffled": "the same of shuffled maps",
    "probe": "linear probe, top-1 %",
    "images": "images",
    "skipped": "skipped",
    "weights": "weights",
    "date": "date",
    "revision": "revision",
}
NOTE = """Binary-AUC is the area under the ROC curve of a map's values as scores for foreground against background, per
image, on the map's grid. m is its mean over images; max(m, 1−m) leaves the sign of a map free. The mean of
max(AUC, 1−AUC) exceeds 0.5 for maps of no meaning too: read it beside that of shuffled maps. Images without both
classes are skipped."""


def map_rows(run: "Run") -> list[dict[str, Any]]:
    """A run's scores with ``block``, ``part`` (head, register or None), ``index`` and ``kind`` of each map."""
    found = []
    for row in run.rows:
        match = NAME.fullmatch(row["map"])
        if match:
            index = None if match[3] is None else int(match[3])
            found.append(row | {"block": int(match[1]), "part": match[2], "index": index, "kind": match[4]})
    return found


def whole_maps(run: "Run", kind: str) -> list[dict[str, Any]]:
    """The map of that kind of each block, from the first block to the last."""
    return [row for row in map_rows(run) if row["part"] is None and row["kind"] == kind]


def table_row(target: "Target", run: "Run", row: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One line of COLUMNS."""
    shuffled = next((r["auc_normalized"] for r in run.rows if r["map"] == "shuffled"), None)
    who = target.label(run.model)
    return {
        "model": who["label"], "training": who["training"], "weights": run.table["weights"],
        "date": run.record.get("started", "")[:10], "revision": run.record.get("revision", "")[:8],
        "shuffled": shuffled, **row, **more,
    }  # fmt: skip


def _colour(training: str) -> str:
    return {"DINO": COLOURS[0], "supervised": COLOURS[1], "DINOv2": COLOURS[2]}.get(training, COLOURS[3])


def _axis(axis: Any, values: list[float]) -> None:
    """From a little under the lowest value, or chance, to a little above the highest."""
    axis.axhline(0.5, color="#888", linewidth=0.8, linestyle=":")
    axis.set_ylim(min(0.48, min(values) - 0.02), max(values) + 0.06)
    axis.spines[["top", "right"]].set_visible(False)


def bars(target: "Target", runs: list["Run"]) -> tuple[Any, list[dict[str, Any]]]:
    """A bar for each model, a panel for each kind of map; of the last block."""
    fig, axes = plt.subplots(1, len(KINDS), figsize=(4 + 0.9 * len(runs), 3.6), sharey=True, layout="constrained")
    rows, seen = [], {}
    for axis, (kind, title) in zip(axes, KINDS.items(), strict=True):
        last = [whole_maps(run, kind)[-1] for run in runs]
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


def heads(target: "Target", runs: list["Run"]) -> tuple[Any, list[dict[str, Any]]]:
    """Points: each head of the last two blocks, a panel for each model; a dash is the mean over heads."""
    most = max(row["index"] or 0 for run in runs for row in map_rows(run)) + 1
    width = max(3.6, 1 + 0.5 * most)
    fig, axes = plt.subplots(
        1, len(runs), figsize=(width * len(runs), 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    rows = []
    for axis, run in zip(axes[0], runs, strict=True):
        parts = [row for row in map_rows(run) if row["part"] == "head"]
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


def registers(target: "Target", runs: list["Run"], folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Each register of the last block: mean AUC before normalisation, and top-1 of a probe on it alone."""
    from analysis.paper import read_run

    fig, axes = plt.subplots(2, len(runs), figsize=(4.4 * len(runs), 5), squeeze=False, layout="constrained")
    rows = []
    for column, run in enumerate(runs):
        parts = [row for row in map_rows(run) if row["part"] == "register" and row["kind"] == "similarity"]
        last = max((row["block"] for row in parts), default=0)
        mine = [row for row in parts if row["block"] == last]
        if not mine:
            raise ValueError(f"{run.folder} has no maps of registers: {run.model} has none, or maps leave them out")
        probe = read_run(folder, run.model, target.spec["probe"])
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


def layers(target: "Target", runs: list["Run"]) -> tuple[Any, list[dict[str, Any]]]:
    """A line for each model over its blocks, a panel for each kind of map."""
    fig, axes = plt.subplots(1, len(KINDS), figsize=(9, 3.6), sharey=True, layout="constrained")
    rows = []
    for axis, (kind, title) in zip(axes, KINDS.items(), strict=True):
        for run, colour, marker in zip(runs, COLOURS, "osD^vPX", strict=False):
            mine = whole_maps(run, kind)
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


def describe_map(name: str) -> str:
    """A map's name in words."""
    match = NAME.fullmatch(name)
    if match is None:
        return name
    kind = KINDS.get(match[4], match[4])
    if match[2] == "register":
        kind = kind.replace("CLS", "register")
    part = "" if match[2] is None else f", {match[2]} {match[3]}"
    return f"{kind}, block {match[1]}{part}"


def cell(row: dict[str, Any], column: str) -> str:
    """A number or text as people read it."""
    value = row.get(column)
    if column == "map":
        return describe_map(row["map"])
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.1f}" if column == "probe" else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write_page(target: "Target", runs: Path, rows: list[dict[str, Any]], text: str) -> list[Path]:
    """RUNS/TARGET.csv, and RUNS/TARGET.html with the picture RUNS/TARGET.png and a line for each number."""
    base = runs / target.name
    columns = [c for c in COLUMNS if any(row.get(c) is not None for row in rows)]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    table = html_table((COLUMNS[c] for c in columns), ([cell(row, c) for c in columns] for row in rows))
    missing = [m for m in target.models if m not in {run.model for run in target.found(runs)}]
    if missing:
        text += f" Not run: {', '.join(missing)}."
    if "probe" in target.spec and any(row.get("probe") is None for row in rows):
        text += f" Not run: MODEL-{target.spec['probe']}, the linear probes."
    if partial := [run.model for run in target.found(runs) if not run.complete]:
        text += f" From a run that is not complete: {', '.join(partial)}."
    where = {"imagenet": "ImageNet-S validation images", "demo": "the embedded scenes"}[target.data]
    shown = picture(base.with_suffix(".png"), target.spec["title"])
    content = f"{shown}<p>{html.escape(text)} Data: {where}.</p>{table}"
    write_text(base.with_suffix(".csv"), buffer.getvalue())
    write_text(base.with_suffix(".html"), page(target.spec["title"], content))
    return [base.with_suffix(".csv"), base.with_suffix(".html")]


def draw(target: "Target", runs: Path) -> list[Path]:
    """RUNS/TARGET.png, .pdf, .csv and .html."""
    found, kind = target.found(runs), target.spec["kind"]
    if kind == "registers":
        fig, rows = registers(target, found, runs)
    else:
        fig, rows = {"bars": bars, "heads": heads, "layers": layers}[kind](target, found)
    return [*save_figure(fig, runs / target.name), *write_page(target, runs, rows, NOTE)]
