"""Linear probing: the heads of Table 5 trained together on one backbone pass, against each head trained alone.

One training step of LinearProbe (forward, losses, backward, SGD) on the same 16 images of 224 px and 1,000 classes;
alone is the sum over the heads, each with its own backbone pass, as the reference's script runs once for each setting.
"""

from functools import partial
from itertools import product

import torch
from common import report, seconds

from backbones import VisionMamba
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


def timed(
    backbone: VisionMamba, specs: list[HeadSpec], images: torch.Tensor, labels: torch.Tensor, repeats: int
) -> tuple[float, float, int]:
    """Seconds, spread, and the images that went through the backbone in a step."""
    probe = LinearProbe(backbone, specs).train()
    optimizer = torch.optim.SGD(probe.heads.parameters(), lr=0.1, momentum=0.9)
    once = partial(step, probe, optimizer, images, labels)
    once()
    before = probe.images_encoded
    once()
    encoded = probe.images_encoded - before
    return *seconds(once, repeats), encoded


def main() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    images, labels = torch.randn(BATCH, 3, 224, 224), torch.randint(1000, (BATCH,))
    rows = []
    for name, width in {"Vim-T": 256, "Vim-S": 512}.items():
        backbone = VisionMamba(embed_dim=width)
        together, spread, encoded = timed(backbone, SPECS, images, labels, 3)
        # the heads differ in cost by the blocks they read only: one of each, times nine
        alone = [timed(backbone, [HeadSpec(n)], images, labels, 3) for n in (1, 2, 4, 8)]
        total = 9 * sum(t for t, _, _ in alone)
        passes = 9 * sum(e for _, _, e in alone) / BATCH
        rows.append(
            [
                name,
                f"{together:.2f} ± {spread:.2f}",
                f"{total:.1f} ± {9 * sum(s for _, s, _ in alone):.1f}",
                f"{total / together:.1f}",
                f"{encoded / BATCH:g} against {passes:g}",
            ]
        )
    header = [
        "backbone", f"{len(SPECS)} heads together, s a step", "each alone, sum, s", "ratio", "backbone passes an image",
    ]  # fmt: skip
    report("probe_heads", header, rows)


if __name__ == "__main__":
    main()
