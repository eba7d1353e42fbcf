"""What the paper states of a table or figure, how ours compares, and where it disagrees with itself."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from analysis.readings import SCORE
from analysis.runs import Run
from analysis.tables import Section, Table, show_value
from analysis.targets import Target
from metrics import Difference, paired_difference

DEMO = "These are small models on embedded scenes: nothing here compares with the paper."
COLUMNS = {
    "paper": "paper",
    "map": "map",
    "read": "stream that is read",
    "first": "ours, the first",
    "second": "ours, the second",
    "difference": "difference",
    "interval": "95 % interval",
    "holds": "as stated",
}
ONE_TRAINING = """As stated: the whole interval is on that side; not: on the other; cannot be told: it holds 0, or
there is none. Intervals are over images, of one training of each model: what another seed would change is not in them
(make study has seeds). Each line is read by itself."""

INFERRED = "[?]"
"""Marks what the paper does not say and we infer."""
MAPS = {"shown_auc": "first component, over the pictures shown"}

Row = Mapping[str, Any]


def remarks(target: Target) -> list[Section]:
    """Where the paper disagrees with itself or compares unlike things; nothing where nothing is to be said."""
    lines = target.options.get("remarks", [])
    return [Section("To be read beside the numbers", lines)] if lines else []


def sections(target: Target, rows: Sequence[Row], score: str) -> list[Section]:
    """What the paper states, what ours say to it, and the remarks.

    Args:
        target: with ``statement``, ``orders`` and ``remarks``, where it has them.
        rows: those of the page, each with ``name``, its model, and ``run``, where it comes from one.
        score: the rows' key that is compared.
    """
    found = []
    if statement := target.options.get("statement"):
        lines = [statement] + ([DEMO] if target.data == "demo" and target.tasks else [])
        compared = list(_comparisons(target, rows, score))
        lines += [" ".join(ONE_TRAINING.split())] if compared else []
        found.append(Section("What the paper shows", lines, Table(COLUMNS, compared, _show) if compared else None))
    return found + remarks(target)


def _comparisons(target: Target, rows: Sequence[Row], score: str) -> Iterator[dict[str, Any]]:
    """A line for each neighbouring pair of each order, kind of map and reading, of the last block."""
    mark = f" {INFERRED}" if target.options.get("inferred") else ""
    kinds = dict.fromkeys((row["kind"], row.get("reading", "published")) for row in rows if row.get("kind"))
    for order in target.options.get("orders", {}).get(target.data, []):
        for one, other in pairwise(order):
            for kind, reading in kinds:
                of_kind = [r for r in rows if r.get("kind") == kind and r.get("reading", "published") == reading]
                first, second = (_best(of_kind, side, score) for side in (one, other))
                if first is None or second is None:
                    continue
                difference = first[score] - second[score]
                found = paired(first, second) if score == SCORE else None
                yield {
                    "paper": f"{_name(target, one)} > {_name(target, other)}{mark}",
                    "map": MAPS.get(score) or ("CLS row of M" if kind == "mixing" else "similarity"),
                    "read": "none" if kind == "mixing" else _streams(first, second),
                    "first": first[score],
                    "second": second[score],
                    "difference": difference,
                    "interval": None if found is None else f"{found.low:+.3f} to {found.high:+.3f}",
                    "holds": _holds(found),
                }


def _holds(found: Difference | None) -> str:
    if found is None or found.low <= 0 <= found.high:
        return "cannot be told"
    return "yes" if found.low > 0 else "no"


def _streams(first: Row, second: Row) -> str:
    names = list(dict.fromkeys((first.get("stream", ""), second.get("stream", ""))))
    return f"{' and '.join(names)} ({first.get('reading', 'published')})"


def _fields(side: str | Mapping[str, Any]) -> Mapping[str, Any]:
    return {"name": side} if isinstance(side, str) else side


def _best(rows: Sequence[Row], side: str | Mapping[str, Any], score: str) -> Row | None:
    """The row with the fields of a side that scores highest in the last block."""
    fitting = [row for row in rows if all(row.get(k) == v for k, v in _fields(side).items()) and score in row]
    last = max((row["block"] for row in fitting), default=None)
    return max((row for row in fitting if row["block"] == last), key=lambda row: row[score], default=None)


def _name(target: Target, side: str | Mapping[str, Any]) -> str:
    """A model by its label, with how it was trained; a token by what it is."""
    if isinstance(side, str):
        label = target.label(side)
        return label["label"] if label["training"] in label["label"] else f"{label['label']} ({label['training']})"
    return {None: "middle class token", "first": "class token at index 0", "patch": "the best of the patches"}[
        side["part"]
    ]


def paired(first: Row, second: Row) -> Difference | None:
    """Of max(m, 1 − m), by a paired bootstrap over the images that both scored; None where runs did not keep them."""
    scores = [_per_image(row) for row in (first, second)]
    if scores[0] is None or scores[1] is None or scores[0].shape != scores[1].shape:
        return None
    both = ~(np.isnan(scores[0]) | np.isnan(scores[1]))
    if not both.any():
        return None
    return paired_difference(scores[0][both], scores[1][both])


def _per_image(row: Row) -> np.ndarray | None:
    """(n) AUC of each image, negated about 0.5 where the mean is below; None where the run did not keep them."""
    run = row.get("run")
    if not isinstance(run, Run):
        return None
    way = row.get("compare", run.ways[0])
    kept = run.kept_arrays.get("image_auc" if way == run.ways[0] else f"image_auc/{way}")
    if kept is None:
        return None
    values = kept[:, run.kept_arrays["image_auc_names"].tolist().index(row["map"])].astype(np.float64)
    return values if row["auc"] >= 0.5 else 1 - values


def _show(row: Row, column: str) -> str:
    value = row.get(column)
    if column == "difference" and value is not None:
        return f"{value:+.3f}"
    return show_value(row, column)
