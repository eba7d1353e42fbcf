"""Softmax attention, linear attention and Mamba by the side of their images: time, and memory at its peak.

First a DINO step and a forward pass of the demo's models of equal size, 48 to 192 px; then a forward and backward pass
of one image through models of Base size, 224 to 1,024 px. ``--out FILE`` writes the first part as JSON too, as
``make sizes`` does for its page.
"""

import argparse
from functools import partial
from pathlib import Path
from statistics import median

import torch
from demo_cost import HEADER, Point, cells, keep, measure, note, peak_mib, peak_of, train_one
from measuring import in_turns, report
from torch import nn

from backbones import LinearVisionTransformer, VisionMamba, VisionTransformer
from common.memory import keep_freed_memory

MODELS = {"ViT": "vit_demo", "LinearViT": "linear_vit_demo", "Vim": "vim_demo"}
POINTS = [Point(model, series, side, {}, side) for series, model in MODELS.items() for side in (48, 96, 192)]
FAMILIES = {
    "ViT-B": partial(VisionTransformer, embed_dim=768, depth=12, num_heads=12),
    "LinearViT-B": partial(LinearVisionTransformer, embed_dim=768, depth=12, num_heads=12),
    "Vim-B": partial(VisionMamba, embed_dim=768, depth=24),
}
SIDES, ROUNDS = (224, 384, 512, 768, 1024), 3
LARGE = [(name, side) for side in SIDES for name in FAMILIES]


def model(number: int) -> tuple[nn.Module, torch.Tensor]:
    """One of LARGE, and an image."""
    name, side = LARGE[number]
    torch.manual_seed(0)
    return FAMILIES[name](img_size=side), torch.randn(1, 3, side, side)


def step(made: nn.Module, image: torch.Tensor) -> None:
    made.zero_grad(set_to_none=True)
    made(image).sum().backward()


def large() -> list[list[str]]:
    rows = []
    for side in SIDES:
        numbers = [number for number, (_, s) in enumerate(LARGE) if s == side]
        times = in_turns({LARGE[n][0]: partial(step, *model(n)) for n in numbers}, ROUNDS)
        softmax = times["ViT-B"]
        for n in numbers:
            name = LARGE[n][0]
            ratios = [a / b for a, b in zip(times[name], softmax, strict=True)]
            rows.append([
                str(side), f"{(side // 16) ** 2:,}", name, f"{median(times[name]):.3g} s",
                f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{peak_of(__file__, len(POINTS) + n):.0f}",
            ])  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON with the numbers of the first part")
    parser.add_argument("--one", type=int, help="run the point of this number alone, and tell the peak of memory")
    given = parser.parse_args()
    if given.one is not None and given.one >= len(POINTS):
        keep_freed_memory()
        step(*model(given.one - len(POINTS)))
        print(peak_mib())
        return
    if given.one is not None:
        train_one(POINTS[given.one])
        return
    rows = measure(POINTS, __file__)
    header = ["model", "side of a crop", *HEADER]
    report("image_sizes_demo", header, [[row["series"], str(row["x"]), *cells(row)] for row in rows], note())
    if given.out:
        keep(given.out, rows)
    header = ["side", "patches", "model", "forward and backward", "of ViT-B's (least to most)", "peak memory, MiB"]
    text = f"One image, float32; medians of {ROUNDS} rounds in turns; memory of a whole process, parameters included."
    report("image_sizes", header, large(), text)


if __name__ == "__main__":
    main()
