"""The demo's report: ``python -m analysis.report RUN`` joins a pretraining run and its evaluations.

Reads RUN/pretrain and RUN/{untrained,pretrained}-{probe,knn,auc}; writes RUN/report.json, maps.png, curves.png and a
self-contained report.html, and prints one table.
"""

import html
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.table import Table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from analysis.pages import picture
from common.files import write_text

MODELS = ("untrained", "pretrained")
TASKS = ("probe", "knn", "auc")
METRICS = {
    "linear_top1": "linear probe, top-1",
    "knn_top1": "k-NN, top-1",
    "auc_of_mean_normalized": "Binary-AUC, max(m, 1−m) of the mean m",
    "auc": "Binary-AUC, mean over images",
    "auc_normalized": "Binary-AUC, mean of max(AUC, 1−AUC)",
}


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} is missing: run make demo, which makes it")
    return json.loads(path.read_text())


def _map_row(run: Path, model: str, name: str) -> dict[str, Any]:
    """The row of a map in the last block that has it; rows run from the first block to the last."""
    rows = _read(run / f"{model}-auc" / "results.json")["rows"]
    return next(row for row in reversed(rows) if row["map"].endswith(name))


def collect(run: Path) -> dict[str, Any]:
    """The figures of report.json."""
    report: dict[str, Any] = {}
    for model in MODELS:
        similarity = _map_row(run, model, "/similarity")
        heads = _read(run / f"{model}-probe" / "results.json")["rows"]
        report[model] = {
            "linear_top1": 100 * max(row["top1_last"] for row in heads),
            "knn_top1": 100 * _read(run / f"{model}-knn" / "results.json")["rows"][0]["top1"],
            **{k: similarity[k] for k in ("auc", "auc_normalized", "auc_of_mean_normalized")},
        }
    shuffled = _map_row(run, "pretrained", "shuffled")
    record = _read(run / "pretrain" / "run.json")
    folders = [run / "pretrain", *(run / f"{model}-{task}" for model in MODELS for task in TASKS)]
    stages = [_read(folder / "run.json") for folder in folders]
    speed = scalars(run / "pretrain").get("perf/images_per_second", [])
    report |= {
        "shuffled_auc": shuffled["auc"],
        "shuffled_auc_normalized": shuffled["auc_normalized"],
        "seed": _seed(run / "pretrain" / "config.yaml"),
        "wall_seconds": round(_covered([_span(stage) for stage in stages if "seconds" in stage]), 1),
        "pretrain_seconds": record.get("seconds"),
        "images_per_second": round(float(np.mean([v for _, v in speed])), 1) if speed else None,
        "images": int(_map_row(run, "pretrained", "/similarity")["images"]),
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
    for line in config.read_text().splitlines():
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
    data = {model: np.load(run / f"{model}-auc" / "feature_maps.npz") for model in MODELS}
    images, masks = data["pretrained"]["images"], data["pretrained"]["masks"]
    titles = ["image", "mask", "untrained map", "pretrained map", "over the image"]
    fig, axes = plt.subplots(len(images), len(titles), figsize=(1.55 * len(titles), 1.5 * len(images)), squeeze=False)
    for row, (image, mask) in enumerate(zip(images, masks, strict=True)):
        signed = {m: data[m]["maps"][row] * (1 if report[m]["auc"] >= 0.5 else -1) for m in MODELS}
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
    fig.savefig(path, dpi=110)
    plt.close(fig)


def draw_curves(run: Path, path: Path) -> None:
    """Loss with its two parts, and the k-NN score, over the pretraining."""
    values = scalars(run / "pretrain")
    fig, (upper, lower) = plt.subplots(2, 1, figsize=(6, 5.6))
    for tag, label, style in (
        ("train/loss", "loss", "-"), ("train/teacher_entropy", "teacher entropy", "--"), ("train/kl", "KL(teacher ‖ student)", ":"),
    ):  # fmt: skip
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
    fig.savefig(path, dpi=110)
    plt.close(fig)


def table_rows(report: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Metric, untrained, pretrained, difference."""
    rows = []
    for key, label in METRICS.items():
        before, after = report["untrained"][key], report["pretrained"][key]
        form = "{:.1f} %" if key.endswith("top1") else "{:.3f}"
        sign = "{:+.1f}" if key.endswith("top1") else "{:+.3f}"
        rows.append((label, form.format(before), form.format(after), sign.format(after - before)))
    return rows


def to_html(report: dict[str, Any], maps: Path, curves: Path) -> str:
    """A page that needs no other file."""

    body = "".join(
        f"<tr><th scope=row>{html.escape(label)}</th><td>{before}</td><td>{after}</td><td>{change}</td></tr>"
        for label, before, after, change in table_rows(report)
    )
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    flipped = [m for m in MODELS if report[m]["auc"] < 0.5]
    sign = f" Shown negated, as its mean AUC is below 0.5: {', '.join(flipped)}." if flipped else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>dinomamba demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 60rem; margin: 0 auto; padding: 1rem; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.2rem; margin-top: 2rem; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .35rem .5rem; border-bottom: 1px solid #ddd; text-align: right; }}
th[scope=row], thead th:first-child {{ text-align: left; font-weight: 400; }}
.scroll {{ overflow-x: auto; }}
@media (max-width: 480px) {{ table {{ font-size: .75rem; }} th, td {{ padding: .3rem .15rem; }} }}
img {{ max-width: 100%; height: auto; }} p.note {{ color: #555; font-size: .9rem; overflow-wrap: anywhere; }}
</style></head><body>
<h1>dinomamba demo: before and after DINO pretraining</h1>
<p>A small Vim (bidirectional Mamba-2) was pretrained with DINO on the embedded scenes, without labels, for
{report["pretrain_seconds"]:.0f} seconds on this machine. Both columns are the same network with the same seed
({report["seed"]}); the first is its random initialisation. The scores are over {report["images"]} validation images.</p>
<div class="scroll"><table><thead><tr><th>metric</th><th>untrained</th><th>pretrained</th><th>change</th></tr></thead><tbody>{body}</tbody></table></div>
<p class="note">Binary-AUC scores the cosine of the class feature with each patch's, last block, against the object's
mask. The same maps with their pixels shuffled score {report["shuffled_auc"]:.3f} in the mean, but
{report["shuffled_auc_normalized"]:.3f} in the mean of max(AUC, 1−AUC): read that form beside this number. The sign of a
similarity map is free: below 0.5 the object is the part less like the class feature.</p>
<h2>Similarity maps</h2>
{picture(maps, "rows of image, mask, untrained and pretrained similarity map, and overlay")}
<p class="note">Yellow is high, violet low, each map stretched to its own range.{sign}</p>
<h2>Pretraining</h2>
{picture(curves, "loss, teacher entropy and KL above; k-NN accuracy below")}
<p class="note">{report["images_per_second"]} images per second in pretraining; all stages together took {report["wall_seconds"]} s.
Revision {html.escape(report["revision"])}; {html.escape(versions)}.</p>
</body></html>
"""


def main(run: Path) -> None:
    """Writes the report of one demo run."""
    report = collect(run)
    maps, curves = run / "maps.png", run / "curves.png"
    draw_maps(run, report, maps)
    draw_curves(run, curves)
    for path, text in (
        (run / "report.json", json.dumps(report, indent=1)),
        (run / "report.html", to_html(report, maps, curves)),
    ):
        write_text(path, text)
    table = Table("metric", "untrained", "pretrained", "difference", title=f"dinomamba demo, seed {report['seed']}")
    for row in table_rows(report):
        table.add_row(*row)
    console = Console(width=100)
    console.print(table)
    console.print(
        f"shuffled maps: {report['shuffled_auc']:.3f} (normalised per image: {report['shuffled_auc_normalized']:.3f})"
    )
    console.print(f"report:        {run / 'report.html'}", soft_wrap=True)
    console.print(f"TensorBoard:   .venv/bin/tensorboard --logdir {run}", soft_wrap=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m analysis.report RUN")
    try:
        main(Path(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"error: {error}")
