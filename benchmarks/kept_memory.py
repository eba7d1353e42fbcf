"""What one DINO step on CUDA keeps for its backward pass, by backbone and backend; fake tensors tell, without a GPU.

    python benchmarks/kept_memory.py

Base size, bf16-mixed, 64 images of two crops of 224 and eight of 96. mamba-ssm's scan stands for itself by a function
that keeps what it keeps. The ratios are to ViT-B in the same run.
"""

import importlib
import sys
import types
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from backbones import Backbone, MambaReg, VisionMamba, VisionTransformer
from lightning_modules import DINO

BASE: dict[str, Callable[[], Backbone]] = {
    "ViT-B": lambda: VisionTransformer(embed_dim=768, depth=12, num_heads=12),
    "Vim-B auto": lambda: VisionMamba(embed_dim=768, depth=24, backend="auto"),
    "Vim-B torch": lambda: VisionMamba(embed_dim=768, depth=24, backend="torch"),
    "Mamba-Reg-B auto": lambda: MambaReg(embed_dim=768, depth=24, backend="auto"),
    "Mamba-Reg-B torch": lambda: MambaReg(embed_dim=768, depth=24, backend="torch"),
}


class KeepsAsMambaSSM(torch.autograd.Function):
    """Shapes and kept tensors of mamba_chunk_scan_combined."""

    @staticmethod
    def forward(ctx, x, dt, A, B, C, chunk, D):  # type: ignore[override]
        batch, length, heads, _ = x.shape
        out = torch.empty_like(x)
        cumulative = x.new_empty(batch, heads, -(-length // chunk), chunk, dtype=torch.float32)
        ctx.save_for_backward(out, x, dt, cumulative, A, B, C, D)
        return out

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        _, x, dt, _, A, B, C, D = ctx.saved_tensors
        return x, dt, A, B, C, None, D


def mamba_ssm(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor) -> Tensor:
    return KeepsAsMambaSSM.apply(x, dt, A, B, C, chunk_size, D)


@contextmanager
def fake_cuda():
    """Tensors on ``cuda`` without memory or a device behind them, under bf16 autocast."""
    ssd = importlib.import_module("backbones.ops.ssd")
    common = torch.cuda.amp.common
    with (
        mock.patch.object(common, "amp_definitely_not_available", lambda: False),
        mock.patch.object(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True),
        mock.patch.object(ssd, "_mamba_ssm_kernel", lambda: mamba_ssm),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autocast("cuda", torch.bfloat16, cache_enabled=False),
    ):
        yield


def kept(
    make: Callable[[], Backbone], images: int, sides: list[int], backward: bool = False
) -> tuple[int, Counter[str]]:
    """Bytes kept for the backward pass of a step, without parameters and images, all and by the code that made them."""
    found: Counter[str] = Counter()
    alive: dict[int, Tensor] = {}  # by storage, held so that no number is used again
    with fake_cuda():
        with torch.device("cuda"):
            module = DINO(make(), global_batch_size=images)
            crops = [torch.empty(images, 3, side, side) for side in sides]
        trainer = types.SimpleNamespace(global_step=5, current_epoch=1, log_every_n_steps=10)
        counted = {p.untyped_storage()._cdata for p in module.parameters()} | {
            c.untyped_storage()._cdata for c in crops
        }

        def pack(tensor: Tensor) -> Tensor:
            key = tensor.untyped_storage()._cdata
            if key not in counted and key not in alive:
                alive[key] = tensor
                found[_place()] += tensor.untyped_storage().nbytes()
            return tensor

        with mock.patch.object(DINO, "trainer", trainer), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            module.training_loss({"crops": crops})
    return found.total(), found


def _place() -> str:
    """The line of ours that keeps a tensor."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if (
            any(f"/{room}/" in name for room in ("backbones", "heads", "lightning_modules"))
            and "site-packages" not in name
        ):
            return f"{Path(name).parent.name}/{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def main() -> None:
    sides, images = [224] * 2 + [96] * 8, 64
    peer = None
    for name, make in BASE.items():
        total, places = kept(make, images, sides)
        peer = peer or total
        print(f"{name:18} {total / 2**30:6.1f} GiB, {total / peer:.2f} x ViT-B")
        if "-v" in sys.argv:
            for place, size in places.most_common(12):
                print(f"    {size / 2**30:6.1f} GiB {place}")


if __name__ == "__main__":
    main()
