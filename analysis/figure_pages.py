"""What every figure of Binary-AUC shares: its score, the numbers under it, its page, and how a kind is registered."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from analysis.pages import picture, save_figure
from analysis.renderers import renderer
from analysis.runs import Run
from analysis.tables import Table, show_value, write_page
from analysis.targets import Target

SCORE = "auc_of_mean_normalized"
SCORE_NAME = "Binary-AUC, max(m, 1−m)"
KINDS = {"similarity": "CLS–patch similarity", "mixing": "CLS row of M"}
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

Drawing = Callable[[Target, list[Run]], tuple[Any, list[dict[str, Any]]]]
"""Draws runs; returns the matplotlib figure and the numbers in it as rows of COLUMNS."""


def table_row(target: Target, run: Run, row: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """One line of COLUMNS from a row of a run."""
    shuffled = next((other["auc_normalized"] for other in run.maps("shuffled")), None)
    who = target.label(run.model)
    return {
        "model": who["label"], "training": who["training"], "weights": run.results["weights"],
        "date": run.record.get("started", "")[:10], "revision": run.record.get("revision", "")[:8],
        "shuffled": shuffled, **row, **more,
    }  # fmt: skip


def describe_map(row: Mapping[str, Any]) -> str:
    """A map in words."""
    if row["kind"] not in KINDS:
        return str(row["map"])
    kind = KINDS[row["kind"]]
    if row["part"] == "register":
        kind = kind.replace("CLS", "register")
    part = "" if row["part"] is None else f", {row['part']} {row['index']}"
    return f"{kind}, block {row['block']}{part}"


def show(row: Mapping[str, Any], column: str) -> str:
    """A number or text as people read it."""
    if column == "map":
        return describe_map(row)
    if column == "probe" and row.get("probe") is not None:
        return f"{row['probe']:.1f}"
    return show_value(row, column)


def _missing(target: Target, runs: Path, rows: list[dict[str, Any]]) -> str:
    """Sentences on what did not run, or not to its end."""
    text, found = "", target.found(runs)
    if missing := [model for model in target.models if model not in {run.model for run in found}]:
        text += f" Not run: {', '.join(missing)}."
    if len(target.tasks) > 1 and any(row.get("probe") is None for row in rows):
        text += f" Not run: MODEL-{target.tasks[1]}, the linear probes."
    if partial := [run.model for run in found if not run.complete]:
        text += f" From a run that is not complete: {', '.join(partial)}."
    return text


def figure(kind: str, note: str, dpi: int = 110) -> Callable[[Drawing], Drawing]:
    """Registers the function below it for figures of that kind: RUNS/TARGET.png, .pdf, .md, .csv and .html.

    Args:
        kind: see :mod:`analysis.renderers`.
        note: what the reader must know of the picture.
        dpi: of the PNG.
    """

    def register(drawing: Drawing) -> Drawing:
        @renderer(kind)
        def draw(target: Target, runs: Path) -> list[Path]:
            fig, rows = drawing(target, target.some(runs))
            base = runs / target.name
            paths = save_figure(fig, base, dpi)
            where = {"imagenet": "ImageNet-S validation images", "demo": "the embedded scenes"}[target.data]
            text = f"{note}{_missing(target, runs, rows)} Data: {where}."
            table = Table(COLUMNS, rows, show).filled()
            return [*paths, *write_page(base, target.title, text, table, above=picture(paths[0], target.title))]

        return drawing

    return register
