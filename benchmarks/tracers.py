"""What tracers and PyTorch's FLOP counter see of every family, beside eager: into benchmarks/results/tracers.md.

The families' real widths at 224 pixels, one block each (``--depth 24`` for whole models). Errors are the largest
difference from eager of the embedding over batches of 1 and 5, and of another height and width where the size is free.
"""

import argparse
import copy
import io
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from measuring import RESULTS, machine
from torch import Tensor
from torch.export import Dim
from torch.utils.flop_counter import FlopCounterMode

from backbones import Backbone, TimmModel, VisionTransformer
from backbones.export import OPSET, Outputs, to_onnx

NAMES = {
    "VisionMamba": "vim_small_patch16_224", "MambaReg": "mambar_small_patch16_224",
    "VimMamba1": "vim_small_mamba1_patch16_224", "MambaRegMamba1": "mambar_small_mamba1_patch16_224",
    "LinearVisionTransformer": "linear_vit_small_patch16_224",
}  # fmt: skip


def models(depth: int) -> dict[str, Callable[[], Backbone]]:
    ours = {family: lambda name=name: timm.create_model(name, depth=depth) for family, name in NAMES.items()}
    return {
        **ours,
        "VisionTransformer": lambda: VisionTransformer(depth=depth),
        "VisionTransformer, registers": lambda: VisionTransformer(depth=depth, num_registers=4),
        "TimmModel, test_vit": lambda: TimmModel("test_vit"),
    }


def by_onnx(model: Backbone, free: bool, exporter: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return to_onnx(Outputs(model), Path(folder) / "m.onnx", free_size=free, exporter=exporter)["embedding"]


def worst(function: Callable[[Tensor], Tensor], model: Backbone, side: int, free: bool) -> float:
    sizes = [(side, side), (side + 16, side + 32)] if free else [(side, side)]
    batches = [torch.randn(b, 3, *size) for size in sizes for b in (1, 5)]
    with torch.no_grad():
        return max(float((function(x) - model(x)).abs().max()) for x in batches)


def by_jit(model: Backbone, side: int, free: bool) -> float:
    buffer = io.BytesIO()
    with torch.no_grad():
        torch.jit.save(torch.jit.trace(model, torch.randn(2, 3, side, side), check_trace=False), buffer)
    buffer.seek(0)
    return worst(torch.jit.load(buffer), model, side, free)


def by_export(model: Backbone, side: int, free: bool) -> float:
    dims = {0: Dim("batch")} | ({2: 16 * Dim("h", min=2), 3: 16 * Dim("w", min=2)} if free else {})
    program = torch.export.export(model, (torch.randn(2, 3, side, side),), dynamic_shapes=(dims,))
    return worst(program.module(), model, side, free)


def flops(model: Backbone, side: int) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randn(1, 3, side, side))
    return counter.get_total_flops()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--dynamo-free", action="store_true", help="a free size through the dynamo exporter, slow")
    args = parser.parse_args()
    depth = args.depth
    warnings.simplefilter("ignore")
    lines = [
        "| family | ONNX, TorchScript exporter | ONNX, dynamo exporter | torch.jit.trace, saved | torch.export | "
        "free height and width | MFLOP an image |", "| --- " * 7 + "|",
    ]  # fmt: skip
    for family, build in models(depth).items():
        torch.manual_seed(0)
        model = build().eval()
        free, side = not isinstance(model, TimmModel), 160 if isinstance(model, TimmModel) else 224
        start = time.time()
        cells = [f"{by_onnx(model, free, 'torchscript'):.1g} ({time.time() - start:.0f} s)"]
        start = time.time()
        cells += [
            f"{by_onnx(copy.deepcopy(model), free and args.dynamo_free, 'dynamo'):.1g} ({time.time() - start:.0f} s)"
        ]
        cells += [f"{by_jit(model, side, free):.1g}", f"{by_export(model, side, free):.1g}"]
        lines += [f"| {family} | {' | '.join(cells)} | {'yes' if free else 'no'} | {flops(model, side) / 1e6:,.0f} |"]
        print(lines[-1], flush=True)
    size = "batch and size" if args.dynamo_free else "batch"
    text = (
        f"{machine()}; blocks: {depth}; opset {OPSET}; batches of 1 and 5; free {size} through the dynamo exporter; "
        "seconds include the comparison.\n\n"
    )
    (RESULTS / "tracers.md").write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
