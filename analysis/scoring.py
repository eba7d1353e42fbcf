"""The same maps scored each way: where maps and masks meet, and whether images or all their cells are averaged.

Reads RUNS/MODEL-scoring, whose rows name their way in ``compare``; writes RUNS/scoring.md, .html and .csv, which has a
line for each map and way.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from analysis.figure_pages import DATA, KINDS, describe_map, missing
from analysis.readings import READINGS, SCORE, ends, named
from analysis.renderers import renderer
from analysis.runs import Run
from analysis.statements import INFERRED, paired, remarks
from analysis.tables import Section, Table, show_value, write_page
from analysis.targets import Target
from common.files import to_csv, write_text
from metrics import POOLED_DRAWS
from metrics.intervals import DRAWS

Row = dict[str, Any]
CONTROLS = {"shuffled": "shuffled", "position": "distance to the centre"}
PUBLISHED = "grid"
WAYS = {
    "grid": f"""the mask is brought to the map's grid, a cell by the pixel nearest to its centre; each image has its
AUC, and m is the mean over images. This is the published way. The paper says that the mask is resized to the grid; that
the nearest pixel is taken, and that m is a mean over images, is our reading {INFERRED}.""",
    "area": """the same, but a cell is foreground where at least half of its pixels that take part are.""",
    "mask": """the map is made as large as the mask, bilinearly, and scored against every pixel; again the mean over
images.""",
    "pooled": """on the grid as the published way has it, but the cells of all images are scored at once, with one
threshold for all; an image of one class counts too. There is no AUC of an image, so no mean of max(AUC, 1−AUC).""",
}
NOTE = f"""m is Binary-AUC, of the last block's maps, and its interval that of 95 % by the bootstrap over images:
{DRAWS:,} draws of the mean over images; {POOLED_DRAWS} of the pooled AUC, which is computed anew, exactly, of the
images of each draw. max(m, 1−m) leaves the sign of a map free; the mean of max(AUC, 1−AUC) over images exceeds 0.5 for
maps of no meaning too: shuffled maps show by how much."""
DIFFERENCE_NOTE = """Of m by each way less m by {first}, over the images that both scored, by the paired bootstrap.
Where m by {first} is below 0.5 the sign is turned, so that above 0 the map scores higher by this way. p is of each line
alone, at least one in the number of draws."""
ORDER_NOTE = """By max(m, 1−m). ≈ stands where the 95 % interval of the paired difference of neighbours holds 0; by the
pooled AUC models are ordered by their numbers alone."""
WHICH = {"model": "model", "training": "training", "what": "map", "read": "stream that is read"}
DIFFERENCES = WHICH | {
    "way": "way",
    "first": "m by the first way",
    "m": "m by this way",
    "difference": "difference",
    "interval": "95 % interval",
    "p": "p",
    "images": "images",
}
NUMBERS = (
    "compare", "auc", "auc_low", "auc_high", SCORE, "auc_normalized", "images", "skipped",
    "difference", "difference_low", "difference_high", "difference_p", "difference_images",
)  # fmt: skip


def scored(target: Target, runs: Sequence[Run]) -> Iterator[dict[str, Row]]:
    """Of each model's maps of the last block, and controls: the rows by way, with the columns of WHICH and ``run``."""
    maps = [(kind, reading) for kind in KINDS for reading in READINGS] + [(kind, None) for kind in CONTROLS]
    for run in runs:
        for kind, reading in maps:
            found = {way: rows[-1] for way in run.ways if (rows := run.maps(kind, None, reading, way))}
            if found:
                yield {way: _line(target, run, row) for way, row in found.items()}


def _line(target: Target, run: Run, row: Row) -> Row:
    who, words = target.label(run.model), CONTROLS.get(row["kind"]) or describe_map(row)
    return row | {
        "name": run.model, "run": run, "model": who["label"], "training": who["training"], "what": words,
        "read": named(row) if row["kind"] == "similarity" else "none",
        "m": _mean(row), "counts": f"{row['images']:,} ({row['skipped']:,})",
    }  # fmt: skip


def _cells(lines: Sequence[Mapping[str, Row]], value: str) -> list[Row]:
    """A line for each map, with a way's value in the column that the way names."""
    return [next(iter(line.values())) | {way: row.get(value) for way, row in line.items()} for line in lines]


