"""What every backbone offers to the rest of the project.

Shapes: B images, D embed_dim, h x w patch grid, L tokens, R registers among them, T read-out tokens (the one CLS, or
Mamba-Reg's registers).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Features(NamedTuple):
    """A block's normed output, sorted by what its tokens are."""

    cls: Tensor
    """(B, D) what the image embedding is read from: the CLS token, or the mean of the registers."""
    patches: Tensor
    """(B, D, h, w)."""
    registers: Tensor | None = None
    """(B, R, D), or None where the family has none."""


class BlockView(NamedTuple):
    """One block seen by :meth:`Backbone.inspect`."""

    features: Features
    mixing: Tensor | None
    """(B, T, heads, h, w): rows of the token-mixing matrix at the T read-out tokens, over the patches."""
    register_mixing: Tensor | None = None
    """(B, R, heads, h, w): its rows at the registers, or None where the family has none."""


class Backbone(nn.Module, ABC):
    """An image encoder with a grid of patch tokens."""

    embed_dim: int
    patch_size: int
    depth: int

    grad_checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keeps each block's input only and computes the rest again in the backward pass; the gradients stay."""
        self.grad_checkpointing = enable

    def _run(self, block: nn.Module, x: Tensor) -> Any:
        """``block(x)``, checkpointed where that is on; a block drops the same paths when it is run again."""
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, use_reentrant=False)
        return block(x)

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to the image embedding (B, D). H and W are any multiples of the patch."""

    @abstractmethod
    def forward_intermediates(self, images: Tensor, n: int = 1) -> list[Features]:
        """Normed features of the last ``n`` blocks, oldest first. ValueError unless 1 <= n <= depth."""

    @abstractmethod
    def inspect(self, images: Tensor, blocks: Sequence[int] = (-1,), mixing: bool = True) -> list[BlockView]:
        """Features, and rows of the mixing matrix if ``mixing``, of several blocks in one pass."""

    @abstractmethod
    def token_mixing(self, images: Tensor, block: int = -1) -> Tensor:
        """(B, heads, L, L): the token-mixing matrix M of Y = MX in that block, all tokens in sequence order.

        For bidirectional scans it is the mean of both directions, as their outputs are averaged. ValueError where
        the model has no such matrix (convolutional networks).
        """

    def cls_mixing(self, images: Tensor, block: int = -1) -> Tensor:
        """(B, heads, h, w): the CLS row of that block's mixing matrix over the patches.

        With registers it is the mean of their rows, since the embedding is the mean of their outputs.
        """
        rows = self.inspect(images, (block,))[0].mixing
        assert rows is not None
        return rows.mean(1)

    def extra_positions_at(self, grid: tuple[int, int]) -> int:
        """Where positions of tokens other than patches stand among those of a patch grid in ``pos_embed``."""
        return 0

    def _block_index(self, block: int) -> int:
        if not -self.depth <= block < self.depth:
            raise ValueError(f"block={block}: this backbone has blocks 0..{self.depth - 1} (or -{self.depth}..-1)")
        return block % self.depth

    def _last_blocks(self, n: int) -> range:
        if not 1 <= n <= self.depth:
            raise ValueError(f"n={n}: this backbone has {self.depth} blocks, allowed are 1..{self.depth}")
        return range(self.depth - n, self.depth)
