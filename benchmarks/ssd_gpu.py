"""The bidirectional Mamba-2 mixer and Vim-B's training on a GPU: correctness first, then times.

Peers: mamba-ssm's fused path as the reference's models call it (once along the tokens, once along their flipped copy;
left out where mamba-ssm is not installed), our plain PyTorch, and timm's ViT block of the same width, whose attention
is SDPA's flash kernel in bfloat16. ``--check`` stops after the comparison with float64; without a GPU it runs by
Triton's interpreter (TRITON_INTERPRET=1) at small sizes.

The floor of a time is the larger of two: the operations over the rate of a large matrix product, and the bytes that
cross kernels at the least (inputs, outputs, what is kept for the backward pass) over the rate of a large copy, both
measured here.
"""

import argparse
import gc
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measuring import report
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from backbones import VisionMamba
from backbones.mixers import BidirectionalMamba2
from backbones.ops import triton_ssd

CUDA = torch.cuda.is_available()
SIZES = {"Vim-T": 256, "Vim-S": 512, "Vim-B": 768}
SHAPES = ((128, 198), (512, 37), (8, 1025), (1, 16386))
"""64 images' global crops and their local ones, with CLS twice; 512 pixels; 2,048 pixels."""
IMAGES = 64


class MambaSSM(nn.Module):
    """The same mixer with the same weights by ``mamba_split_conv1d_scan_combined``."""

    def __init__(self, mixer: BidirectionalMamba2) -> None:
        super().__init__()
        from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined

        self.mixer, self.kernel = mixer, mamba_split_conv1d_scan_combined

    def forward(self, u: Tensor) -> Tensor:
        m = self.mixer
        zxBCdt = m.in_proj(u)
        both = []
        for end, dt_bias, t in (("", m.dt_bias, zxBCdt), ("_b", m.dt_b_bias, zxBCdt.flip(1))):
            conv, norm = getattr(m, f"conv1d{end}"), getattr(m, f"norm{end}")
            A, D = -getattr(m, f"A_log{end}").exp(), getattr(m, f"D{end}")
            both.append(
                self.kernel(
                    t, conv.weight.squeeze(1), conv.bias, dt_bias, A, D, chunk_size=256, activation="silu",
                    rmsnorm_weight=norm.weight, rmsnorm_eps=m.eps, headdim=m.headdim, ngroups=m.ngroups,
                    norm_before_gate=False,
                )
            )  # fmt: skip
        return m.out_proj((both[0] + both[1].flip(1)) / 2)


def step(module: nn.Module, u: Tensor, dy: Tensor | None = None) -> Tensor:
    """Forward and backward as training runs them."""
    with torch.autocast(u.device.type, torch.bfloat16, enabled=u.dtype == torch.bfloat16):
        y = module(u)
    y.backward(torch.ones_like(y) if dy is None else dy.to(y.dtype))
    return y.detach()


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def check() -> None:
    """Output and gradients of input and projections, against float64 by plain PyTorch."""
    device = "cuda" if CUDA else "cpu"
    dims, lengths = ((256, 768), (1, 37, 198, 1025)) if CUDA else ((32,), (1, 37, 70))
    for dim, length, (dtype, tolerance) in itertools.product(
        dims, lengths, ((torch.float32, 1e-4), (torch.bfloat16, 2e-2))
    ):
        torch.manual_seed(length)
        sizes: dict[str, Any] = {} if CUDA else {"headdim": 16, "d_state": 16}
        mixer = BidirectionalMamba2(dim, **sizes, backend="triton").to(device)
        exact = BidirectionalMamba2(dim, **sizes, backend="torch").to(device)
        exact.load_state_dict(mixer.state_dict())
        exact.double()
        u = torch.randn(2, length, dim, device=device, dtype=dtype, requires_grad=True)
        dy = torch.randn_like(u)
        wide = u.detach().double().requires_grad_()
        pairs = [("y", step(mixer, u, dy), step(exact, wide, dy.double())), ("u", u.grad, wide.grad)]
        pairs += [
            (name, p.grad, q.grad)
            for (name, p), q in zip(mixer.named_parameters(), exact.parameters(), strict=True)
            if name.endswith("proj.weight")
        ]
        found = {name: error(a, b) for name, a, b in pairs if a is not None and b is not None}
        print(f"D={dim}, {length} tokens, {dtype}:", ", ".join(f"{k} {v:.1e}" for k, v in found.items()), flush=True)
        if not all(v <= tolerance for v in found.values()):
            raise SystemExit(f"wrong: more than {tolerance}")


