"""Cost against tokens, batch and depth, measured on this CPU; against the number of GPUs, reckoned.

The second part is arithmetic, not a measurement: operations, bytes and steps of a DINO run on ImageNet for 1 to 512
GPUs, from the sizes of model and data, our own measured milliseconds of a core for an image, and the rates said below.
``docs/scaling.md`` reads both.
"""

import statistics
from functools import partial
from typing import NamedTuple

import torch
from measuring import in_turns, report
from torch import Tensor, nn

from backbones import LinearVisionTransformer, VisionMamba, VisionTransformer
from common.memory import keep_freed_memory

DIM, DEPTH, SIDES = 256, 2, (14, 28, 56, 128)
FAMILIES = {
    "Vim": partial(VisionMamba, embed_dim=DIM),
    "linear ViT": partial(LinearVisionTransformer, embed_dim=DIM, num_heads=4),
    "ViT": partial(VisionTransformer, embed_dim=DIM, num_heads=4),
}


def step(model: nn.Module, images: Tensor) -> None:
    model(images).sum().backward()


def seconds(points: dict[str, tuple[nn.Module, Tensor]], repeats: int) -> list[str]:
    times = in_turns({name: partial(step, *point) for name, point in points.items()}, repeats)
    return [f"{statistics.median(t) * 1e3:.4g}" for t in times.values()]


def measured() -> None:
    rows = []
    for side in SIDES:
        images = torch.randn(1, 3, 16 * side, 16 * side)
        points = {name: (make(img_size=16 * side, depth=DEPTH), images) for name, make in FAMILIES.items()}
        rows.append([f"{side * side} patches, 1 image, depth {DEPTH}", *seconds(points, 3 if side < 100 else 1)])
    for batch in (4, 16):
        points = {name: (make(depth=DEPTH), torch.randn(batch, 3, 224, 224)) for name, make in FAMILIES.items()}
        rows.append([f"196 patches, {batch} images, depth {DEPTH}", *seconds(points, 3)])
    for depth in (4, 8):
        points = {name: (make(depth=depth), torch.randn(1, 3, 224, 224)) for name, make in FAMILIES.items()}
        rows.append([f"196 patches, 1 image, depth {depth}", *seconds(points, 3)])
    header = ["forward and backward", *(f"{name}, ms" for name in FAMILIES)]
    report("scaling", header, rows, f"Width {DIM}, float32.")


class Machine(NamedTuple):
    """What is assumed of a cluster; none of it was measured by us."""

    flops: float = 300e12
    """A GPU's bfloat16 operations a second, as achieved over a step: 40 % of what a large product reaches."""
    link: float = 50e9
    """Bytes a second between nodes, for each GPU: a 400 Gbit/s card each."""
    memory: float = 3e12
    """Bytes a second of a GPU's own memory."""
    cores: int = 12
    """For each GPU."""
    image_ms: float = 3.0
    """Of a core, JPEG to ten crops: 2.5 to 3.4 in runs of benchmarks/input_pipeline.py."""


class Run(NamedTuple):
    """DINO with ten crops on ImageNet."""

    name: str
    dim: int
    depth: int
    images: int = 1_281_167
    global_batch: int = 1024
    out_dim: int = 65_536
    image_bytes: float = 110e3

    @property
    def parameters(self) -> tuple[int, int]:
        """Of the backbone's blocks and of the head."""
        width = 4 * self.dim + 2 * 64 + self.dim // 32  # z and x, B and C, dt
        block = self.dim * width + 2 * self.dim * self.dim
        head = self.dim * 2048 + 2048 * 2048 + 2048 * 256 + 256 * self.out_dim
        return self.depth * block, head

    @property
    def flops(self) -> tuple[float, float]:
        """Of an image's step in backbone and head: student forward and backward (three forwards), teacher forward."""
        blocks, head = self.parameters
        scan = 2 * 2 * (2 * self.dim) * (64 + 64 + 64)  # both directions, blocks of 64 tokens, with the state
        token = 2 * blocks + self.depth * scan
        students, teachers = 2 * 198 + 8 * 37, 2 * 198
        return token * (3 * students + teachers), 2 * head * (3 * 10 + 2)


def reckoned(run: Run, machine: Machine) -> list[list[str]]:
    rows = []
    backbone, head = run.flops
    gradient = 4 * sum(run.parameters)
    # AdamW reads and writes weight and two moments and reads the gradient, the EMA reads two and writes one; then
    # clipping reads the gradient twice and writes it once, and weight norm reads and writes the prototypes
    update = (13 * gradient + 4 * 4 * 256 * run.out_dim) / machine.memory * 1e3
    for gpus in (1, 8, 16, 32, 64, 128, 256, 512):
        batch = run.global_batch / gpus
        compute = batch * (backbone + head) / machine.flops * 1e3
        exchange = 0.0 if gpus == 1 else 2 * (gpus - 1) / gpus * gradient / machine.link * 1e3
        loading = batch * machine.image_ms / machine.cores
        # gradients are exchanged while the backward pass, half of the operations, goes on
        step = max(compute + max(0.0, exchange - compute / 2) + update, loading)
        limit = "loading" if loading >= step else "all-reduce" if exchange > compute / 2 else "arithmetic"
        rows.append([
            str(gpus), f"{batch:g}", f"{compute:.1f}", f"{exchange:.1f}", f"{update:.1f}",
            f"{loading:.1f}", f"{step:.1f}", limit,
            f"{run.images * run.image_bytes / gpus / 1e9:.3g}", f"{run.images // run.global_batch * step / 3.6e6:.3f}",
        ])  # fmt: skip
    return rows


def main() -> None:
    keep_freed_memory()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    measured()
    machine = Machine()
    print(f"reckoned with {machine}")
    header = ["GPUs", "images a GPU", "arithmetic, ms", "all-reduce, ms", "update, ms", "loading, ms", "step, ms",
              "limit", "GB read by a rank an epoch", "hours an epoch"]  # fmt: skip
    runs = Run("Vim-T", 256, 24), Run("Vim-S", 512, 24), Run("Vim-B", 768, 24)
    for run in runs:
        blocks, head = run.parameters
        backbone, of_head = run.flops
        print(f"\n{run.name}: {blocks / 1e6:.0f} M parameters in blocks, {head / 1e6:.0f} M in the head; "
              f"{backbone / 1e9:.0f} GFLOP an image in the backbone, {of_head / 1e9:.1f} in the head\n")  # fmt: skip
        print("| " + " | ".join(header) + " |\n|" + " --- |" * len(header))
        print("\n".join("| " + " | ".join(row) + " |" for row in reckoned(run, machine)))
    columns = ["model", "images/s of a GPU", "cores that feed it", "images a GPU below which all-reduce shows",
               "head's share of operations", "head's share of gradients"]  # fmt: skip
    print("\n| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for run in runs:
        backbone, head = run.flops
        rate = machine.flops / (backbone + head)
        fewest = 2 * 2 * 4 * sum(run.parameters) / machine.link * rate
        shares = f"{head / (backbone + head):.1%} | {run.parameters[1] / sum(run.parameters):.0%}"
        print(f"| {run.name} | {rate:.0f} | {rate * machine.image_ms / 1e3:.1f} | {fewest:.0f} | {shares} |")


if __name__ == "__main__":
    main()
