"""The depthwise causal convolution on the CPU, forward and backward: shifted multiply-adds against torch's conv1d."""

from collections.abc import Callable
from functools import partial

import torch
from common import report, seconds
from torch import Tensor

from backbones.ops import causal_conv, causal_conv_reference

SHAPES = {"Vim-T, 198 tokens": (8, 198, 640), "Vim-S, 198 tokens": (8, 198, 1152), "Vim-B, 37 tokens": (32, 37, 1664)}


def step(function: Callable[..., Tensor], *arguments: Tensor) -> None:
    function(*arguments).sum().backward()


def main() -> None:
    torch.set_num_threads(2)
    rows = []
    for name, (b, length, d) in SHAPES.items():
        x = torch.randn(b, length, d, requires_grad=True)
        weight, bias = torch.randn(d, 4, requires_grad=True), torch.randn(d, requires_grad=True)
        times = []
        for function in (causal_conv, causal_conv_reference):
            times.append(seconds(partial(step, function, x, weight, bias), 7))
        (ours, spread), (theirs, their_spread) = times
        rows.append(
            [
                name,
                f"{ours * 1e3:.1f} ± {spread * 1e3:.1f}",
                f"{theirs * 1e3:.1f} ± {their_spread * 1e3:.1f}",
                f"{theirs / ours:.1f}",
            ]
        )
    report("causal_conv", ["shape", "shifted, ms", "conv1d with transposes, ms", "ratio"], rows)


if __name__ == "__main__":
    main()
