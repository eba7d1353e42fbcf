"""Mixers of equal size side by side over seeds, trained and untrained, and what the paper says of them.

Reads RUNS/seedN/MODEL-{places,knn_both,auc,ranks}, as ``make study`` makes them; writes RUNS/study.md, .html, .csv with
every value, study.json, and a chart as PNG and PDF.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from analysis.pages import COLOURS, picture, save_figure
from analysis.renderers import renderer
from analysis.study_values import METRICS, Study, read
from analysis.tables import Section, Table, write_page
from analysis.targets import Target
from common.files import to_csv, write_json, write_text
from metrics import correlation, mean_correlation
from metrics.effects import Effect, effect, mean_interval

NOTE = """Each model was pretrained with DINO on the same embedded scenes by the same recipe, which was chosen for
Vim, and evaluated frozen; so were the same models as they were initialised. A value is a seed's; means stand with the
standard deviation over seeds, differences with 95 % intervals by Student's t (of the pairs where both sides are one
model, else Welch's) and Hedges' g. Similarities, probes and k-NN are given for both streams of the blocks, the
residual one and the mixer's branch; the published maps and probes of attention models read the residual stream, those
of Vim and Mamba-Reg the branch, and k-NN the residual stream in every family. Binary-AUC is max(m, 1−m) of the mean
AUC m over images, of the last block's map. The effective rank is the exponential of the entropy of the singular
values, the mean over blocks, heads and images; Mamba's M is the mean of its two directions. Intervals are over
trainings: that the scenes are one fixed set is not in them."""
RANKS = """Over models: Spearman's ρ of each seed's models, its mean and Student's t interval over seeds; it holds for
these models alone. Within models: over all seeds, both centred by model, by a bootstrap over points. Each line is
read by itself; of many such lines one in twenty would be off by chance."""
VERDICTS = """Holds: the whole interval is on the side that is claimed; against: on the other; cannot be told: it holds
0. Each line is read by itself, and of many such lines one in twenty would be off by chance."""
CONTROLS = ("shuffled", "position")
READINGS: dict[str, dict[str, Any]] = {
    "published": {"published": True},
    "residual": {"stream": "residual"},
    "branch": {"stream": "branch"},
}
"""Which values are compared: each model in the stream of its published results, or all in one stream."""


def reads(metric: str) -> list[str]:
    """The readings in which a metric differs."""
    return list(READINGS) if METRICS[metric].reads else ["published"]


def verdict(found: Effect) -> str:
    """What an interval says of "the first is greater"."""
    if math.isnan(found.low):
        return "cannot be told"
    return "holds" if found.low > 0 else "against" if found.high < 0 else "cannot be told"


def show_mean(values: Sequence[float], metric: str) -> str:
    """Mean ± standard deviation."""
    if not values:
        return "–"
    digits = METRICS[metric].digits
    spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def show_effect(found: Effect, metric: str) -> dict[str, str]:
    """Cells of an effect."""
    digits = max(METRICS[metric].digits, 1)
    return {
        "difference": f"{found.difference:+.{digits}f}",
        "interval": "–" if math.isnan(found.low) else f"{found.low:+.{digits}f} to {found.high:+.{digits}f}",
        "g": f"{found.g:+.1f}" if math.isfinite(found.g) else "–",
    }


def mean_rows(study: Study, target: Target) -> Iterator[dict[str, Any]]:
    """A line for each metric and reading, trained and untrained: every model's mean and spread."""
    for metric, about in METRICS.items():
        for stream in ("residual", "branch") if about.reads else (None,):
            for trained in (True, False):
                cells = {m: show_mean(study.of(metric, m, trained, stream), metric) for m in study.models}
                if any(cell != "–" for cell in cells.values()):
                    state = "pretrained" if trained else "untrained"
                    yield {"metric": about.label, "stream": stream or "–", "state": state} | cells


def learned_rows(study: Study, target: Target) -> Iterator[dict[str, Any]]:
    """A line for each metric, reading and model: by how much it is above its untrained self."""
    for metric, about in METRICS.items():
        for model in [] if metric.startswith(CONTROLS) else study.models:
            for stream in study.streams(model) if about.reads else (None,):
                sides = (study.of(metric, model, trained, stream) for trained in (True, False))
                after, before = sides
                if not after or len(after) != len(before):
                    continue
                found = effect(after, before, paired=True)
                line = {"metric": about.label, "model": target.label(model)["label"], "stream": stream or "–"}
                yield line | show_effect(found, metric)


