"""Charts of Binary-AUC by model: bars, and lines over sizes."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.figure_pages import KINDS, SCORE_NAME, figure, table_row
from analysis.pages import COLOURS
from analysis.readings import SCORE, bars, named, readings
from analysis.runs import Run
from analysis.targets import Target

NOTE = """Binary-AUC is the area under the ROC curve of a map's values as scores for foreground against background, per
image, on the map's grid. m is its mean over images; max(m, 1−m) leaves the sign of a map free. The mean of
max(AUC, 1−AUC) exceeds 0.5 for maps of no meaning too: read it beside that of shuffled maps. The distance to the centre
is a map that knows nothing of the image. Intervals are 95 % over images. Similarities are read from two streams: what
the token mixer adds (branch), and the stream after the block (residual); published is the one that the family's
published results read. The CLS row of M reads neither. Images without both classes are skipped."""
HATCH = {"published": None, "other": "////"}
TITLES = {"published": "published reading", "other": "other reading"}


def colour(training: str) -> str:
    """Of a way of training."""
    return {"DINO": COLOURS[0], "supervised": COLOURS[1], "DINOv2": COLOURS[2]}.get(training, COLOURS[3])


def frame(axis: Any, values: list[float], room: float = 0.06) -> None:
    """From a little under the lowest value, or chance, to a little above the highest."""
    axis.axhline(0.5, color="#888", linewidth=0.8, linestyle=":")
    axis.set_ylim(min(0.48, min(values) - 0.03), max(values) + room)
    axis.spines[["top", "right"]].set_visible(False)


@figure("bars", NOTE)
def draw_bars(target: Target, runs: list[Run]) -> tuple[Any, list[dict[str, Any]]]:
    """A bar for each model and reading, the other one hatched; a panel for each kind of map; of the last block."""
    fig, axes = plt.subplots(1, len(KINDS), figsize=(4 + 1.5 * len(runs), 3.8), sharey=True, layout="constrained")
    rows: list[dict[str, Any]] = []
    seen: dict[str, Any] = {}
    for axis, (kind, title) in zip(axes, KINDS.items(), strict=True):
        for at, run in enumerate(runs):
            who, found = target.label(run.model), readings(run, kind)
            width = 0.8 / max(1, len(found))
            for number, (reading, blocks) in enumerate(found.items()):
                row = table_row(target, run, blocks[-1])
                place = at + width * (number - (len(found) - 1) / 2)
                axis.bar(
                    place, row[SCORE] - 0.5, bottom=0.5, width=0.92 * width, hatch=HATCH[reading], yerr=bars(row),
                    color=colour(who["training"]) if reading == "published" else "white", ecolor="#222", capsize=3,
                    edgecolor=colour(who["training"]), error_kw={"linewidth": 1},
                )  # fmt: skip
                top = row[SCORE] + (bars(row) or [[0], [0]])[1][0]
                axis.text(
                    place, top + 0.008, f"{row[SCORE]:.3f}", ha="center", fontsize=8, zorder=5,
                    bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6},
                )  # fmt: skip
                if row["position_score"] is not None:
                    axis.hlines(row["position_score"], at - 0.45, at + 0.45, color="#666", linewidth=1, linestyle="--")
                seen[who["training"]] = Patch(color=colour(who["training"]))
                if kind == "similarity":
                    seen[f"{TITLES[reading]}"] = Patch(facecolor="#999" if reading == "published" else "white",
                                                       edgecolor="#999", hatch=HATCH[reading])  # fmt: skip
                rows.append(row)
        axis.set_xticks(range(len(runs)), [target.label(run.model)["label"] for run in runs], rotation=20, ha="right")
        axis.set_title(f"{title}, last block", fontsize=10)
    if any(row["position_score"] is not None for row in rows):
        seen["distance to the centre"] = Line2D([], [], color="#666", linewidth=1, linestyle="--")
    for axis in axes:
        frame(axis, [row[SCORE] for row in rows], 0.08)
    axes[0].set_ylabel(SCORE_NAME)
    fig.legend(seen.values(), seen.keys(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return fig, rows


@figure("sizes", f"{NOTE} Models of one size are drawn side by side.")
def draw_sizes(target: Target, runs: list[Run]) -> tuple[Any, list[dict[str, Any]]]:
    """A line for each family and way of training over the parameters, supervised ones dashed; of the last block.

    Panels: the similarity in the published reading and in the other, the CLS row of M.
    """
    panels = [("similarity", "published"), ("similarity", "other"), ("mixing", "published")]
    panels = [(kind, reading) for kind, reading in panels if any(reading in readings(run, kind) for run in runs)]
    fig, axes = plt.subplots(1, len(panels), figsize=(1 + 3.9 * len(panels), 4.2), sharey=True, squeeze=False,
                             layout="constrained")  # fmt: skip
    families = list(dict.fromkeys(target.label(run.model).get("family", run.model) for run in runs))
    rows, seen = [], {}
    for axis, (kind, reading) in zip(axes[0], panels, strict=True):
        lines: dict[tuple[str, str], list[tuple[float, dict[str, Any], str]]] = {}
        for run in runs:
            if (found := readings(run, kind).get(reading)) is None:
                continue
            who, row = target.label(run.model), table_row(target, run, found[-1])
            size = run.results.get("backbone_parameters", 0) / 1e6
            lines.setdefault((who.get("family", run.model), who["training"]), []).append((size, row, who["label"]))
            rows.append(row)
        for (family, training), points in lines.items():
            points.sort(key=lambda point: point[0])
            style = "--" if training == "supervised" else "-"
            own = COLOURS[families.index(family) % len(COLOURS)]
            filled = "white" if training == "supervised" else own
            beside = 1.025 ** (
                list(lines).index((family, training)) - (len(lines) - 1) / 2
            )  # of one size, side by side
            sizes, scores = [p[0] * beside for p in points], [p[1][SCORE] for p in points]
            errors = [bars(p[1]) or [[0.0], [0.0]] for p in points]
            both = [[error[side][0] for error in errors] for side in (0, 1)]
            seen[f"{family}, {training}"] = axis.errorbar(
                sizes, scores, yerr=both, linestyle=style, color=own, marker="o", markersize=6, capsize=3,
                markerfacecolor=filled, linewidth=1.3,
            )  # fmt: skip
        axis.set_xscale("log")
        ticks = sorted({size for points in lines.values() for size, *_ in points})
        apart = [tick for i, tick in enumerate(ticks) if i == 0 or tick > 1.12 * ticks[i - 1]]
        axis.set_xticks(apart, [f"{tick:.2g}" if tick < 1 else f"{tick:.0f}" for tick in apart], fontsize=8)
        axis.minorticks_off()
        low, high = min(ticks), max(ticks)
        axis.set_xlim(low / 1.25, high * 1.25)
        what = KINDS[kind] if kind == "mixing" else f"{KINDS[kind]}\n{TITLES[reading]}"
        axis.set_title(f"{what}, last block", fontsize=9)
        axis.set_xlabel("parameters, M")
    for axis in axes[0]:
        frame(axis, [row[SCORE] for row in rows])
    axes[0, 0].set_ylabel(SCORE_NAME)
    fig.legend(seen.values(), seen.keys(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return fig, rows


def legend_of(run: Run, target: Target, row: dict[str, Any]) -> str:
    """A model and which of its streams is read."""
    return f"{target.label(run.model)['label']}, {named(row)}"
