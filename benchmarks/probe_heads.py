"""Linear probing: the heads of Table 5 trained together on one backbone pass, against each head trained alone.

One training step of LinearProbe (forward, losses, backward, SGD) on the same 16 images of 224 px and 1,000 classes;
alone is the sum over the heads, each with its own backbone pass, as the reference's script runs once for each setting.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from common import Line, compare, in_turns

from backbones import VisionMamba
from cli import keep_freed_memory
from lightning_modules import HeadSpec, LinearProbe

SPECS = [
    HeadSpec(n, "cls", lr, wd) for n, wd, lr in product((1, 2, 4, 8), (0.0, 1e-3, 1e-2), (5e-4, 1e-3, 2e-3))
]  # configs/paper/imagenet/table5.yaml
BATCH = 16


def step(probe: LinearProbe, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor) -> None:
    losses = [torch.nn.functional.cross_entropy(y, labels) for y in probe.logits(images)]
    optimizer.zero_grad()
    torch.stack(losses).sum().backward()
    optimizer.step()


def training(backbone: VisionMamba, specs: list[HeadSpec], images: torch.Tensor, labels: torch.Tensor) -> Callable:
    """One step of these heads."""
    probe = LinearProbe(backbone, specs).train()
    optimizer = torch.optim.SGD(probe.heads.parameters(), lr=0.1, momentum=0.9)
    return partial(step, probe, optimizer, images, labels)


def main() -> None:
    keep_freed_memory()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    images, labels = torch.randn(BATCH, 3, 224, 224), torch.randint(1000, (BATCH,))
    backbone = VisionMamba(embed_dim=256)
    # the heads differ in cost by the blocks they read only: one of each, times nine
    contenders = {"together": training(backbone, SPECS, images, labels)}
    contenders |= {f"last {n}": training(backbone, [HeadSpec(n)], images, labels) for n in (1, 2, 4, 8)}
    times = in_turns(contenders, 3)
    alone = [9 * sum(parts) for parts in zip(*(t for who, t in times.items() if who != "together"), strict=True)]
    what = f"Vim-T, a step of {len(SPECS)} probe heads, {BATCH} images"
    compare("probe_heads", [Line(what, times["together"], "each head alone, as the reference trains them", alone)])


if __name__ == "__main__":
    main()