def claim_rows(study: Study, target: Target) -> Iterator[dict[str, Any]]:
    """A line for each of the target's claims, metric and reading."""
    for claim in target.options["claims"]:
        if not {claim["higher"], claim["lower"]} <= set(study.models):
            continue
        for metric in claim["of"]:
            for reading in reads(metric):
                higher, lower = (study.of(metric, claim[side], **READINGS[reading]) for side in ("higher", "lower"))
                if not higher or not lower:
                    continue
                found = effect(higher, lower, paired=False)
                line = {"says": claim["says"], "metric": METRICS[metric].label}
                line["reading"] = reading if METRICS[metric].reads else "–"
                yield line | show_effect(found, metric) | {"verdict": verdict(found)}


def parted_rows(study: Study, target: Target) -> Iterator[dict[str, Any]]:
    """How much of the published distance between an attention model and a Mamba one is the reading.

    A - M as published is (A - M, both by the residual stream) + (M by the residual stream - M by its branch).
    """
    softmax = target.options["reference"]
    others = [model for model in study.models if study.streams(model)[:1] == ["branch"]]
    for trained in (True, False):
        for model in others if softmax in study.models else []:
            for metric in ("probe", "auc"):
                a, m, published = (
                    study.of(metric, one, trained, stream)
                    for one, stream in ((softmax, "residual"), (model, "residual"), (model, "branch"))
                )
                if not (a and m and published):
                    continue
                parts = {
                    "as published": effect(a, published, paired=False),
                    "of it the mixer (both by the residual stream)": effect(a, m, paired=False),
                    "of it the reading (the same model by residual, less by branch)": effect(m, published, paired=True),
                }
                names = f"{target.label(softmax)['label']} − {target.label(model)['label']}"
                line = {"models": names, "state": "pretrained" if trained else "untrained"}
                for part, found in parts.items():
                    yield line | {"metric": METRICS[metric].label, "part": part} | show_effect(found, metric)


def rank_rows(study: Study, target: Target) -> Iterator[dict[str, Any]]:
    """Whether a higher rank goes with better maps and tasks, over the pretrained models: Spearman's ρ.

    Over models: of each seed's models, the mean over seeds. Within: over all seeds, both centred by model, so that what
    tells models apart is gone.
    """
    points = [(model, seed) for model in study.models for seed in study.seeds]
    models, seeds = ([point[i] for point in points] for i in (0, 1))
    ways = {"models, seed by seed": lambda x, y: mean_correlation(x, y, seeds),
            "seeds, within models": lambda x, y: correlation(x, y, models)}  # fmt: skip
    for rank in ("effective_rank", "block_effective_rank"):
        x = [value for model in study.models for value in study.of(rank, model)]
        for metric in ("auc", "probe", "knn"):
            for reading in reads(metric):
                y = [value for model in study.models for value in study.of(metric, model, **READINGS[reading])]
                if not len(x) == len(y) == len(points):
                    continue
                for over, way in ways.items():
                    n, _, (value, low, high) = way(np.array(x), np.array(y))
                    cells: dict[str, Any] = {
                        "rank": METRICS[rank].label,
                        "metric": METRICS[metric].label,
                        "reading": reading,
                    }
                    cells |= {"over": over, "n": n, "rho": None if value is None else f"{value:+.2f}"}
                    yield cells | {"interval": None if low is None else f"{low:+.2f} to {high:+.2f}"}


def tables(study: Study, target: Target) -> dict[str, Table]:
    """The page's tables by their headings; those that nothing fills are left out."""
    labels = {model: target.label(model)["label"] for model in study.models}
    effects: dict[str, str] = {"difference": "difference", "interval": "95 % interval", "g": "Hedges' g"}
    what: dict[str, str] = {"metric": "metric", "stream": "stream"}
    found = {
        "What was measured": ({**what, "state": "state"} | labels, mean_rows),
        "What pretraining brought: pretrained less untrained": ({**what, "model": "model"} | effects, learned_rows),
        "What the paper says": (
            {"says": "claim", "metric": "metric", "reading": "stream"} | effects | {"verdict": "verdict"}, claim_rows,
        ),
        "Does a higher rank go with better maps and tasks?": (
            {"rank": "rank", "metric": "metric", "reading": "stream", "over": "over", "n": "n", "rho": "Spearman's ρ",
             "interval": "95 % interval"}, rank_rows,
        ),
        "The reading or the mixer": (
            {"models": "models", "metric": "metric", "state": "state", "part": "part"} | effects, parted_rows,
        ),
    }  # fmt: skip
    made = {title: Table(columns, list(rows(study, target))) for title, (columns, rows) in found.items()}
    return {title: table for title, table in made.items() if table.rows}


