"""Tables: the paper's number, ours, the difference, and where ours comes from, as Markdown, CSV, HTML and JSON."""

import csv
import html
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.pages import html_table, markdown_table, page
from common.files import write_text

if TYPE_CHECKING:
    from analysis.paper import Run, Target

COLUMNS = {
    "model": "model",
    "training": "training",
    "what": "what is measured",
    "ours": "ours, %",
    "published": "paper, %",
    "difference": "difference",
    "last": "ours, last epoch, %",
    "parameters": "head's parameters",
    "images": "images",
    "state": "state",
    "weights": "weights",
    "date": "date",
    "config": "configuration",
    "revision": "revision",
}
NOT_RUN = "not run"


def _origin(run: "Run") -> dict[str, Any]:
    """The columns that say where a number comes from."""
    table, record = run.table, run.record
    config = run.folder / record.get("config", "config.yaml")
    return {
        "weights": table["weights"],
        "date": record.get("started", "")[:10],
        "config": f"{config.parent.name}/{config.name}",
        "revision": record.get("revision", ""),
        "state": "complete" if run.complete else f"partial, epoch {table['epoch'] + 1}",
    }


def _probe_rows(run: "Run") -> list[dict[str, Any]]:
    """Best epoch's top-1 (what the paper reports) and the last one's, of each head."""
    return [
        {
            "what": describe_head(row),
            "ours": 100 * row["top1_best"],
            "last": 100 * row["top1_last"],
            "parameters": row["parameters"],
            "images": row["images"],
            "n_last_blocks": row["n_last_blocks"],
            **_origin(run),
        }
        for row in run.rows
    ]


def describe_head(row: dict[str, Any]) -> str:
    """A head of a linear probe in words."""
    blocks = "last block" if row["n_last_blocks"] == 1 else f"last {row['n_last_blocks']} blocks"
    norm = ", standardised" if row.get("batch_norm") else ""
    return f"{row['pooling'].replace('+', ' + ')} of the {blocks}{norm}, lr {row['lr']:g}, wd {row['weight_decay']:g}"


def _robustness_rows(run: "Run") -> list[dict[str, Any]]:
    return [
        {
            "what": f"{row['set'].replace('_', ' ')}, among {row['classes']} classes, probe {row['head']}",
            "ours": 100 * row["top1"],
            "images": row["images"],
            **_origin(run),
        }
        for row in run.rows
    ]


def collect(target: "Target", runs: Path) -> list[dict[str, Any]]:
    """Rows of COLUMNS. A published number without a run, and a model without one, are rows that say so."""
    rows: list[dict[str, Any]] = []
    published = [
        p for p in target.spec.get("published", []) if p["model"] in target.models and target.data == "imagenet"
    ]
    found = {run.model: run for run in target.found(runs)}
    make = _probe_rows if target.spec["kind"] == "probe" else _robustness_rows
    for model in target.models:
        who = {"model": target.label(model)["label"], "name": model, "training": target.label(model)["training"]}
        ours = make(found[model]) if model in found else []
        theirs = [p for p in published if p["model"] == model]
        for row in ours:
            match = next((p for p in theirs if p["n_last_blocks"] == row.get("n_last_blocks")), None)
            if match is not None:
                theirs.remove(match)
            rows.append(who | row | ({"published": (match or {}).get("top1")} if target.data == "imagenet" else {}))
        for missing in theirs:
            what = f"last {missing['n_last_blocks']} blocks"
            rows.append(who | {"what": what, "published": missing.get("top1"), "state": NOT_RUN})
        if not ours and not any(p["model"] == model for p in published):
            rows.append(who | {"what": "", "state": NOT_RUN})
    for row in rows:
        if row.get("ours") is not None and row.get("published") is not None:
            row["difference"] = row["ours"] - row["published"]
    return rows


def merge(new: list[dict[str, Any]], old: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New rows, model by model; a model that is complete in the old ones and not in the new ones stays as it was."""
    merged: list[dict[str, Any]] = []
    for name in dict.fromkeys(row["name"] for row in (*new, *old)):
        now = [row for row in new if row["name"] == name]
        before = [row for row in old if row["name"] == name and row["state"] == "complete"]
        merged += now if not before or any(row["state"] == "complete" for row in now) else before
    return merged


def show(row: dict[str, Any], column: str) -> str:
    """A cell as people read it."""
    value = row.get(column)
    if column == "published":
        return f"{value:.1f}" if value is not None else "not known here" if column in row else "–"
    if value is None:
        return "–"
    if column == "difference":
        return f"{value:+.1f}"
    if column in ("images", "parameters"):
        return f"{value:,}"
    if column == "revision":
        return str(value)[:8] + ("-dirty" if str(value).endswith("-dirty") else "")
    return f"{value:.1f}" if isinstance(value, float) else str(value)


NOTE = {
    "probe": """Top-1 on the validation images, of the best epoch as the paper reports it, and of the last. All heads of
a model were trained in one run, each training image passing through the backbone {passes} per epoch.""",
    "robustness": """Top-1 of the probe's head with the best last top-1 on validation images. The answer is sought among
the classes said; images without a right answer (ReaL) are not counted.""",
}


def note(target: "Target", runs: Path) -> str:
    text = NOTE[target.spec["kind"]]
    passes = {run.table["counts"].get("backbone_passes_per_training_image") for run in target.found(runs)} - {None}
    often = ", ".join("once" if p == 1 else f"{p:g} times" for p in sorted(passes)) or "once"
    where = {"imagenet": "ImageNet-1k", "demo": "the embedded scenes: nothing here compares with the paper"}[
        target.data
    ]
    return text.format(passes=often) + f" Data: {where}."


def cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The rows as people read them."""
    return [[show(row, column) for column in COLUMNS] for row in rows]


def to_markdown(title: str, text: str, rows: list[dict[str, Any]]) -> str:
    return "\n".join([f"# {title}", "", text, "", markdown_table([*COLUMNS.values()], cells(rows)), ""])


def to_html(title: str, text: str, rows: list[dict[str, Any]]) -> str:
    """A page that needs no other file."""
    return page(title, f"<p>{html.escape(text)}</p>{html_table(COLUMNS.values(), cells(rows))}")


def to_csv(rows: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def draw(target: "Target", runs: Path) -> list[Path]:
    """RUNS/TARGET.json, .md, .csv and .html; complete rows that are there are not replaced by less."""
    base = runs / target.name
    path = base.with_suffix(".json")
    old = json.loads(path.read_text())["rows"] if path.is_file() else []
    rows = merge(collect(target, runs), old)
    title, text = target.spec["title"], note(target, runs)
    texts = {
        ".json": json.dumps({"target": target.name, "data": target.data, "rows": rows}, indent=1),
        ".md": to_markdown(title, text, rows),
        ".csv": to_csv(rows),
        ".html": to_html(title, text, rows),
    }
    runs.mkdir(parents=True, exist_ok=True)
    for suffix, content in texts.items():
        write_text(base.with_suffix(suffix), content)
    return [base.with_suffix(suffix) for suffix in texts]
