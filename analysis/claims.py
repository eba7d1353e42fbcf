"""Claims that are stated without a number, measured: whether AUC goes with probes, how many heads are lazy, how long
patch tokens are, how far tokens mix.

Reads RUNS/MODEL-{auc,places,token_statistics}, or the same under RUNS/seedN where a target is made with several seeds;
writes RUNS/claims.md, .csv (the correlations), .html, .json (their points), .png and .pdf.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from analysis.claim_charts import draw_chart
from analysis.pages import picture
from analysis.readings import READINGS, SCORE
from analysis.renderers import renderer
from analysis.runs import Run, find_run
from analysis.statements import sections
from analysis.tables import Section, Table, show_value, write_page
from analysis.targets import Target
from common.files import write_json
from metrics import Coefficient, mean_correlation

Row = dict[str, Any]
OVER = {
    "layers": "layers, class token",
    "heads": "mixer's heads of the last block",
    "registers": "registers of the last block",
    "models": "models, class token of the last block",
}
SCORES = {"auc": "m", SCORE: "max(m, 1−m)"}
UNTOLD = "cannot be told"
ALL = "all"
CORRELATIONS = {
    "over": "over", "model": "model", "read": "stream that is read", "score": "AUC as", "points": "points", "n": "n",
    "seeds": "seeds",
    "pearson": "Pearson's r", "pearson_interval": "its 95 % interval", "spearman": "Spearman's ρ",
    "spearman_interval": "its 95 % interval ", "verdict": "AUC and accuracy",
}  # fmt: skip
LAZY = {
    "model": "model", "heads": "heads of all blocks", "uniform": "(a) class row near uniform",
    "elsewhere": "(b) looks past the patches", "chance": "(c) AUC within reach of 0.5", "silent": "(a) or (b)",
    "any": "any of them", "last": "any, last two blocks", "chance_last": "(c), last two blocks",
}  # fmt: skip
NORMS = {
    "model": "model", "read": "stream", "patch_norm_median": "median patch norm", "patch_norm_q99": "99 % quantile",
    "patch_norm_max": "largest", "outlier_share": "outliers, share of patches",
    "images_with_outliers": "images with any", "outliers_on_background": "outliers on background",
    "background_share": "background, share of patches", "cls_norm": "class token's norm",
    "register_norm": "registers'", "most": "most outliers in any block", "most_block": "in block",
}  # fmt: skip
DISTANCES = {
    "model": "model", "block": "block", "distance": "mixing distance, patches",
    "distance_of_diagonal": "of the diagonal", "nearest": "nearest head", "farthest": "farthest head",
    "uniform_distance": "uniform M",
    "uniform_of_diagonal": "of the diagonal ", "self_share": "weight on the patch itself",
    "token_share": "on class tokens and registers", "cls_row_entropy": "entropy of the class row",
    "cls_row_token_share": "its weight past the patches",
}  # fmt: skip
NOTE = """AUC is the mean over images of a map's AUC (m), the map being the similarity of a token and the patches, or,
of a mixer's head, the class row of its M. Accuracy is the last top-1 of a linear probe that reads that token in that
block and stream, or that head's output. A point is a layer, head, register or model of a seed; within: both are
centred by model first, so that what tells models apart is gone. Coefficients are made of each seed's points and
averaged over seeds, with the 95 % interval of Student's t over seeds: points of one seed need not be independent of
each other, and what is told holds for other trainings of these very models, not for other models. The verdict is that
of Spearman's interval. Each line is read by itself; of many such lines one in twenty would be off by chance."""
LAZY_NOTE = """A head is called lazy where (a) the entropy of its class row over the patches is at least
{lazy_entropy:g} of that of a uniform row, mean over images; (b) at least {lazy_share:g} of the row's weight lies on
the class token and others that are no patches; (c) the 95 % interval of its map's mean AUC holds 0.5, which becomes
rarer with more images. Shares are of the heads, over seeds."""
NORM_NOTE = """Of the last block, before the final norm, means over images (the largest: of all) and seeds. An
outlier is longer than {outlier_factor:g} times its image's median; "Vision Transformers Need Registers" calls norms
above 150 so, on DINOv2's scale. Outliers prefer the background only where their share on it exceeds the
background's own."""
DISTANCE_NOTE = """The mean attention distance of Dosovitskiy et al. 2021 (appendix D.7) of abs(M) between patches,
M being the mean of both directions of scans with their skip D; means over heads and seeds, beside what a uniform M
has."""


class Found(NamedTuple):
    """A model's runs of one seed."""

    model: str
    seed: int | None
    auc: Run
    places: Run
    statistics: Run

    @property
    def depth(self) -> int:
        """Blocks."""
        return 1 + max(row["block"] for row in self.auc.maps("similarity"))