def describe(study: Study, target: Target) -> str:
    """Sizes, seeds, data and revisions in a sentence or two."""
    sizes = ", ".join(f"{target.label(model)['label']} {study.parameters[model]:,}" for model in study.models)
    revisions = ", ".join(f"{task} {r.get('revision', '')[:8]}" for task, r in study.records.items())
    dates = sorted({record.get("started", "")[:10] for record in study.records.values()})
    return (
        f"Parameters: {sizes}. Seeds {', '.join(map(str, study.seeds))}; {study.images:,} validation images with both "
        f"classes. Revisions: {revisions}; {', '.join(dates)}."
    )


def chart(study: Study, target: Target, base: Path) -> list[Path]:
    """A panel for each metric and stream: means with 95 % intervals and each seed, pretrained and (grey) untrained."""
    panels = [
        (metric, stream)
        for metric, about in METRICS.items()
        if not metric.startswith((*CONTROLS, "raw"))
        for stream in (("residual", "branch") if about.reads else (None,))
    ]
    columns = 4
    rows = math.ceil(len(panels) / columns)
    fig, axes = plt.subplots(rows, columns, figsize=(3.3 * columns, 2.9 * rows), squeeze=False, layout="constrained")
    for axis, (metric, stream) in zip(axes.flat, panels, strict=False):
        for at, model in enumerate(study.models):
            for trained, shift in ((False, -0.2), (True, 0.2)):
                values = study.of(metric, model, trained, stream)
                if not values:
                    continue
                mean, (low, high) = float(np.mean(values)), mean_interval(values)
                colour = COLOURS[at % len(COLOURS)] if trained else "#bbbbbb"
                axis.bar(at + shift, mean, color=colour, width=0.38, alpha=0.8)
                if not math.isnan(low):
                    axis.errorbar(
                        at + shift, mean, [[mean - low], [high - mean]], color="black", capsize=3, linewidth=1
                    )
                offsets = np.linspace(-0.12, 0.12, len(values)) if len(values) > 1 else [0.0]
                axis.scatter([at + shift + x for x in offsets], values, color="black", s=7, zorder=3)
        axis.set_xticks(range(len(study.models)), [target.label(m)["label"] for m in study.models], fontsize=8)
        axis.set_title(METRICS[metric].label + (f"\n{stream} stream" if stream else ""), fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        if metric.endswith("auc"):
            axis.axhline(0.5, color="#444", linewidth=0.8, linestyle=":")
            axis.set_ylim(0.4, 1.02)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    return save_figure(fig, base)


@renderer("study")
def draw(target: Target, runs: Path) -> list[Path]:
    """RUNS/study.json, .md, .html, .csv with the value of every seed, .png and .pdf."""
    study, base = read(target, runs), runs / target.name
    paths = chart(study, target, base)
    below = picture(paths[0], "means with 95 % intervals, and seeds as points; grey: untrained")
    (_, first), *rest = tables(study, target).items()
    lines = {"What the paper says": [" ".join(VERDICTS.split())],
             "Does a higher rank go with better maps and tasks?": [" ".join(RANKS.split())]}  # fmt: skip
    sections = [Section(title, lines.get(title, []), table) for title, table in rest]
    text = f"{' '.join(NOTE.split())} {describe(study, target)}"
    paths += write_page(base, target.title, text, first, below=below, sections=sections, suffixes=(".md", ".html"))
    write_json(base.with_suffix(".json"), study._asdict() | {"values": [v._asdict() for v in study.values]})
    write_text(base.with_suffix(".csv"), to_csv([value._asdict() for value in study.values]))
    return [*paths, base.with_suffix(".json"), base.with_suffix(".csv")]
