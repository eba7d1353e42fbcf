"""Tables: the paper's number, ours, the difference, and where ours comes from, as Markdown, CSV, HTML and JSON."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.published import Cell, cells, read
from analysis.renderers import renderer
from analysis.result_rows import DESCRIPTIONS, ROWS
from analysis.runs import read_json
from analysis.statements import INFERRED, remarks
from analysis.tables import Table, write_page
from analysis.targets import Target
from common.files import write_json

COLUMNS = {
    "part": "part",
    "model": "model",
    "training": "training",
    "what": "what is measured",
    "published": "paper, %",
    "ours": "ours, %",
    "difference": "difference",
    "remark": "remark",
    "last": "ours, last epoch, %",
    "parameters": "head's parameters",
    "paper_head": "paper's, M",
    "backbone_parameters": "backbone's parameters",
    "paper_backbone": "paper's, M",
    "paper_width": "width, paper",
    "images": "images",
    "state": "state",
    "weights": "weights",
    "date": "date",
    "config": "configuration",
    "revision": "revision",
}
OPTIONAL = (
    "part",
    "remark",
    "last",
    "parameters",
    "paper_head",
    "backbone_parameters",
    "paper_backbone",
    "paper_width",
)
"""Left out where no row fills them."""
NOT_RUN = "not run"


def compares(target: Target) -> bool:
    """Whether its numbers stand beside the paper's."""
    return target.data == "imagenet" and target.kind != "test"


def collect(target: Target, runs: Path) -> list[dict[str, Any]]:
    """Rows of COLUMNS. A published number without a run, and a model without one, are rows that say so."""
    published = cells(read(target.options.get("published", []))) if compares(target) else []
    found = {run.model: run for run in target.found(runs)}
    rows: list[dict[str, Any]] = []
    parts = target.options.get("parts", {}).get(target.data, {None: [{}]})
    for part, wanted in parts.items():
        for model in target.models:
            label = target.label(model)
            who = {"model": label["label"], "name": model, "training": label["training"]}
            who |= {} if part is None else {"part": part}
            ours = [row for row in (ROWS[target.kind](found[model]) if model in found else [])
                    if any(fields.items() <= row.items() for fields in wanted)]  # fmt: skip
            theirs = [cell for cell in published if cell.first.model == model and cell.first.part == part]
            if not ours and not theirs:
                rows.append(who | {"what": "", "state": NOT_RUN})
            rows += [who | row for row in _beside(target, ours, theirs)]
    for row in rows:
        if row.get("ours") is not None and row.get("published") is not None:
            row["difference"] = row["ours"] - row["published"]
    return rows


def _beside(target: Target, ours: list[dict[str, Any]], theirs: list[Cell]) -> list[dict[str, Any]]:
    """The paper's rows in its order, each beside ours; then ours that it has no number for."""
    rows, told = [], []
    for cell in theirs:
        fitting = [row for row in ours if cell.first.fits(row) and row not in told]
        missing = dict(cell.first.fields) | {"what": DESCRIPTIONS[target.kind](cell.first.fields), "state": NOT_RUN}
        rows += [row | cell.columns() for row in fitting or [missing]]
        told += fitting
    nothing = {"published": None} if compares(target) else {}
    return rows + [row | nothing for row in ours if row not in told]


def merge(new: list[dict[str, Any]], old: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New rows, model by model; a model that is complete in the old ones and not in the new ones stays as it was."""
    merged: list[dict[str, Any]] = []
    for where in dict.fromkeys((row.get("part"), row["name"]) for row in (*new, *old)):
        now, before = ([row for row in rows if (row.get("part"), row["name"]) == where] for rows in (new, old))
        before = [row for row in before if row["state"] == "complete"]
        merged += now if not before or any(row["state"] == "complete" for row in now) else before
    return merged


def show(row: Mapping[str, Any], column: str) -> str:
    """A cell as people read it."""
    value = row.get(column)
    if column == "published":
        mark = f" {INFERRED}" if row.get("inferred") else ""
        return f"{value:.1f}{mark}" if value is not None else "none" if column in row else "–"
    if value is None:
        return "–"
    if column == "difference":
        return f"{value:+.1f}"
    if column in ("images", "parameters", "backbone_parameters"):
        return f"{value:,}"
    if column == "paper_width":
        return f"{value:g}"
    if column == "revision":
        return str(value)[:8] + ("-dirty" if str(value).endswith("-dirty") else "")
    return f"{value:.1f}" if isinstance(value, float) else str(value)


NOTE = {
    "probe": """Top-1 on the validation images, of the best epoch as the authors' release reports it, and of the last.
All heads of a model were trained in one run, each training image passing through the backbone {passes} per epoch.""",
    "robustness": """Top-1 of the probe's head with the best last top-1 on validation images. The answer is sought among
the classes said; images without a right answer (ReaL) are not counted.""",
    "test": """Top-1 of a probe that was trained before, over the split said (data.init_args.val_shards), once for
each of its heads.""",
    "dense": "Scores of a dense head on the backbone.",
}


def note(target: Target, runs: Path, rows: list[dict[str, Any]]) -> str:
    """What the reader must know of the numbers."""
    passes = {run.results["counts"].get("backbone_passes_per_training_image") for run in target.found(runs)} - {None}
    often = ", ".join("once" if p == 1 else f"{p:g} times" for p in sorted(passes)) or "once"
    where = {"imagenet": "ImageNet-1k", "demo": "the embedded scenes: nothing here compares with the paper"}
    text = NOTE[target.kind].format(passes=often)
    if target.kind == "dense":
        where["imagenet"] = "as the title says"
    if any(row.get("inferred") for row in rows):
        text += f" {INFERRED}: that the paper's number belongs to this row is our inference; the paper does not say."
    return f"{text} Data: {where[target.data]}."


@renderer("probe")
@renderer("robustness")
@renderer("test")
def draw(target: Target, runs: Path) -> list[Path]:
    """RUNS/TARGET.json, .md, .csv and .html; complete rows that are there are not replaced by less."""
    base = runs / target.name
    path = base.with_suffix(".json")
    old = read_json(path, "")["rows"] if path.is_file() else []
    rows = merge(collect(target, runs), old)
    write_json(path, {"target": target.name, "data": target.data, "rows": rows})
    shown = {k: v for k, v in COLUMNS.items() if k not in OPTIONAL or any(row.get(k) is not None for row in rows)}
    table = Table(shown, rows, show)
    table = table.filled() if target.kind == "test" else table
    return [path, *write_page(base, target.title, note(target, runs, rows), table, sections=remarks(target))]
