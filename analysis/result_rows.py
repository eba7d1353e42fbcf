"""Rows of tables from the runs of each kind: a probe's heads, a probe on other images, scores of dense tasks.

A row has ``what`` (in words) and ``ours`` (in percent), where it comes from, and the fields by which published numbers
find it (:mod:`analysis.published`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from analysis.runs import Run

Row = dict[str, Any]
HEAD_FIELDS = ("n_last_blocks", "pooling", "lr", "weight_decay", "batch_norm", "block", "stream")


def _origin(run: Run) -> Row:
    """The columns that say where a number comes from."""
    results, record = run.results, run.record
    config = run.folder / record.get("config", "config.yaml")
    return {
        "weights": results["weights"],
        "date": record.get("started", "")[:10],
        "config": f"{config.parent.name}/{config.name}",
        "revision": record.get("revision", ""),
        "state": "complete" if run.complete else f"partial, epoch {results['epoch'] + 1}",
        "backbone_parameters": results.get("backbone_parameters"),
    }


def describe_head(row: Mapping[str, Any]) -> str:
    """A head of a linear probe in words, as far as a row says what it is."""
    count = row.get("n_last_blocks")
    blocks = None if count is None else "last block" if count == 1 else f"last {count} blocks"
    blocks, the = (blocks, "the ") if row.get("block") is None else (f"block {row['block']}", "")
    read = row["pooling"].replace("+", " + ") if "pooling" in row else None
    parts = [f"{read} of {the}{blocks}" if read and blocks else read or blocks or "head"]
    parts += [f"{row['stream']} stream"] if row.get("reading") == "other" else []
    parts += ["standardised"] if row.get("batch_norm") else []
    parts += [f"{name} {row[key]:g}" for key, name in (("lr", "lr"), ("weight_decay", "wd")) if key in row]
    return ", ".join(parts)


def describe_set(row: Mapping[str, Any]) -> str:
    """A robustness set in words."""
    among = f", among {row['classes']} classes, probe {row['head']}" if "classes" in row else ""
    return f"{str(row['set']).replace('_', ' ')}{among}"


def describe_metric(row: Mapping[str, Any]) -> str:
    """A score of a dense task in words."""
    return str(row["metric"]).replace("_", ", ")


def _probe_rows(run: Run) -> list[Row]:
    """Best epoch's top-1 (what the paper reports) and the last one's, of each head."""
    return [
        {
            "what": describe_head(row),
            "ours": 100 * row["top1_best"],
            "last": 100 * row["top1_last"],
            "parameters": row["parameters"],
            "images": row["images"],
            **{key: row.get(key) for key in HEAD_FIELDS},
            **_origin(run),
        }
        for row in run.rows
    ]


def _score_rows(run: Run, what: Callable[[Row], str], value: str, key: str) -> list[Row]:
    """Scores ``value`` in [0, 1], each matched with the published ones by its ``key``."""
    return [
        {"what": what(row), "ours": 100 * row[value], "images": row.get("images"), key: row[key], **_origin(run)}
        for row in run.rows
    ]


def _robustness_rows(run: Run) -> list[Row]:
    """The probe's top-1 on each set."""
    return _score_rows(run, describe_set, "top1", "set")


def _test_rows(run: Run) -> list[Row]:
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


def _dense_rows(run: Run) -> list[Row]:
    """Scores of segmentation or detection over all classes: rows with ``metric`` and ``value`` in [0, 1]."""
    return [
        row
        for row, of in zip(_score_rows(run, describe_metric, "value", "metric"), run.rows, strict=True)
        if of.get("class") is None
    ]


ROWS: dict[str, Callable[[Run], list[Row]]] = {
    "probe": _probe_rows,
    "robustness": _robustness_rows,
    "test": _test_rows,
    "dense": _dense_rows,
}
DESCRIPTIONS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "probe": describe_head,
    "robustness": describe_set,
    "test": describe_head,
    "dense": describe_metric,
}
"""Of a row that is not there, from the fields of the number that stands in its place."""
