"""Tables: the paper's number, ours, the difference, and where ours comes from, as Markdown, CSV, HTML and JSON."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from analysis.renderers import renderer
from analysis.runs import Run, read_json
from analysis.tables import Table, write_page
from analysis.targets import Target
from common.files import write_json

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


def _origin(run: Run) -> dict[str, Any]:
    """The columns that say where a number comes from."""
    results, record = run.results, run.record
    config = run.folder / record.get("config", "config.yaml")
    return {
        "weights": results["weights"],
        "date": record.get("started", "")[:10],
        "config": f"{config.parent.name}/{config.name}",
        "revision": record.get("revision", ""),
        "state": "complete" if run.complete else f"partial, epoch {results['epoch'] + 1}",
    }


def _probe_rows(run: Run) -> list[dict[str, Any]]:
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


def _robustness_rows(run: Run) -> list[dict[str, Any]]:
    """The probe's top-1 on each set."""
    return [
        {
            "what": f"{row['set'].replace('_', ' ')}, among {row['classes']} classes, probe {row['head']}",
            "ours": 100 * row["top1"],
            "images": row["images"],
            **_origin(run),
        }
        for row in run.rows
    ]


def _test_rows(run: Run) -> list[dict[str, Any]]:
    """Top-1 of each head of a probe that was trained before, and which checkpoint and shards these were."""
    shards = run.config.get("data", {}).get("init_args", {}).get("val_shards", "the validation shards")
    origin = _origin(run)
    origin["weights"] = run.config.get("ckpt_path") or origin["weights"]
    return [
        {
            "what": f"{describe_head(row)}, on {shards}",
            "ours": 100 * row["top1_last"],
            "parameters": row["parameters"],
            "images": row["images"],
            **origin,
        }
        for row in run.rows
    ]


ROWS: dict[str, Callable[[Run], list[dict[str, Any]]]] = {
    "probe": _probe_rows,
    "robustness": _robustness_rows,
    "test": _test_rows,
}


def collect(target: Target, runs: Path) -> list[dict[str, Any]]:
    """Rows of COLUMNS. A published number without a run, and a model without one, are rows that say so."""
    compared = target.data == "imagenet" and target.kind != "test"
    published = [p for p in target.options.get("published", []) if p["model"] in target.models and compared]
    found = {run.model: run for run in target.found(runs)}
    rows: list[dict[str, Any]] = []
    for model in target.models:
        who = {"model": target.label(model)["label"], "name": model, "training": target.label(model)["training"]}
        ours = ROWS[target.kind](found[model]) if model in found else []
        theirs = [p for p in published if p["model"] == model]
        if not ours and not theirs:
            rows.append(who | {"what": "", "state": NOT_RUN})
        for row in ours:
            match = next((p for p in theirs if p["n_last_blocks"] == row.get("n_last_blocks")), None)
            if match is not None:
                theirs.remove(match)
            rows.append(who | row | ({"published": (match or {}).get("top1")} if compared else {}))
        for missing in theirs:
            what = f"last {missing['n_last_blocks']} blocks"
            rows.append(who | {"what": what, "published": missing.get("top1"), "state": NOT_RUN})
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


def show(row: Mapping[str, Any], column: str) -> str:
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
    "test": """Top-1 of a probe that was trained before, over the split said (data.init_args.val_shards), once for
each of its heads.""",
}


def note(target: Target, runs: Path) -> str:
    """What the reader must know of the numbers."""
    passes = {run.results["counts"].get("backbone_passes_per_training_image") for run in target.found(runs)} - {None}
    often = ", ".join("once" if p == 1 else f"{p:g} times" for p in sorted(passes)) or "once"
    where = {"imagenet": "ImageNet-1k", "demo": "the embedded scenes: nothing here compares with the paper"}
    return NOTE[target.kind].format(passes=often) + f" Data: {where[target.data]}."


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
    table = Table(COLUMNS, rows, show)
    return [
        path,
        *write_page(base, target.title, note(target, runs), table.filled() if target.kind == "test" else table),
    ]
