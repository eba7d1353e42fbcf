"""Linear heads on pooled features of several blocks.

Shapes: B images, D_i width of block or stage i, h x w patch grid, R registers, F what a head reads, C classes.
A *linear* head is ours, a *mixer's* head one of the backbone's own.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor, nn


class BlockFeatures(Protocol):
    """What is read of a block: :class:`backbones.Features`, or anything with its fields."""

    @property
    def cls(self) -> Tensor: ...  # (B, D_i)

    @property
    def patches(self) -> Tensor: ...  # (B, D_i, h, w)

    @property
    def registers(self) -> Tensor | None: ...  # (B, R, D_i)


STREAMS = ("published", "branch", "residual")
POOLS: dict[str, Callable[[BlockFeatures], Tensor]] = {
    "cls": lambda f: f.cls,
    "mean": lambda f: f.patches.mean((2, 3)),
    "max": lambda f: f.patches.amax((2, 3)),
}
REGISTER, MIXER_HEAD = re.compile(r"register(\d+)"), re.compile(r"head(\d+)")


def pool(features: BlockFeatures, part: str) -> Tensor:
    """(B, D_i) what a pooling's part reads of one block's features: any part but ``headN``."""
    found = REGISTER.fullmatch(part)
    if found is None:
        return POOLS[part](features)
    assert features.registers is not None  # HeadSpec.check asked
    return features.registers[:, int(found[1])]


def width_of(
    part: str, block: int, widths: Sequence[int], cls_widths: Sequence[int], mixer_heads: Sequence[tuple[int, int]]
) -> int:
    """Channels of what a pooling's part reads of a block."""
    if MIXER_HEAD.fullmatch(part):
        return mixer_heads[block][1]
    return (cls_widths if part == "cls" else widths)[block]


@dataclass
class HeadSpec:
    """One linear head.

    Args:
        n_last_blocks: how many last blocks (or stages) it reads, concatenated.
        pooling: what it reads of each: ``cls``, ``mean`` or ``max`` over the patches, ``register0`` and so on,
            ``head0`` and so on, or several joined by +. Where a backbone has no class token, ``cls`` is the embedding
            (of the last block) and the mean over the patches (of those before). ``headN`` is what one head of the
            block's token mixer gives the class token before the output projection, whatever the stream.
        lr: learning rate for 256 images a step; scaled by (global batch / 256).
        weight_decay: L2.
        batch_norm: standardise the features first, without affine parameters, as MAE's protocol does.
        block: the one block (or stage) it reads, in place of the last ones: 0 the first, -1 the last.
        stream: which stream of the blocks it reads; None is that of the module it belongs to.
    """

    n_last_blocks: int = 4
    pooling: str = "cls"
    lr: float = 0.001
    weight_decay: float = 0.0
    batch_norm: bool = False
    block: int | None = None
    stream: Literal["published", "branch", "residual"] | None = None

    def check(self, depth: int, num_registers: int, mixer_heads: Sequence[tuple[int, int]] = ()) -> None:
        """ValueError where a backbone does not have what the head reads.

        Args:
            depth: its blocks.
            num_registers: R.
            mixer_heads: heads of each block's mixer, and the channels of one; nothing where they cannot be read.
        """
        known = [*POOLS, *filter(REGISTER.fullmatch, self.parts), *filter(MIXER_HEAD.fullmatch, self.parts)]
        if unknown := [part for part in self.parts if part not in known]:
            raise ValueError(
                f"heads: pooling={self.pooling!r}: {unknown[0]!r} is not one of {', '.join(POOLS)}, register0, …, "
                "head0, …"
            )
        if self.block is not None and not -depth <= self.block < depth:
            raise ValueError(f"heads: block={self.block}; the backbone has blocks 0..{depth - 1} (or -{depth}..-1)")
        if self.stream not in (None, *STREAMS):
            raise ValueError(f"heads: stream={self.stream!r}; allowed: {', '.join(STREAMS)}, or null")
        for found in filter(None, map(REGISTER.fullmatch, self.parts)):
            if int(found[1]) >= num_registers:
                raise ValueError(
                    f"heads: pooling={self.pooling!r}: this backbone has {num_registers} registers, counted from 0"
                )
        if self.block is None and not 1 <= self.n_last_blocks <= depth:
            raise ValueError(f"heads: n_last_blocks={self.n_last_blocks}; the backbone has {depth} blocks")
        for block, part in self.reads:
            if not (found := MIXER_HEAD.fullmatch(part)):
                continue
            if not mixer_heads:
                raise ValueError(
                    f"heads: pooling={self.pooling!r}: this backbone's token mixers give no heads' outputs; those of "
                    "softmax attention, linear attention and Mamba-2 of ours do"
                )
            if int(found[1]) >= (there := mixer_heads[block][0]):
                raise ValueError(
                    f"heads: pooling={self.pooling!r}: the mixer of block {block % depth} has {there} heads, counted "
                    "from 0"
                )

    @property
    def name(self) -> str:
        norm = "_bn" if self.batch_norm else ""
        where = f"n{self.n_last_blocks}" if self.block is None else f"block{self.block}"
        stream = "" if self.stream is None else f"_{self.stream}"
        return f"{where}_{self.pooling}{stream}{norm}_lr{self.lr:g}_wd{self.weight_decay:g}"

    @property
    def parts(self) -> list[str]:
        return self.pooling.split("+")

    @property
    def reads(self) -> list[tuple[int, str]]:
        """Block and part of everything that it reads, in its order; blocks counted from the end (-1 the last), or as
        ``block`` says."""
        blocks = range(-self.n_last_blocks, 0) if self.block is None else (self.block,)
        return [(block, part) for part in self.parts for block in blocks]

    def build(
        self, widths: Sequence[int], num_classes: int, cls_widths: Sequence[int] | None = None,
        mixer_heads: Sequence[tuple[int, int]] = (),
    ) -> nn.Sequential:  # fmt: skip
        """The head (B, F) to (B, C), with weights from N(0, 0.01) and bias 0.

        Args:
            widths: D_i of each of the backbone's blocks.
            num_classes: C.
            cls_widths: the same of what ``cls`` reads, where it is another.
            mixer_heads: heads of each block's mixer and the channels of one, where ``headN`` is read.
        """
        width = sum(width_of(part, block, widths, cls_widths or widths, mixer_heads) for block, part in self.reads)
        linear = nn.Linear(width, num_classes)
        nn.init.normal_(linear.weight, std=0.01)
        nn.init.zeros_(linear.bias)
        return nn.Sequential(nn.BatchNorm1d(width, affine=False) if self.batch_norm else nn.Identity(), linear)
