"""Three mixers of equal size side by side over seeds.

Reads RUNS/seedN/MODEL-{probe,knn,auc,ranks}, as ``make study`` makes them; writes RUNS/study.json, .md, .csv, .html and
a chart as PNG and PDF.
"""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from analysis.figure_pages import SCORE
from analysis.pages import COLOURS, picture, save_figure
from analysis.readings import knn_top1
from analysis.renderers import renderer
from analysis.runs import Run, complete_run
from analysis.tables import Table, write_page
from analysis.targets import Target
from common.files import to_csv, write_json, write_text

MODELS = {"vit_demo": "softmax", "vim_demo": "Mamba", "linear_vit_demo": "linear"}
"""In the paper's order."""
METRICS = {
    "linear_top1": "linear probe, top-1 %",
    "knn_top1": "k-NN (k = 20), top-1 %",
    "auc_similarity": "Binary-AUC, CLS–patch similarity",
    "auc_mixing": "Binary-AUC, CLS row of M",
    "effective_rank": "effective rank of M",
    "block_effective_rank": "effective rank of its blocks off the diagonal",
    "block_rank": "numerical rank of such a block, largest",
}
NOTE = """Each mixer was pretrained with DINO on the same embedded scenes by the same recipe, which was chosen for the
Mamba model, and evaluated frozen. Values are mean ± standard deviation over seeds. Binary-AUC is
max(m, 1−m) of the mean AUC m over images, of the last block's map. The effective rank is the exponential of the entropy
of the singular values, the mean over blocks, heads and images; Mamba's M is the mean of its two directions."""


def _run(folder: Path, model: str, task: str) -> Run:
    return complete_run(folder / f"{model}-{task}", "run make study")


def measure(folder: Path, model: str) -> dict[str, float]:
    """METRICS of one model and seed, and its number of parameters and images."""
    auc, ranks = _run(folder, model, "auc"), _run(folder, model, "ranks")
    whole = [row for row in ranks.rows if row["direction"] in ("attention", "both")]
    return {
        "linear_top1": 100 * max(row["top1_last"] for row in _run(folder, model, "probe").rows),
        "knn_top1": 100 * knn_top1(_run(folder, model, "knn"), 20),
        "auc_similarity": auc.maps("similarity")[-1][SCORE],
        "auc_mixing": auc.maps("mixing")[-1][SCORE],
        "effective_rank": float(np.mean([row["effective_rank_mean"] for row in whole])),
        "block_effective_rank": float(np.mean([row["block_effective_rank_mean"] for row in whole])),
        "block_rank": float(max(row["block_rank_max"] for row in whole)),
        "parameters": auc.results["backbone_parameters"],
        "images": auc.rows[0]["images"],
    }


def collect(runs: Path) -> dict[str, Any]:
    """Values by mixer, metric and seed. ValueError where a run is missing."""
    folders = sorted(runs.glob("seed*"), key=lambda f: int(f.name.removeprefix("seed")))
    if not folders:
        raise ValueError(f"{runs} holds no seed folders: run make study")
    values = {model: [measure(folder, model) for folder in folders] for model in MODELS}
    record = _run(folders[0], "vim_demo", "auc").record
    return {
        "seeds": [int(folder.name.removeprefix("seed")) for folder in folders],
        "parameters": {model: v[0]["parameters"] for model, v in values.items()},
        "images": values["vim_demo"][0]["images"],
        "revision": record.get("revision", ""),
        "date": record.get("started", "")[:10],
        "values": {m: {metric: [v[metric] for v in rows] for metric in METRICS} for m, rows in values.items()},
    }


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation (n − 1; 0 for one seed)."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def order(study: dict[str, Any], metric: str) -> dict[str, Any]:
    """The mixers by falling mean, and in how many seeds softmax > Mamba >= linear, the paper's order, holds."""
    values = {name: study["values"][model][metric] for model, name in MODELS.items()}
    by_mean = sorted(values, key=lambda name: -float(np.mean(values[name])))
    holds = [s > m >= x for s, m, x in zip(values["softmax"], values["Mamba"], values["linear"], strict=True)]
    means = [float(np.mean(values[name])) for name in by_mean]
    text = by_mean[0]
    for name, before, mean in zip(by_mean[1:], means, means[1:], strict=False):
        text += f" {'=' if before == mean else '>'} {name}"
    return {"order": text, "holds": sum(holds), "seeds": len(holds)}