def _mean(row: Row) -> str:
    interval = ends(row, "auc")
    return f"{row['auc']:.3f}" + ("" if interval is None else f" ({interval[0]:.3f} to {interval[1]:.3f})")


def differences(lines: Sequence[Mapping[str, Row]]) -> list[Row]:
    """A line for each map and way but the first: how m differs, counted from 0.5 to the side where the first's m is."""
    found = []
    for line in lines:
        first, *others = line.values()
        side = 1 if first["auc"] >= 0.5 else -1
        for row in others:
            low, high = sorted((side * row["difference_low"], side * row["difference_high"]))
            numbers = {"first": first["auc"], "m": row["auc"], "difference": side * row["difference"]}
            numbers |= {"interval": f"{low:+.3f} to {high:+.3f}", "p": row["difference_p"]}
            found.append(row | numbers | {"way": row["compare"], "images": row["difference_images"]})
    return found


def order(ranked: Sequence[Row]) -> str:
    """Models by falling score; ≈ between neighbours that the images do not tell apart."""
    text = str(ranked[0]["model"])
    for one, other in pairwise(ranked):
        found = paired(one, other)
        text += f" {'≈' if found is not None and found.low <= 0 <= found.high else '>'} {other['model']}"
    return text


def orders(lines: Sequence[Mapping[str, Row]], ways: Sequence[str]) -> list[str]:
    """A sentence for each kind of map and reading: the models' order by each way, and whether it is one order."""
    found = []
    for kind, title in KINDS.items():
        for reading in READINGS:
            fitting = [line for line in lines if _is(next(iter(line.values())), kind, reading)]
            by_way = {way: [line[way] for line in fitting if way in line] for way in ways}
            ranked = {way: sorted(rows, key=lambda row: -row[SCORE]) for way, rows in by_way.items() if len(rows) > 1}
            if not ranked:
                continue
            one = len({tuple(row["model"] for row in rows) for rows in ranked.values()}) == 1
            what = title if kind == "mixing" else f"{title}, {reading} reading"
            said = "one order by every way" if one else "the order changes with the way"
            found.append(f"{what}: {said}. " + "; ".join(f"{way}: {order(rows)}" for way, rows in ranked.items()) + ".")
    return found


def _is(row: Row, kind: str, reading: str) -> bool:
    return row["kind"] == kind and row.get("reading", "published") == reading


def show(row: Mapping[str, Any], column: str) -> str:
    """A cell as people read it."""
    value = row.get(column)
    if column == "difference" and value is not None:
        return f"{value:+.3f}"
    return f"{value:.2g}" if column == "p" and value is not None else show_value(row, column)


@renderer("scoring")
def draw(target: Target, runs: Path) -> list[Path]:
    """RUNS/TARGET.md, .html and .csv."""
    found = target.some(runs)
    lines = list(scored(target, found))
    ways = list(dict.fromkeys(way for run in found for way in run.ways))
    columns = WHICH | {way: f"{way} (published)" if way == PUBLISHED else way for way in ways}
    beside = [
        Section("The ways", [f"{way}: {' '.join(WAYS[way].split())}" for way in ways]),
        Section("max(m, 1−m)", (), Table(columns, _cells(lines, SCORE))),
        Section("Mean over images of max(AUC, 1−AUC)", (), Table(columns, _cells(lines, "auc_normalized"))),
        Section("Images scored (and skipped)", (), Table(columns, _cells(lines, "counts"))),
    ]
    if changed := differences(lines):
        text = " ".join(DIFFERENCE_NOTE.format(first=ways[0]).split())
        beside.append(Section(f"Differences from {ways[0]}", [text], Table(DIFFERENCES, changed, show)))
    if said := orders(lines, ways):
        beside.append(Section("Order of the models", [" ".join(ORDER_NOTE.split()), *said]))
    every = [row for line in lines for row in line.values()]
    text = f"{' '.join(NOTE.split())}{missing(target, runs, every)} Data: {DATA[target.data]}."
    table = Table(columns, _cells(lines, "m"))
    base = runs / target.name
    paths = write_page(base, target.title, text, table, sections=[*beside, *remarks(target)], suffixes=(".md", ".html"))
    write_text(base.with_suffix(".csv"), to_csv(every, ["name", "map", "stream", "reading", *NUMBERS]))
    return [*paths, base.with_suffix(".csv")]
