"""The demo's report: ``python -m analysis.report RUN`` joins a pretraining run and its evaluations.

Reads RUN/pretrain and RUN/{untrained,pretrained}-{probe,knn,auc}; writes RUN/report.json, maps.png, curves.png and a
self-contained report.html, and prints one table.
"""

import html
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from rich import table as rich_table
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from analysis.pages import page, picture
from analysis.readings import knn_top1
from analysis.renderers import renderer
from analysis.runs import Run, complete_run, read_json
from analysis.tables import Table
from analysis.targets import Target
from common.files import write_json, write_text, written_aside

HINT = "run make demo, which makes it"
MODELS = ("untrained", "pretrained")
TASKS = ("probe", "knn", "auc")
COLUMNS = {"metric": "metric", "untrained": "untrained", "pretrained": "pretrained", "difference": "difference"}
METRICS = {
    "linear_top1": "linear probe, top-1",
    "knn_top1": "k-NN, top-1",
    "auc_of_mean_normalized": "Binary-AUC, max(m, 1−m) of the mean m",
    "auc": "Binary-AUC, mean over images",
    "auc_normalized": "Binary-AUC, mean of max(AUC, 1−AUC)",
}


def _run(run: Path, name: str) -> Run:
    return complete_run(run / name, HINT)


def collect(run: Path) -> dict[str, Any]:
    """The figures of report.json."""
    report: dict[str, Any] = {}
    for model in MODELS:
        similarity = _run(run, f"{model}-auc").maps("similarity")[-1]
        report[model] = {
            "linear_top1": 100 * max(row["top1_last"] for row in _run(run, f"{model}-probe").rows),
            "knn_top1": 100 * knn_top1(_run(run, f"{model}-knn")),
            **{k: similarity[k] for k in ("auc", "auc_normalized", "auc_of_mean_normalized")},
        }
    controls = {kind: _run(run, "pretrained-auc").maps(kind)[0] for kind in ("shuffled", "position")}
    record = read_json(run / "pretrain" / "run.json", HINT)
    folders = [run / "pretrain", *(run / f"{model}-{task}" for model in MODELS for task in TASKS)]
    stages = [read_json(folder / "run.json", HINT) for folder in folders]
    speed = scalars(run / "pretrain").get("perf/images_per_second", [])
    report |= {
        "shuffled_auc": controls["shuffled"]["auc"],
        "shuffled_auc_normalized": controls["shuffled"]["auc_normalized"],
        "position_auc": controls["position"]["auc"],
        "stream": similarity["stream"],
        "seed": _seed(run / "pretrain" / "config.yaml"),
        "wall_seconds": round(_covered([_span(stage) for stage in stages if "seconds" in stage]), 1),
        "pretrain_seconds": record.get("seconds"),
        "images_per_second": round(float(np.mean([v for _, v in speed])), 1) if speed else None,
        "images": int(similarity["images"]),
        "revision": record["revision"],
        "versions": record["versions"],
    }
    return report


