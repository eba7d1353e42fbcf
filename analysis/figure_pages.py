"""What every figure of Binary-AUC shares: its score, the numbers under it, its page, and how a kind is registered."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.pages import picture, save_figure
from analysis.readings import SCORE, ends, named
from analysis.renderers import renderer
from analysis.runs import Run
from analysis.statements import sections
from analysis.tables import Table, show_value, write_page
from analysis.targets import Target

SCORE_NAME = "Binary-AUC, max(m, 1−m)"
KINDS = {"similarity": "CLS–patch similarity", "mixing": "CLS row of M"}
TOKENS = {"first": "class token at index 0", "register": "register", "patch": "patch"}
COLUMNS = {
    "model": "model",
    "training": "training",
    "map": "map",
    "read": "stream that is read",
    "auc": "mean AUC m",
    "interval": "its 95 % interval",
    SCORE: "max(m, 1−m)",
    "position_score": "the same of the distance to the centre alone",
    "auc_normalized": "mean of max(AUC, 1−AUC)",
    "shuffled": "the same of shuffled maps",
    "position": "and of the distance to the centre alone",
    "shown_auc": "AUC of the first component, mean over the pictures shown",
    "probe": "linear probe, top-1 %",
    "images": "images",
    "skipped": "skipped",
    "weights": "weights",
    "date": "date",
    "revision": "revision",
}
DATA = {"imagenet": "ImageNet-S validation images", "demo": "the embedded scenes"}

Drawing = Callable[[Target, list[Run]], tuple[Any, list[dict[str, Any]]]]
"""Draws runs; returns the matplotlib figure and the numbers in it as rows of COLUMNS."""


def table_row(target: Target, run: Run, row: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """One line of COLUMNS from a row of a run, with the controls that stand beside it."""
    controls = {kind: next(iter(run.maps(kind)), {}) for kind in ("shuffled", "position")}
    who, interval = target.label(run.model), ends(row, "auc")
    return {
        "model": who["label"], "training": who["training"], "weights": run.results["weights"],
        "date": run.record.get("started", "")[:10], "revision": run.record.get("revision", "")[:8],
        "name": run.model, "run": run, "read": "none" if row["kind"] == "mixing" else named(row),
        "interval": None if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
        **{kind: control.get("auc_normalized") for kind, control in controls.items()},
        "position_score": controls["position"].get(SCORE), **row, **more,
    }  # fmt: skip


def describe_map(row: Mapping[str, Any]) -> str:
    """A map in words."""
    if row["kind"] not in KINDS:
        return str(row["map"])
    kind, part = KINDS[row["kind"]], row["part"]
    if part in TOKENS:
        kind = kind.replace("CLS", TOKENS[part])
    number = "" if part is None or row["index"] is None else f", {part} {row['index']}"
    return f"{kind}, block {row['block']}{number}"


def show(row: Mapping[str, Any], column: str) -> str:
    """A number or text as people read it."""
    if column == "map":
        return describe_map(row)
    if column == "probe" and row.get("probe") is not None:
        return f"{row['probe']:.1f}"
    return show_value(row, column)


def missing(target: Target, runs: Path, rows: list[dict[str, Any]]) -> str:
    """Sentences on what did not run, or not to its end."""
    text, found = "", target.found(runs)
    if missing := [model for model in target.models if model not in {run.model for run in found}]:
        text += f" Not run: {', '.join(missing)}."
    if len(target.tasks) > 1 and any(row.get("probe") is None for row in rows):
        text += f" Not run: MODEL-{target.tasks[1]}, the linear probes."
    if partial := [run.model for run in found if not run.complete]:
        text += f" From a run that is not complete: {', '.join(partial)}."
    if any(row.get("kind") == "similarity" for row in rows) and all(row.get("reading") != "other" for row in rows):
        text += " These runs read one stream alone: --model.stream both reads the other beside it."
    return text


def write_figure(target: Target, runs: Path, fig: Any, text: str, table: Table, dpi: int = 110) -> list[Path]:
    """RUNS/TARGET.png, .pdf, .md, .csv and .html: picture, text, numbers, what the paper states, remarks."""
    paths = save_figure(fig, runs / target.name, dpi)
    parts = sections(target, table.rows, target.options.get("compared", SCORE))
    above = picture(paths[0], target.title)
    return [*paths, *write_page(runs / target.name, target.title, text, table, above=above, sections=parts)]


def figure(kind: str, note: str, dpi: int = 110) -> Callable[[Drawing], Drawing]:
    """Registers the function below it for figures of that kind.

    Args:
        kind: see :mod:`analysis.renderers`.
        note: what the reader must know of the picture.
        dpi: of the PNG.
    """

    def register(drawing: Drawing) -> Drawing:
        @renderer(kind)
        def draw(target: Target, runs: Path) -> list[Path]:
            fig, rows = drawing(target, target.some(runs))
            text = f"{note}{missing(target, runs, rows)} Data: {DATA[target.data]}."
            return write_figure(target, runs, fig, text, Table(COLUMNS, rows, show).filled(), dpi)

        return drawing

    return register


def models_shown(target: Target, names: Sequence[str], runs: Sequence[Run]) -> list[Run]:
    """Runs of the models named, in that order; all of them where the user chose other models."""
    by_name = {run.model: run for run in runs}
    return [by_name[name] for name in names if name in by_name] or list(runs)