def times_ms(function: Callable[[], object], calls: int = 20) -> list[float]:
    for _ in range(5):
        function()
    times = []
    for _ in range(calls):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def ceilings() -> tuple[float, float]:
    """Operations and bytes in a second: a large bfloat16 product, a large copy (read and written)."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192**3 / statistics.median(times_ms(lambda: a @ b)) * 1e3
    big = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(big)
    copied = 2 * big.nbytes / statistics.median(times_ms(lambda: out.copy_(big))) * 1e3
    return rate, copied


def floor(mixer: BidirectionalMamba2, batch: int, length: int, rate: float, copied: float) -> tuple[float, str]:
    """Milliseconds of forward and backward, and what they are made of."""
    tokens, dim = batch * length, mixer.in_proj.in_features
    width, inner, n, p = mixer.in_proj.out_features, mixer.inner, mixer.d_state, mixer.headdim
    projections = 3 * 2 * tokens * dim * (width + inner)
    q = min(length, triton_ssd.FORWARD["BLOCK"])
    forward = q * (n + p) + (2 * n * p if length > q else 0)
    q = min(length, triton_ssd.BACKWARD["BLOCK"])
    backward = q * (4 * n + 3 * p) + (5 * n * p if length > q else 0)
    scans = 2 * 2 * tokens * mixer.heads * (2 * forward + backward)  # forward twice: once to have y again
    elements = tokens * (2 * dim + 2 * width + 2 * inner) + tokens * (2 * dim + 4 * inner + 4 * width)
    weights = 3 * dim * (width + inner)
    by_rate, by_bytes = (projections + scans) / rate * 1e3, 2 * (elements + weights) / copied * 1e3
    return max(by_rate, by_bytes), f"{(projections + scans) / 1e9:.3g} GFLOP, {2 * (elements + weights) / 1e6:.4g} MB"


def peers(dim: int) -> dict[str, nn.Module]:
    mixer = BidirectionalMamba2(dim, backend="triton").cuda()
    plain = BidirectionalMamba2(dim, backend="torch").cuda()
    plain.load_state_dict(mixer.state_dict())
    found: dict[str, nn.Module] = {"ours": mixer, "plain PyTorch": plain, "timm's ViT block": Block(dim, dim // 64)}
    try:
        found["mamba-ssm"] = MambaSSM(plain)
    except ImportError as missing:
        print(f"mamba-ssm is left out: {missing}", flush=True)
    return {name: module.cuda() for name, module in found.items()}


def mixers(rate: float, copied: float) -> None:
    rows = []
    for (name, dim), (batch, length) in itertools.product(SIZES.items(), SHAPES):
        modules = peers(dim)
        u = torch.randn(batch, length, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        times = {who: times_ms(partial(step, module, u)) for who, module in modules.items()}
        ours = times.pop("ours")
        least, parts = floor(modules["ours"], batch, length, rate, copied)  # type: ignore[arg-type]
        for who, theirs in times.items():
            ratio = f"{statistics.median(theirs) / statistics.median(ours):.2f}"
            spread = f"{min(theirs) / max(ours):.2f} to {max(theirs) / min(ours):.2f}"
            goal = "≥ 1.5" if who == "mamba-ssm" else ""
            row = [f"{name}, {batch} x {length}", f"{statistics.median(ours):.3f}", f"{least:.3f} ({parts})"]
            rows.append([*row, who, f"{ratio} ({spread})", goal])
    header = ["mixer, forward and backward", "ours, ms", "floor, ms", "peer", "peer's / ours (least to most)", "goal"]
    ceiling = f"bfloat16; ceilings {rate / 1e12:.0f} TFLOP/s and {copied / 1e12:.2f} TB/s"
    report("ssd_gpu", header, rows, f"{torch.cuda.get_device_name()}, {ceiling}.")


def launches() -> None:
    """Other blocks and warps than the ones in use."""
    rows = []
    for (batch, length), which in itertools.product(SHAPES[:2], ("FORWARD", "BACKWARD")):
        launch = getattr(triton_ssd, which)
        used = dict(launch)
        for block, warps in itertools.product((16, 32, 64, 128), (4, 8)):
            launch.update(BLOCK=block, num_warps=warps)
            mixer = BidirectionalMamba2(768, backend="triton").cuda()
            u = torch.randn(batch, length, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            try:
                time = f"{statistics.median(times_ms(partial(step, mixer, u))):.3f}"
            except Exception as failure:  # more shared memory or registers than there are
                time = type(failure).__name__
            mark = " (in use)" if launch == used else ""
            rows.append([f"{batch} x {length}", f"{which.lower()} {block}, {warps}{mark}", time])
        launch.update(used)
    report("ssd_gpu_launches", ["Vim-B's mixer", "block, warps", "forward and backward, ms"], rows)


def training() -> None:
    """Ten crops of each image through Vim-B, forward and backward: images a second, and memory above the weights."""
    rows = []
    crops = [(2 * IMAGES, 224), (8 * IMAGES, 96)]
    data = [torch.randn(n, 3, side, side, device="cuda") for n, side in crops]
    models: dict[str, Callable[[], nn.Module]] = {
        "Vim-B, ours": lambda: VisionMamba(embed_dim=768, depth=24, backend="triton"),
        "Vim-B, plain PyTorch": lambda: VisionMamba(embed_dim=768, depth=24, backend="torch"),
        "Vim-B, mamba-ssm's fused path": _with_mamba_ssm,
        "ViT-B, flash attention": lambda: VisionTransformer(num_classes=0, dynamic_img_size=True),
    }
    for name, make in models.items():
        try:
            model = make().cuda()
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()

            def once(model: nn.Module = model) -> None:
                with torch.autocast("cuda", torch.bfloat16):
                    total = sum(model(images).float().mean() for images in data)
                total.backward()  # type: ignore[union-attr]

            times = times_ms(once, 8)
            memory = (torch.cuda.max_memory_allocated() - before) / 2**30
            rows.append([name, f"{IMAGES / statistics.median(times) * 1e3:.0f}", f"{memory:.1f}"])
        except (ImportError, torch.OutOfMemoryError) as failure:
            rows.append([name, type(failure).__name__, ""])
        model = None
        gc.collect()
        torch.cuda.empty_cache()
    note = f"{IMAGES} images, 2 x 224 and 8 x 96 pixels, bfloat16, forward and backward of the backbone; "
    note += "goal: 1.5 times the images of mamba-ssm's path at half its memory."
    report("ssd_gpu_training", ["model", "images/s", "GiB above the weights"], rows, note)


def _with_mamba_ssm() -> nn.Module:
    model = VisionMamba(embed_dim=768, depth=24, backend="torch")
    for layer in model.layers:
        layer.mixer = MambaSSM(layer.mixer)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare with float64")
    only = parser.parse_args().check
    check()
    if only:
        return
    if not CUDA:
        raise SystemExit("times need a GPU")
    rate, copied = ceilings()
    mixers(rate, copied)
    training()
    launches()


if __name__ == "__main__":
    main()
