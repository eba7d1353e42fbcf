"""Tables 2 and 3: scores of dense tasks beside the paper's, with pictures, classes, curves and intervals."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

from analysis.comparison import COLUMNS, OPTIONAL, collect, merge, note, show
from analysis.pages import COLOURS, picture, save_figure
from analysis.renderers import renderer
from analysis.runs import Run, read_json
from analysis.statements import remarks
from analysis.tables import Section, Table, write_page
from analysis.targets import Target
from common.files import write_json
from common.pictures import KEPT, coloured, kept_pictures
from metrics import bootstrap_counts, difference_of, interval, segmentation_scores

DRAWS = 500
NAMES_SHOWN = 30
"""Most classes whose names an axis has room for."""
INTERVALS = {"what": "mIoU, %", "value": "ours", "interval": "95 % interval", "holds": "the whole interval above 0"}
INTERVAL_NOTE = """By the bootstrap over images, paired where two models are compared: areas are summed over each draw
of images before they are divided. One training each: what another seed would change is not in them."""


def image_draws(run: Run) -> np.ndarray | None:
    """(S) mIoU of draws of the images; None where the run kept no areas."""
    areas = run.kept_arrays.get("areas")
    if areas is None:
        return None
    flat = areas.reshape(len(areas), -1).astype(np.float64)
    drawn = [counts @ flat for counts in bootstrap_counts(len(flat), DRAWS)]
    return segmentation_scores(torch.from_numpy(np.concatenate(drawn)).unflatten(1, areas.shape[1:]))["mIoU"].numpy()


def interval_rows(target: Target, found: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """A line for each model, and for each pair of neighbours."""
    draws = {run.model: (run, values) for run in found if (values := image_draws(run)) is not None}
    point = {model: _mean_iou(run) for model, (run, _) in draws.items()}
    label = {model: target.label(model)["label"] for model in draws}
    for model, (_, values) in draws.items():
        low, high = (100 * end[0] for end in interval(values[:, None]))
        yield {"what": label[model], "value": f"{100 * point[model]:.1f}", "interval": f"{low:.1f} to {high:.1f}"}
    for one, other in pairwise(draws):
        a, b = draws[one], draws[other]
        if not np.array_equal(a[0].kept_arrays["keys"], b[0].kept_arrays["keys"]):
            continue  # of other images
        difference = difference_of(100 * (point[other] - point[one]), 100 * (b[1] - a[1]))
        yield {
            "what": f"{label[other]} − {label[one]}", "value": f"{difference.mean:+.1f}",
            "interval": f"{difference.low:+.1f} to {difference.high:+.1f}", "holds": difference.low > 0,
        }  # fmt: skip


def _mean_iou(run: Run) -> float:
    return float(segmentation_scores(torch.from_numpy(run.kept_arrays["areas"]).sum(0))["mIoU"])


def pictures_of(target: Target, found: Sequence[Run], base: Path) -> list[Path]:
    """Of each model the images that it is worst and best at: image, truth, prediction."""
    every = [(run, [(k, p) for k in ("worst", "best") for p in kept_pictures(run.kept_arrays, k)[:2]]) for run in found]
    shown = [(run, rows) for run, rows in every if rows]
    if not shown:
        return []
    lines = max(len(rows) for _, rows in shown)
    fig, axes = plt.subplots(
        lines, len(KEPT) * len(shown), figsize=(1.7 * len(KEPT) * len(shown), 1.9 * lines), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis in axes.flat:
        axis.axis("off")
    for number, (run, rows) in enumerate(shown):
        classes = run.config.get("model", {}).get("init_args", {}).get("num_classes", 255)
        for line, (kind, row) in enumerate(rows):
            for column, name in enumerate(KEPT):
                axis = axes[line, len(KEPT) * number + column]
                axis.imshow(coloured(row[name], classes))
                if column == 0:
                    axis.set_title(f"{target.label(run.model)['label']}, {kind}\n{float(row['score']):.2f}", fontsize=8)
                elif line == 0:
                    axis.set_title("truth" if name == "target" else name, fontsize=8)
    return save_figure(fig, base)


def classes_of(target: Target, found: Sequence[Run], base: Path) -> list[Path]:
    """Each class's IoU, or AP of boxes and masks: by name, or where there are many, sorted."""
    metrics = [
        m
        for m in ("IoU", "APb", "APm")
        if any(r["metric"] == m and r["class"] is not None for run in found for r in run.rows)
    ]
    if not metrics:
        return []
    fig, axes = plt.subplots(len(metrics), 1, figsize=(9, 3.2 * len(metrics)), squeeze=False, layout="constrained")
    for axis, metric in zip(axes[:, 0], metrics, strict=True):
        for number, run in enumerate(found):
            rows = [row for row in run.rows if row["metric"] == metric and row["class"] is not None]
            values = [100 * row["value"] for row in rows]
            label, colour = target.label(run.model)["label"], COLOURS[number % len(COLOURS)]
            if len(rows) > NAMES_SHOWN:
                axis.plot(sorted(values, reverse=True), color=colour, label=label)
                axis.set_xlabel("classes, the best first")
            else:
                width = 0.8 / len(found)
                places = [row["class"] + width * (number - (len(found) - 1) / 2) for row in rows]
                axis.bar(places, values, width=0.9 * width, color=colour, label=label)
                axis.set_xticks(
                    [r["class"] for r in rows], [r["name"] or r["class"] for r in rows], rotation=30, ha="right"
                )
        axis.set_ylabel(f"{metric}, %")
        axis.legend(fontsize=8, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    return save_figure(fig, base)


def curves_of(target: Target, found: Sequence[Run], base: Path) -> list[Path]:
    """Precision by recall, the mean over classes, at IoU 0.5, 0.75 and over 0.5 to 0.95."""
    kinds = {"bbox": "boxes", "segm": "masks"}
    there = [run for run in found if "precision_bbox" in run.kept_arrays]
    if not there:
        return []
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, (kind, name) in zip(axes, kinds.items(), strict=True):
        for number, run in enumerate(there):
            for values, style, iou in zip(
                run.kept_arrays[f"precision_{kind}"], ("-", "--", ":"), ("0.5", "0.75", "0.5 to 0.95"), strict=True
            ):
                label = f"{target.label(run.model)['label']}, IoU {iou}"
                axis.plot(
                    np.linspace(0, 1, len(values)), values, style, color=COLOURS[number % len(COLOURS)], label=label
                )
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("recall")
        axis.set_ylim(0, 1.02)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("precision, mean over classes")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    return save_figure(fig, base)


@renderer("dense")
def draw(target: Target, runs: Path) -> list[Path]:
    """RUNS/TARGET.json, .md, .csv and .html, and pictures; complete rows that are there are not replaced by less."""
    base = runs / target.name
    path = base.with_suffix(".json")
    rows = merge(collect(target, runs), read_json(path, "")["rows"] if path.is_file() else [])
    write_json(path, {"target": target.name, "data": target.data, "rows": rows})
    shown = {k: v for k, v in COLUMNS.items() if k not in OPTIONAL or any(row.get(k) is not None for row in rows)}
    found = [run for run in target.found(runs) if run.complete]
    parts = (
        ("pictures", pictures_of, "images that each model is worst and best at, with its score"),
        ("classes", classes_of, "scores by class"),
        ("curves", curves_of, "precision by recall"),
    )
    drawn = {text: of(target, found, base.with_name(f"{target.name}-{name}")) for name, of, text in parts}
    below = "".join(picture(paths[0], text) for text, paths in drawn.items() if paths)
    told = list(interval_rows(target, found))
    sections = [Section("How sure", [" ".join(INTERVAL_NOTE.split())], Table(INTERVALS, told).filled())] if told else []
    pages = write_page(
        base, target.title, note(target, runs, rows), Table(shown, rows, show), below=below,
        sections=[*sections, *remarks(target)],
    )  # fmt: skip
    return [path, *pages, *(p for paths in drawn.values() for p in paths)]
