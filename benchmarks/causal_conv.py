"""The depthwise causal convolution on the CPU, forward and backward: shifted multiply-adds against torch's conv1d."""

from collections.abc import Callable
from functools import partial

import torch
from measuring import Line, compare, in_turns
from torch import Tensor

from backbones.ops import causal_conv, causal_conv_reference
from common.memory import keep_freed_memory

SHAPES = {"Vim-T, 8 x 198 tokens": (8, 198, 640), "Vim-S": (8, 198, 1152), "Vim-B, 32 x 37 tokens": (32, 37, 1664)}


def step(function: Callable[..., Tensor], *arguments: Tensor) -> None:
    function(*arguments).sum().backward()


def main() -> None:
    keep_freed_memory()
    torch.set_num_threads(2)
    lines = []
    for name, (b, length, d) in SHAPES.items():
        x = torch.randn(b, length, d, requires_grad=True)
        weight, bias = torch.randn(d, 4, requires_grad=True), torch.randn(d, requires_grad=True)
        both = {"ours": causal_conv, "conv1d with transposes": causal_conv_reference}
        times = in_turns({who: partial(step, function, x, weight, bias) for who, function in both.items()}, 9)
        lines.append(Line(name, times["ours"], "conv1d with transposes", times["conv1d with transposes"], "> 1"))
    compare("causal_conv", lines)


if __name__ == "__main__":
    main()
