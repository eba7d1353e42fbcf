"""Linear heads on pooled features of several blocks.

Shapes: B images, D_i width of block or stage i, h x w patch grid, R registers, F what a head reads, C classes.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


class BlockFeatures(Protocol):
    """What is read of a block: :class:`backbones.Features`, or anything with its fields."""

    @property
    def cls(self) -> Tensor: ...  # (B, D_i)

    @property
    def patches(self) -> Tensor: ...  # (B, D_i, h, w)

    @property
    def registers(self) -> Tensor | None: ...  # (B, R, D_i)


POOLS: dict[str, Callable[[BlockFeatures], Tensor]] = {
    "cls": lambda f: f.cls,
    "mean": lambda f: f.patches.mean((2, 3)),
    "max": lambda f: f.patches.amax((2, 3)),
}
REGISTER = re.compile(r"register(\d+)")


def pool(features: BlockFeatures, part: str) -> Tensor:
    """(B, D_i) what a pooling's part reads of one block."""
    found = REGISTER.fullmatch(part)
    if found is None:
        return POOLS[part](features)
    assert features.registers is not None  # HeadSpec.check asked
    return features.registers[:, int(found[1])]


@dataclass
class HeadSpec:
    """One linear head.

    Args:
        n_last_blocks: how many last blocks (or stages) it reads, concatenated.
        pooling: what it reads of each: ``cls``, ``mean`` or ``max`` over the patches, ``register0`` and so on, or
            several joined by +. Where a backbone has no class token, ``cls`` is the embedding (of the last block) and
            the mean over the patches (of those before).
        lr: learning rate for 256 images a step; scaled by (global batch / 256).
        weight_decay: L2.
        batch_norm: standardise the features first, without affine parameters, as MAE's protocol does.
    """

    n_last_blocks: int = 4
    pooling: str = "cls"
    lr: float = 0.001
    weight_decay: float = 0.0
    batch_norm: bool = False

    def check(self, depth: int, num_registers: int) -> None:
        """ValueError where a backbone of so many blocks and registers does not have what the head reads."""
        if unknown := [part for part in self.parts if part not in POOLS and not REGISTER.fullmatch(part)]:
            raise ValueError(
                f"heads: pooling={self.pooling!r}: {unknown[0]!r} is not one of {', '.join(POOLS)}, register0, …"
            )
        for found in filter(None, map(REGISTER.fullmatch, self.parts)):
            if int(found[1]) >= num_registers:
                raise ValueError(
                    f"heads: pooling={self.pooling!r}: this backbone has {num_registers} registers, counted from 0"
                )
        if not 1 <= self.n_last_blocks <= depth:
            raise ValueError(f"heads: n_last_blocks={self.n_last_blocks}; the backbone has {depth} blocks")

    @property
    def name(self) -> str:
        norm = "_bn" if self.batch_norm else ""
        return f"n{self.n_last_blocks}_{self.pooling}{norm}_lr{self.lr:g}_wd{self.weight_decay:g}"

    @property
    def parts(self) -> list[str]:
        return self.pooling.split("+")

    @property
    def reads(self) -> list[tuple[int, str]]:
        """Block, counted from the end (-1 the last), and part of everything that it reads, in its order."""
        return [(block, part) for part in self.parts for block in range(-self.n_last_blocks, 0)]

    def build(self, widths: Sequence[int], num_classes: int, cls_widths: Sequence[int] | None = None) -> nn.Sequential:
        """The head (B, F) to (B, C), with weights from N(0, 0.01) and bias 0.

        Args:
            widths: D_i of each of the backbone's blocks.
            num_classes: C.
            cls_widths: the same of what ``cls`` reads, where it is another.
        """
        width = sum(((cls_widths or widths) if part == "cls" else widths)[block] for block, part in self.reads)
        linear = nn.Linear(width, num_classes)
        nn.init.normal_(linear.weight, std=0.01)
        nn.init.zeros_(linear.bias)
        return nn.Sequential(nn.BatchNorm1d(width, affine=False) if self.batch_norm else nn.Identity(), linear)

    def pool(self, features: Sequence[BlockFeatures]) -> Tensor:
        """Features of at least ``n_last_blocks`` last blocks to (B, F)."""
        return torch.cat([pool(features[block], part) for block, part in self.reads], 1)