def collect(target: Target, runs: Path) -> tuple[list[Found], list[str]]:
    """What is there of each model and seed, and the names of the runs that are missing or not complete.

    Raises:
        ValueError: no model has all of its runs.
    """
    found, missing = [], []
    for seed, folder in target.folders(runs).items():
        for model in target.models:
            folders = [folder / f"{model}-{task}" for task in target.tasks]
            there = [run for run in map(find_run, folders) if run is not None and run.complete]
            if len(there) == len(folders):
                found.append(Found(model, seed, *there))
            else:
                names = {run.folder for run in there}
                missing += [str(path.relative_to(runs)) for path in folders if path not in names]
    if not found:
        raise ValueError(f"{target.name}: no model has all of its runs under {runs}: {', '.join(missing)}")
    return found, missing


def points(found: Sequence[Found]) -> list[Row]:
    """Every place that has both an AUC and a probe: ``over``, ``model``, ``seed``, ``reading``, ``stream``, ``place``,
    the two forms of AUC, and ``top1`` in percent."""
    return [point for one in found for point in _points(one)]


def _points(one: Found) -> Iterator[Row]:
    top1: dict[tuple[int, str, str | None], float] = {}
    for row in one.places.rows:
        if row.get("block") is not None:
            stream = None if row["pooling"].startswith("head") else row["stream"]
            where = row["block"] % one.depth, row["pooling"], stream
            top1[where] = max(top1.get(where, 0.0), 100 * row["top1_last"])
    last, auc = one.depth - 1, one.auc
    maps = [("layers", row, "cls") for reading in READINGS for row in auc.maps("similarity", None, reading)]
    maps += [("models", row, "cls") for _, row, _ in maps if row["block"] == last]
    for reading in READINGS:
        every = auc.maps("similarity", "register", reading)
        maps += [("registers", row, f"register{row['index']}") for row in every if row["block"] == last]
    maps += [("heads", row, f"head{row['index']}") for row in auc.maps("mixing", "head") if row["block"] == last]
    for over, row, part in maps:
        stream = None if over == "heads" else row["stream"]
        if (probe := top1.get((row["block"], part, stream))) is not None:
            yield {
                "over": over, "model": one.model, "seed": one.seed, "reading": row.get("reading", "published"),
                "stream": stream, "place": f"block{row['block']}/{part}", "top1": probe,
                **{score: row[score] for score in SCORES},
            }  # fmt: skip


def correlations(target: Target, every: Sequence[Row]) -> list[Row]:
    """Lines of CORRELATIONS: of all models together, then of each; of points as they are, and within."""
    rows = []
    for over in OVER:
        mine = [point for point in every if point["over"] == over]
        readings = [reading for reading in READINGS if any(p["reading"] == reading for p in mine)]
        models = list(dict.fromkeys(point["model"] for point in mine))
        single = [] if over == "models" or len(models) < 2 else models
        for model in (ALL, *single):
            of_model = [point for point in mine if model in (ALL, point["model"])]
            for reading in readings:
                some = [point for point in of_model if point["reading"] == reading]
                rows += [row for score in SCORES for row in _lines(target, over, model, reading, score, some)]
    return rows


def _lines(
    target: Target, over: str, model: str, reading: str, score: str, mine: Sequence[Row]
) -> Iterator[Row]:  # fmt: skip
    """Of the points as they are; within, where there are several models."""
    if not mine:
        return
    seeds, models = ([point[key] for point in mine] for key in ("seed", "model"))
    x, y = (np.array([point[key] for point in mine]) for key in (score, "top1"))
    streams = " or ".join(dict.fromkeys(point["stream"] for point in mine if point["stream"]))
    for points, of in (
        ("raw", None),
        *([] if over == "models" or len(set(models)) < 2 else [("within models", models)]),
    ):
        n, pearson, spearman = mean_correlation(x, y, seeds, of)
        yield {
            "over": OVER[over], "model": ALL if model == ALL else target.label(model)["label"],
            "read": f"{streams} ({reading})" if streams else "none", "score": SCORES[score], "points": points, "n": n,
            "seeds": len(set(seeds)),
            "pearson": pearson.value, "pearson_interval": _interval(pearson), "spearman": spearman.value,
            "spearman_interval": _interval(spearman), "verdict": _verdict(spearman),
        }  # fmt: skip


def _interval(found: Coefficient) -> str:
    return UNTOLD if found.low is None else f"{found.low:+.2f} to {found.high:+.2f}"


def _verdict(found: Coefficient) -> str:
    if found.low is None or found.high is None or found.low <= 0 <= found.high:
        return UNTOLD
    return "rise together" if found.low > 0 else "one rises, the other falls"