def table_rows(study: dict[str, Any]) -> list[dict[str, str]]:
    """A line for each metric: mean and spread of each mixer, their order, and how often it is the paper's."""
    rows = []
    for metric, label in METRICS.items():
        cells = {}
        for model, name in MODELS.items():
            mean, deviation = spread(study["values"][model][metric])
            digits = 3 if metric.startswith("auc") else 1 if metric.endswith("top1") else 2
            cells[name] = f"{mean:.{digits}f} ± {deviation:.{digits}f}"
        found = order(study, metric)
        rows.append(
            {"metric": label}
            | cells
            | {
                "order of means": found["order"],
                "seeds with softmax > Mamba ≥ linear": f"{found['holds']} of {found['seeds']}",
            }
        )
    return rows


def describe(study: dict[str, Any], target: Target) -> str:
    """Sizes, seeds, data and revision in a sentence."""
    sizes = ", ".join(f"{target.label(m)['label']} ({MODELS[m]}) {n:,}" for m, n in study["parameters"].items())
    seeds = ", ".join(map(str, study["seeds"]))
    return (
        f"Parameters: {sizes}. Seeds {seeds}; scores over {study['images']:,} validation images with both classes. "
        f"Revision {study['revision'][:8]}, {study['date']}."
    )


def chart(study: dict[str, Any], base: Path) -> list[Path]:
    """A panel for each metric: mean with standard deviation, and each seed as a point."""
    fig, axes = plt.subplots(2, 4, figsize=(12.8, 5.4), layout="constrained")
    axes[-1, -1].set_visible(False)
    for axis, (metric, label) in zip(axes.flat, METRICS.items(), strict=False):
        for at, model in enumerate(MODELS):
            values = study["values"][model][metric]
            mean, deviation = spread(values)
            axis.bar(at, mean, color=COLOURS[at], width=0.65, alpha=0.75)
            axis.errorbar(at, mean, deviation, color="black", capsize=5, linewidth=1.2)
            axis.scatter(
                [at + 0.16 * (i - (len(values) - 1) / 2) for i in range(len(values))], values, color="black", s=12
            )
        axis.set_xticks(range(len(MODELS)), MODELS.values())
        axis.set_title(label, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        if metric.startswith("auc"):
            axis.axhline(0.5, color="#444", linewidth=0.8, linestyle=":")
            axis.set_ylim(0.4, 1)
    return save_figure(fig, base)


@renderer("study")
def draw(target: Target, runs: Path) -> list[Path]:
    """RUNS/study.json, .md, .html, .csv with the value of every seed, .png and .pdf."""
    study, base = collect(runs), runs / target.name
    rows, paths = table_rows(study), chart(study, base)
    below = picture(paths[0], "means with standard deviations, and seeds as points")
    table = Table({column: column for column in rows[0]}, rows)
    text = f"{NOTE} {describe(study, target)}"
    paths += write_page(base, target.title, text, table, below=below, suffixes=(".md", ".html"))
    write_json(base.with_suffix(".json"), study)
    values = [
        {"mixer": MODELS[model], "metric": metric, "seed": seed, "value": value}
        for model, metrics in study["values"].items()
        for metric, found in metrics.items()
        for seed, value in zip(study["seeds"], found, strict=True)
    ]
    write_text(base.with_suffix(".csv"), to_csv(values))
    return [*paths, base.with_suffix(".json"), base.with_suffix(".csv")]
