"""The bidirectional Mamba-2 mixer on the CPU, forward and backward, at the lengths of DINO's crops.

Peers do the same work with the same weights, and are held to the same output and gradient first: the published
minimal listing's algorithm (chunks and einsums, a grouped conv1d), and transformers' fallback for Mamba-2. timm's ViT
block of the same width is another architecture, with its MLP; the two projections alone are a floor. Ours in PyTorch's
operations, under bfloat16 autocast, and through torch.compile (for one size: tens of seconds a shape) say what C, and
whether those, are worth.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from measuring import Line, compare, in_turns
from timm.models.vision_transformer import Block
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from backbones.mixers import BidirectionalMamba2
from common.memory import keep_freed_memory

SIZES = {"Vim-T": 256, "Vim-S": 512, "Vim-B": 768}
SHAPES = ((8, 198), (32, 37))  # four images' global crops, and their local ones, with CLS twice
CHUNK = 64
Scan = Callable[..., Tensor]


def segment_sums(a: Tensor) -> Tensor:
    """(..., q) to (..., q, q): sums of a over the positions after j up to i, -inf above the diagonal."""
    q = a.shape[-1]
    below = torch.ones(q, q, dtype=torch.bool).tril(-1)
    sums = a[..., None].expand(*a.shape, q).masked_fill(~below, 0).cumsum(-2)
    return sums.masked_fill(~(below | torch.eye(q, dtype=torch.bool)), float("-inf"))


def listing(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """The four steps of the paper's listing: blocks on the diagonal, states, passing them on, states to outputs."""
    length, h = x.shape[1:3]
    pad = -length % CHUNK
    xdt, a = F.pad(x * dt[..., None], (0, 0, 0, 0, 0, pad)), F.pad(dt * A, (0, 0, 0, pad))
    B, C = (F.pad(t.repeat_interleave(h // t.shape[2], 2), (0, 0, 0, 0, 0, pad)) for t in (B, C))
    xdt, B, C = (t.unflatten(1, (-1, CHUNK)) for t in (xdt, B, C))
    a = a.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2)  # b h c q
    sums = a.cumsum(-1)
    inside = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, segment_sums(a).exp(), xdt)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", B, (sums[..., -1:] - sums).exp(), xdt)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
    passing = segment_sums(F.pad(sums[..., -1], (1, 0))).exp()
    states = torch.einsum("bhzc,bchpn->bzhpn", passing, states)[:, :-1]
    before = torch.einsum("bclhn,bchpn,bhcl->bclhp", C, states, sums.exp())
    return (inside + before).flatten(1, 2)[:, :length] + D[:, None] * x


def transformers_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    return mamba2_chunk_scan(x, dt, A, B, C, CHUNK, D=D)


def plain(mixer: BidirectionalMamba2, scan: Scan, u: Tensor) -> Tensor:
    """The mixer's definition with another scan, torch's convolution and no operation of ours."""
    width = mixer.inner + 2 * mixer.ngroups * mixer.d_state
    z, both, dt = mixer.in_proj(u).split([mixer.inner, width, mixer.heads], -1)
    total: Tensor | float = 0.0
    for end, bias in (("", "dt_bias"), ("_b", "dt_b_bias")):
        xBC, step = (both, dt) if end == "" else (both.flip(1), dt.flip(1))
        xBC = F.silu(getattr(mixer, f"conv1d{end}")(xBC.transpose(1, 2))[..., : u.shape[1]].transpose(1, 2))
        x, B, C = xBC.split([mixer.inner, (width - mixer.inner) // 2, (width - mixer.inner) // 2], -1)
        x, B, C = x.unflatten(-1, (mixer.heads, -1)), B.unflatten(-1, (1, -1)), C.unflatten(-1, (1, -1))
        A = -getattr(mixer, f"A_log{end}").exp()
        y = scan(x, F.softplus(step + getattr(mixer, bias)), A, B, C, getattr(mixer, f"D{end}")).flatten(2)
        y = (y if end == "" else y.flip(1)) * F.silu(z)
        total = total + F.rms_norm(y, y.shape[-1:], getattr(mixer, f"norm{end}").weight, mixer.eps)
    return mixer.out_proj(total / 2)


def scan_flops(batch: int, length: int, heads: int, p: int = 64, n: int = 64) -> float:
    """Of the products in a mixer's two scans by bidirectional.c, forward and backward; triangles count as half."""
    blocks = -(-length // 64)
    q = length / blocks
    mixing = 3 * q * q * p * heads * blocks  # M x forward; the gradients of M and x backward
    states = 7 * 2 * q * n * p * heads * (blocks - 1)
    shared = 4 * q * q * n * blocks  # C B^T twice, and the gradients of both
    return 2 * batch * (mixing + states + shared)


def projections(mixer: BidirectionalMamba2, u: Tensor) -> Tensor:
    return mixer.out_proj(mixer.in_proj(u)[..., : mixer.inner])


def bfloat16(mixer: BidirectionalMamba2, u: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return mixer(u).float()


def step(function: Callable[[Tensor], Tensor], u: Tensor, dy: Tensor) -> Tensor:
    u.grad = None
    y = function(u)
    y.backward(dy)
    return y.detach()


def beyond_projections(what: str, times: dict[str, list[float]], scans: float, weights: float) -> str:
    """What ours takes beside the projections, of ``weights`` operations, and what the scans' products are of it."""
    floor = times["the two projections alone"]
    beyond = statistics.median(a - b for a, b in zip(times["ours"], floor, strict=True))
    products = scans / weights * statistics.median(floor)
    return (
        f"{what}: {beyond * 1e3:.1f} ms beside the projections; the scans' products, {scans / 1e9:.2f} GFLOP, "
        f"would take {products * 1e3:.1f} ms at the projections' own rate."
    )


def main() -> None:
    keep_freed_memory()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    lines, notes = [], []
    for name, dim in SIZES.items():
        mixer, block = BidirectionalMamba2(dim), Block(dim, dim // 64)
        operations = BidirectionalMamba2(dim, backend="torch")
        operations.load_state_dict(mixer.state_dict())
        peers: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
            "the minimal listing, conv1d": (partial(plain, mixer, listing), "≥ 3"),
            "transformers' fallback, conv1d": (partial(plain, mixer, transformers_scan), "≥ 3"),
            "timm's ViT block (SDPA, MLP)": (block, ""),
            "the two projections alone": (partial(projections, mixer), "≥ 0.625"),
            "ours in PyTorch's operations": (operations, ""),
            "ours in bfloat16": (partial(bfloat16, mixer), ""),
        }
        if name == "Vim-T":
            compiled = BidirectionalMamba2(dim, backend="compiled")
            compiled.load_state_dict(mixer.state_dict())
            peers["ours compiled"] = compiled, ""
        for batch, length in SHAPES:
            u, dy = torch.randn(batch, length, dim, requires_grad=True), torch.randn(batch, length, dim)
            expected = step(mixer, u, dy), u.grad
            for peer in list(peers)[:2]:
                same = step(peers[peer][0], u, dy), u.grad
                for ours, theirs in zip(expected, same, strict=True):
                    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
            contenders = {"ours": mixer} | {peer: function for peer, (function, _) in peers.items()}
            times = in_turns({who: partial(step, function, u, dy) for who, function in contenders.items()}, 9)
            what = f"{name}, {batch} x {length} tokens"
            weights = 6 * batch * length * (mixer.in_proj.weight.numel() + mixer.out_proj.weight.numel())
            notes.append(beyond_projections(what, times, scan_flops(batch, length, mixer.heads), weights))
            lines += [Line(what, times["ours"], peer, times[peer], goal) for peer, (_, goal) in peers.items()]
    goal = "float32, forward and backward. The last goal: at most 1.6 times the projections' time."
    compare("ssd_cpu", lines, "\n".join([goal, "", *(f"- {note}" for note in notes)]))


if __name__ == "__main__":
    main()