def lazy_heads(target: Target, found: Sequence[Found]) -> list[Row]:
    """Lines of LAZY, a model each."""
    rows = []
    for model, mine in _by_model(found):
        heads = []
        for one in mine:
            ends = {
                (r["block"], r["index"]): (r.get("auc_low"), r.get("auc_high")) for r in one.auc.maps("mixing", "head")
            }
            for row in _mixing(one):
                low, high = ends.get((row["block"], row["head"]), (None, None))
                chance = None if low is None or high is None or low != low else bool(low <= 0.5 <= high)
                told = {"uniform": row["lazy_uniform"], "elsewhere": row["lazy_elsewhere"], "chance": chance}
                told |= {"silent": bool(told["uniform"] or told["elsewhere"]), "any": any(told.values())}
                heads.append(told | {"last": row["block"] >= one.depth - 2})
        late = [head for head in heads if head["last"]]
        shares = {key: _mean(heads, key) for key in ("uniform", "elsewhere", "chance", "silent", "any")}
        shares |= {"last": _mean(late, "any"), "chance_last": _mean(late, "chance")}
        rows.append({"model": target.label(model)["label"], "heads": len(heads)} | shares)
    return rows


def outliers(target: Target, found: Sequence[Found]) -> list[Row]:
    """Lines of NORMS, a model and stream each."""
    rows = []
    for model, mine in _by_model(found):
        for reading in READINGS:
            every = [row for one in mine for row in one.statistics.rows if row["reading"] == reading]
            if not every:
                continue
            last = max(row["block"] for row in every)
            ends = [row for row in every if row["block"] == last]
            of_block = {b: _mean([r for r in every if r["block"] == b], "outlier_share") or 0 for b in range(last + 1)}
            most = max(of_block, key=of_block.__getitem__)
            means = {key: _mean(ends, key) for key in NORMS if key not in ("model", "read", "most", "most_block")}
            means["patch_norm_max"] = max(row["patch_norm_max"] for row in ends)
            who = {"model": target.label(model)["label"], "read": f"{every[0]['stream']} ({reading})"}
            rows.append(who | means | {"most": of_block[most], "most_block": most})
    return rows


def distances(target: Target, found: Sequence[Found]) -> list[Row]:
    """Lines of DISTANCES, a model and block each."""
    rows = []
    for model, mine in _by_model(found):
        every = [row for one in mine for row in _mixing(one)]
        for block in sorted({row["block"] for row in every}):
            heads = [row for row in every if row["block"] == block]
            means = {key: _mean(heads, key) for key in DISTANCES if key not in ("model", "block")}
            ends = {
                "nearest": min(row["distance"] for row in heads),
                "farthest": max(row["distance"] for row in heads),
            }
            rows.append({"model": target.label(model)["label"], "block": block} | means | ends)
    return rows


def _by_model(found: Sequence[Found]) -> Iterator[tuple[str, list[Found]]]:
    for model in dict.fromkeys(one.model for one in found):
        yield model, [one for one in found if one.model == model]


def _mixing(one: Found) -> list[Row]:
    return [row for row in one.statistics.rows if row["head"] is not None and row["distance"] is not None]


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Over the rows that have it."""
    values = [float(row[key]) for row in rows if row.get(key) is not None]
    return float(np.mean(values)) if values else None


def show(row: Mapping[str, Any], column: str) -> str:
    """A cell as people read it."""
    value = row.get(column)
    if column in ("pearson", "spearman"):
        return "–" if value is None else f"{value:+.2f}"
    return show_value(row, column)


@renderer("claims")
def draw(target: Target, runs: Path) -> list[Path]:
    """RUNS/claims.md, .csv, .html, .json, .png and .pdf."""
    found, missing = collect(target, runs)
    every, base = points(found), runs / target.name
    rows = correlations(target, every)
    together, apart = ([row for row in rows if (row["model"] == ALL) is wanted] for wanted in (True, False))
    norms, mixing = outliers(target, found), distances(target, found)
    seeds = [seed for seed in dict.fromkeys(one.seed for one in found) if seed is not None]
    text = NOTE + (f" Seeds: {', '.join(map(str, seeds))}." if seeds else "")
    text += f" Not run: {', '.join(missing)}." if missing else ""
    record = found[0].auc.record
    text += f" Revision {record.get('revision', '')[:8]}, {record.get('started', '')[:10]}."
    counts = found[0].statistics.results["counts"]
    parts = [
        *sections(target, [], SCORE),
        Section("Model by model", [], Table(CORRELATIONS, apart, show)),
        Section("Lazy heads", [LAZY_NOTE.format(**counts)], Table(LAZY, lazy_heads(target, found)).filled()),
        Section("Norms of patches", [NORM_NOTE.format(**counts)], Table(NORMS, norms).filled()),
        Section("Distances of mixing", [DISTANCE_NOTE], Table(DISTANCES, mixing).filled()),
    ]
    paths = draw_chart(target, every, [one.statistics for one in found], base)
    above = picture(paths[0], "AUC against probes, and distances, outliers and norms by layer")
    write_json(base.with_suffix(".json"), {"points": every, "norms": norms, "distances": mixing})
    table = Table(CORRELATIONS, together, show)
    return [*paths, base.with_suffix(".json"),
            *write_page(base, target.title, text, table, above=above, sections=parts)]  # fmt: skip
