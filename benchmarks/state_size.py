"""A DINO step and a forward pass of the demo's Vim against the size N of its state: time, and memory at its peak.

The models are the demo's overlay with other states, the step is the demo's task (its crops, head, loss and batch, as
Lightning runs it); all take turns, so that a slow moment of the machine meets them all. Memory is of a process of its
own for each N. ``--out FILE`` writes the numbers as JSON too, as ``make states`` does for its page.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Trainer
from measuring import Times, machine, report

import backbones
import configs
from common.files import write_json
from common.memory import keep_freed_memory
from lightning_modules import DINO

STATES, ROUNDS, STEPS, MODEL = (16, 32, 64, 128, 256), 5, 3, "vim_demo"


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load(configs.find(f"{name}.yaml").read_text(encoding="utf-8"))


def backbone(n: int) -> backbones.Backbone:
    """The demo's model with a state of n."""
    entry = read(f"backbone/{MODEL}")["model"]["init_args"]["backbone"]
    torch.manual_seed(0)
    return getattr(backbones, entry["class_path"].rpartition(".")[2])(**entry["init_args"] | {"d_state": n})


def crops() -> tuple[int, list[torch.Tensor]]:
    """The demo's batch size and one batch of noise in the shape of its crops."""
    data = read("task/dino_demo")["data"]["init_args"]
    views, g = data["multicrop"], torch.Generator().manual_seed(0)
    sides = [views["global_size"]] * 2 + [views["local_size"]] * views["num_local"]
    return data["batch_size"], [torch.randn(data["batch_size"], 3, s, s, generator=g) for s in sides]


def method(n: int, batch: int) -> DINO:
    options = read("task/dino")["model"]["init_args"] | read("task/dino_demo")["model"]["init_args"]
    return DINO(backbone(n), **{"global_batch_size": batch} | options)


def step_seconds(n: int) -> float:
    """Of a training step; the first is left out."""
    batch, views = crops()
    times = Times()
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[times],
    )  # fmt: skip
    trainer.fit(method(n, batch), torch.utils.data.DataLoader([{"crops": views}] * (STEPS + 1), batch_size=None))
    return (times.marks[-1] - times.marks[1]) / STEPS


@torch.no_grad()
def forward_seconds(n: int) -> float:
    """Of the global crops of one view; the first is left out."""
    model, images = backbone(n).eval(), crops()[1][0]
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


def in_own_process(n: int) -> float:
    """MiB at the peak of a process that trains with a state of n."""
    done = subprocess.run([sys.executable, __file__, "--one", str(n)], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def measure() -> list[dict[str, Any]]:
    times: dict[str, dict[int, list[float]]] = {what: {n: [] for n in STATES} for what in ("step", "forward")}
    for _ in range(ROUNDS):
        for n in STATES:
            times["step"][n].append(step_seconds(n))
            times["forward"][n].append(forward_seconds(n))
    rows = []
    for n in STATES:
        row: dict[str, Any] = {"n": n, "parameters": sum(p.numel() for p in backbone(n).parameters())}
        for what, found in times.items():
            ratios = [a / b for a, b in zip(found[n], found[STATES[0]], strict=True)]
            row |= {f"{what}_seconds": statistics.median(found[n]), f"{what}_ratio": statistics.median(ratios)}
            row |= {f"{what}_ratio_least": min(ratios), f"{what}_ratio_most": max(ratios)}
        rows.append(row | {"peak_mib": in_own_process(n)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON with the same numbers")
    parser.add_argument("--one", type=int, help="train with this state alone, and tell the peak of memory in MiB")
    given = parser.parse_args()
    keep_freed_memory()
    if given.one:
        step_seconds(given.one)
        print(peak_mib())
        return
    rows = measure()
    header = [
        "N",
        "parameters",
        "DINO step",
        "of N = 16's (least to most)",
        "forward",
        "of N = 16's",
        "peak memory, MiB",
    ]
    cells = [
        [
            str(row["n"]), f"{row['parameters']:,}", f"{row['step_seconds'] * 1e3:.0f} ms",
            _ratio(row, "step"), f"{row['forward_seconds'] * 1e3:.1f} ms",
            _ratio(row, "forward"), f"{row['peak_mib']:.0f}",
        ]
        for row in rows
    ]  # fmt: skip
    batch = crops()[0]
    note = f"{MODEL}, {batch} images a step; medians of {ROUNDS} rounds in turns; memory of the whole training process."
    report("state_size", header, cells, note)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(given.out, {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "rows": rows})


def _ratio(row: dict[str, Any], what: str) -> str:
    least, most = row[f"{what}_ratio_least"], row[f"{what}_ratio_most"]
    return f"{row[f'{what}_ratio']:.2f} ({least:.2f} to {most:.2f})"


if __name__ == "__main__":
    main()