def _span(record: dict[str, Any]) -> tuple[float, float]:
    """Start and end of a stage, in seconds."""
    start = datetime.strptime(record["started"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
    return start, start + record["seconds"]


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds in which at least one stage ran."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _seed(config: Path) -> int:
    for line in config.read_text(encoding="utf-8").splitlines():
        if line.startswith("seed_everything:"):
            return int(line.split(":")[1])
    raise ValueError(f"{config} has no seed_everything")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard scalars of a run: tag -> (step, value)."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def draw_maps(run: Path, report: dict[str, Any], path: Path) -> None:
    """One row per image: image, mask, and for both models the similarity map and the map over the image.

    The sign of a similarity map is free; where a model's mean AUC is below 0.5 its map is shown negated, so that
    brighter always means what the model scores as object.
    """
    runs = {model: _run(run, f"{model}-auc") for model in MODELS}
    maps = {m: one.arrays[f"maps/{one.maps('similarity')[-1]['map']}"] for m, one in runs.items()}
    images, masks = (runs["pretrained"].arrays[name] for name in ("images", "masks"))
    titles = ["image", "mask", "untrained map", "pretrained map", "over the image"]
    fig, axes = plt.subplots(len(images), len(titles), figsize=(1.55 * len(titles), 1.5 * len(images)), squeeze=False)
    for row, (image, mask) in enumerate(zip(images, masks, strict=True)):
        signed = {m: maps[m][row] * (1 if report[m]["auc"] >= 0.5 else -1) for m in MODELS}
        extent = (0, image.shape[1], image.shape[0], 0)
        axes[row, 0].imshow(image)
        axes[row, 1].imshow(mask != 0, cmap="gray", vmin=0, vmax=1)
        axes[row, 2].imshow(signed["untrained"], cmap="viridis", extent=extent)
        axes[row, 3].imshow(signed["pretrained"], cmap="viridis", extent=extent)
        axes[row, 4].imshow(image)
        axes[row, 4].imshow(signed["pretrained"], cmap="viridis", extent=extent, alpha=0.55)
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=11)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    fig.tight_layout(pad=0.4)
    _save(fig, path)


def _save(fig: Any, path: Path) -> None:
    with written_aside(path) as aside:
        fig.savefig(aside, dpi=110)
    plt.close(fig)


def draw_curves(run: Path, path: Path) -> None:
    """Loss with its two parts, and the k-NN score, over the pretraining."""
    values = scalars(run / "pretrain")
    fig, (upper, lower) = plt.subplots(2, 1, figsize=(6, 5.6))
    for tag, label, style in (
        ("train/loss", "loss", "-"),
        ("train/teacher_entropy", "teacher entropy", "--"),
        ("train/kl", "KL(teacher ‖ student)", ":"),
    ):
        if tag in values:
            upper.plot(*zip(*values[tag], strict=True), style, label=label)
    upper.set(xlabel="optimiser step", ylabel="nats")
    upper.legend(fontsize=10)
    if "val/knn_top1" in values:
        steps, accuracy = zip(*values["val/knn_top1"], strict=True)
        lower.plot(steps, 100 * np.array(accuracy), "o-", color="#d55e00")
    lower.set(xlabel="optimiser step", ylabel="k-NN top-1 on validation (%)")
    for axis in (upper, lower):
        axis.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    _save(fig, path)


def table_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """COLUMNS of each metric."""
    rows = []
    for key, label in METRICS.items():
        before, after = report["untrained"][key], report["pretrained"][key]
        rows.append(
            {"metric": label, "untrained": before, "pretrained": after, "difference": after - before}
            | {"form": ".1f" if key.endswith("top1") else ".3f", "unit": " %" if key.endswith("top1") else ""}
        )
    return rows


def show(row: Mapping[str, Any], column: str) -> str:
    """A cell as people read it."""
    if column == "metric":
        return str(row[column])
    return f"{row[column]:+{row['form']}}" if column == "difference" else f"{row[column]:{row['form']}}{row['unit']}"


def to_html(report: dict[str, Any], table: Table, maps: Path, curves: Path) -> str:
    """A page that needs no other file."""
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    flipped = [m for m in MODELS if report[m]["auc"] < 0.5]
    sign = f" Shown negated, as its mean AUC is below 0.5: {', '.join(flipped)}." if flipped else ""
    body = f"""<p>A small Vim (bidirectional Mamba-2) was pretrained with DINO on the embedded scenes, without labels,
for {report["pretrain_seconds"]:.0f} seconds on this machine. Both columns are the same network with the same seed
({report["seed"]}); the first is its random initialisation. The scores are over {report["images"]} validation
images.</p>
{table.to_html()}
<p>Binary-AUC scores the cosine of the class feature with each patch's, last block, {report["stream"]} stream,
against the objects' mask. The same maps with their pixels shuffled score {report["shuffled_auc"]:.3f} in the mean, but
{report["shuffled_auc_normalized"]:.3f} in the mean of max(AUC, 1−AUC): read that form beside this number. A map that
knows nothing of the image, minus the distance to its centre, scores {report["position_auc"]:.3f}. The sign of a
similarity map is free: below 0.5 the objects are the part less like the class feature.</p>
<h2>Similarity maps</h2>
{picture(maps, "rows of image, mask, untrained and pretrained similarity map, and overlay")}
<p>Yellow is high, violet low, each map stretched to its own range.{sign}</p>
<h2>Pretraining</h2>
{picture(curves, "loss, teacher entropy and KL above; k-NN accuracy below")}
<p>{report["images_per_second"]} images per second in pretraining; all stages together took
{report["wall_seconds"]} s. Revision {html.escape(report["revision"])}; {html.escape(versions)}.</p>"""
    return page("dinomamba demo: before and after DINO pretraining", body)


def main(run: Path) -> list[Path]:
    """Writes the report of one demo run, prints its table, and returns the files."""
    report = collect(run)
    table = Table(COLUMNS, table_rows(report), show)
    paths = [run / name for name in ("report.json", "report.html", "maps.png", "curves.png")]
    numbers, text, maps, curves = paths
    draw_maps(run, report, maps)
    draw_curves(run, curves)
    write_json(numbers, report)
    write_text(text, to_html(report, table, maps, curves))
    printed = rich_table.Table(*COLUMNS, title=f"dinomamba demo, seed {report['seed']}")
    for cells in table.cells():
        printed.add_row(*cells)
    console = Console(width=100)
    console.print(printed)
    console.print(
        f"shuffled maps: {report['shuffled_auc']:.3f} (normalised per image: {report['shuffled_auc_normalized']:.3f})"
    )
    console.print(f"a map of the distance to the centre: {report['position_auc']:.3f}")
    console.print(f"report:        {text}", soft_wrap=True)
    console.print(f"TensorBoard:   .venv/bin/tensorboard --logdir {run}", soft_wrap=True)
    return paths


@renderer("demo")
def draw(target: Target, runs: Path) -> list[Path]:
    """RUNS/report.json, report.html, maps.png and curves.png."""
    return main(runs)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m analysis.report RUN")
    try:
        main(Path(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"error: {error}")
