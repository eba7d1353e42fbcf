"""Both readings of a run's maps: the stream that the family's published results read, and the other."""

from collections.abc import Mapping
from typing import Any

from analysis.runs import Run
from metrics import folded

READINGS = ("published", "other")
SCORE = "auc_of_mean_normalized"


def named(row: Mapping[str, Any]) -> str:
    """A row's reading in words: the stream, and whether it is the published one; rows of old runs do not say which."""
    reading = row.get("reading", "published")
    return f"{row['stream']} ({reading})" if row.get("stream") not in (None, "published") else reading


def readings(run: Run, kind: str, part: str | None = None) -> dict[str, list[dict[str, Any]]]:
    """Rows of a run's maps of a kind and part by reading, from the first block to the last; readings that it has."""
    found = {reading: run.maps(kind, part, reading) for reading in READINGS}
    return {reading: rows for reading, rows in found.items() if rows}


def knn_top1(run: Run, k: int | None = None) -> float:
    """Of k neighbours in the published reading; of the headline's k unless told."""
    return float(
        next(
            row["top1"] for row in run.rows if row.get("reading", "published") == "published" and k in (None, row["k"])
        )
    )


def ends(row: Mapping[str, Any], score: str = SCORE) -> tuple[float, float] | None:
    """The 95 % interval of a row's mean AUC (``auc``), or of max(m, 1 − m); None where the run has none."""
    low, high = row.get("auc_low"), row.get("auc_high")
    if low is None or high is None or low != low:
        return None
    if score == "auc":
        return low, high
    low, high = folded(low, high)
    return float(low), float(high)


def bars(row: Mapping[str, Any], score: str = SCORE) -> list[list[float]] | None:
    """The same as matplotlib's ``yerr``, below and above the score; None where there is none."""
    interval = ends(row, score)
    if interval is None:
        return None
    return [[max(0.0, row[score] - interval[0])], [max(0.0, interval[1] - row[score])]]
