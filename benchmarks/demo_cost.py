"""What a DINO step and a forward pass of the demo's models cost, for sweeps: time, and memory at its peak.

A model is the demo's overlay with other arguments or sides of its crops; the step is the demo's task (its crops, head,
loss and batch, as Lightning runs it).
"""

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from lightning.pytorch import Trainer
from measuring import Times, machine

import backbones
import configs
from common.files import write_json
from common.memory import keep_freed_memory
from lightning_modules import DINO

ROUNDS, STEPS, SIDE = 5, 3, 48


class Point(NamedTuple):
    """A model of a sweep: what is swept over is ``x``, and ratios are to the first point of the same ``series``."""

    model: str
    """An overlay in configs/backbone."""
    series: str
    x: int
    changes: dict[str, Any]
    """Arguments of the backbone in place of the overlay's."""
    side: int = SIDE
    """Of the global crops; local ones have half of it."""


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load(configs.find(f"{name}.yaml").read_text(encoding="utf-8"))


def backbone(point: Point) -> backbones.Backbone:
    entry = read(f"backbone/{point.model}")["model"]["init_args"]["backbone"]
    torch.manual_seed(0)
    options = entry["init_args"] | {"img_size": point.side} | point.changes
    return getattr(backbones, entry["class_path"].rpartition(".")[2])(**options)


def batch_size() -> int:
    return read("task/dino_demo")["data"]["init_args"]["batch_size"]


def crops(side: int) -> list[torch.Tensor]:
    """A batch of noise in the shape of the demo's crops."""
    views, g = read("task/dino_demo")["data"]["init_args"]["multicrop"], torch.Generator().manual_seed(0)
    sides = [side] * 2 + [side // 2] * views["num_local"]
    return [torch.randn(batch_size(), 3, s, s, generator=g) for s in sides]


def step_seconds(point: Point) -> float:
    """Of a training step; the first is left out."""
    options = read("task/dino")["model"]["init_args"] | read("task/dino_demo")["model"]["init_args"]
    method, times = DINO(backbone(point), **{"global_batch_size": batch_size()} | options), Times()
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[times],
    )  # fmt: skip
    batches = [{"crops": crops(point.side)}] * (STEPS + 1)
    trainer.fit(method, torch.utils.data.DataLoader(batches, batch_size=None))
    return (times.marks[-1] - times.marks[1]) / STEPS


@torch.no_grad()
def forward_seconds(point: Point) -> float:
    """Of the global crops of one view; the first is left out."""
    model, images = backbone(point).eval(), crops(point.side)[0]
    model(images)
    start = time.perf_counter()
    for _ in range(STEPS):
        model(images)
    return (time.perf_counter() - start) / STEPS


def peak_mib() -> float:
    """Of this process since it began. A child's ru_maxrss starts with what its parent had, where VmHWM does not."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text(encoding="utf-8").partition("VmHWM:")[2].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (20 if sys.platform == "darwin" else 10)


def peak_of(script: str, number: int) -> float:
    """MiB at the peak of a process of its own: the script with ``--one NUMBER``, which prints it last."""
    done = subprocess.run([sys.executable, script, "--one", str(number)], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def train_one(point: Point) -> None:
    """What ``--one`` does: trains, and prints the peak."""
    keep_freed_memory()
    step_seconds(point)
    print(peak_mib())


def measure(points: Sequence[Point], script: str) -> list[dict[str, Any]]:
    """A row a point. All take turns, so that a slow moment of the machine meets them all."""
    keep_freed_memory()
    times: dict[str, list[list[float]]] = {what: [[] for _ in points] for what in ("step", "forward")}
    for _ in range(ROUNDS):
        for number, point in enumerate(points):
            times["step"][number].append(step_seconds(point))
            times["forward"][number].append(forward_seconds(point))
    rows = []
    for number, point in enumerate(points):
        parameters = sum(p.numel() for p in backbone(point).parameters())
        row: dict[str, Any] = {"series": point.series, "x": point.x, "parameters": parameters}
        first = next(i for i, other in enumerate(points) if other.series == point.series)
        for what, found in times.items():
            ratios = [a / b for a, b in zip(found[number], found[first], strict=True)]
            row |= {f"{what}_seconds": statistics.median(found[number]), f"{what}_ratio": statistics.median(ratios)}
            row |= {f"{what}_ratio_least": min(ratios), f"{what}_ratio_most": max(ratios)}
        rows.append(row | {"peak_mib": peak_of(script, number)})
    return rows


HEADER = ["parameters", "DINO step", "of the first's (least to most)", "forward", "of the first's", "peak memory, MiB"]


def cells(row: dict[str, Any]) -> list[str]:
    """A row of :func:`measure` under HEADER."""
    return [
        f"{row['parameters']:,}", f"{row['step_seconds'] * 1e3:.0f} ms", _ratio(row, "step"),
        f"{row['forward_seconds'] * 1e3:.1f} ms", _ratio(row, "forward"), f"{row['peak_mib']:.0f}",
    ]  # fmt: skip


def note() -> str:
    """How it was measured."""
    return f"{batch_size()} images a step; medians of {ROUNDS} rounds in turns; memory of the whole training process."


def keep(path: Path, rows: list[dict[str, Any]]) -> None:
    """The numbers as JSON, as a sweep's page reads them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "rows": rows})


def _ratio(row: dict[str, Any], what: str) -> str:
    least, most = row[f"{what}_ratio_least"], row[f"{what}_ratio_most"]
    return f"{row[f'{what}_ratio']:.2f} ({least:.2f} to {most:.2f})"
