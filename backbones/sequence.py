"""What the families that are a plain stack of blocks over one token sequence share."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from backbones.base import Backbone, BlockView, Features
from backbones.mixers import Mixing
from backbones.tokens import Layout


class Step(NamedTuple):
    """One block at work."""

    mixer: nn.Module
    pre_norm: nn.Module
    before: Tensor
    """(B, L, D) the stream before the block; the mixer's input is ``pre_norm(before)``."""
    out: Tensor
    """(B, L, D) what intermediate features are the final norm of."""


def drop_path_rates(last: float, depth: int) -> list[float]:
    """Stochastic depth growing linearly from 0 at the first block to ``last`` at the last."""
    return [last * i / max(1, depth - 1) for i in range(depth)]


class SequenceBackbone(Backbone):
    """A stack of blocks; a family says how an image becomes a sequence and what its blocks are."""

    @abstractmethod
    def _embed(self, images: Tensor) -> tuple[Tensor, Layout]:
        """(B, 3, H, W) to the first sequence (B, L, D) and where things stand in it."""

    @abstractmethod
    def _steps(self, x: Tensor) -> Iterator[Step]:
        """Runs the blocks one after the other."""

    @property
    @abstractmethod
    def _final_norm(self) -> nn.Module: ...

    def forward_intermediates(self, images: Tensor, n: int = 1) -> list[Features]:
        wanted = self._last_blocks(n)
        x, layout = self._embed(images)
        return [layout.split(self._final_norm(step.out)) for i, step in enumerate(self._steps(x)) if i in wanted]

    def inspect(self, images: Tensor, blocks: Sequence[int] = (-1,), mixing: bool = True) -> list[BlockView]:
        wanted = [self._block_index(b) for b in blocks]
        x, layout = self._embed(images)
        views = {}
        for i, step in enumerate(self._steps(x)):
            if i in wanted:
                features = layout.split(self._final_norm(step.out))
                views[i] = BlockView(features, *(self._mixing_maps(step, layout) if mixing else (None, None)))
        return [views[i] for i in wanted]

    @staticmethod
    def _mixing_maps(step: Step, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """Rows of a block's mixing matrix over the patches: at the read-out tokens, and at the registers."""
        registers = layout.readout[:0] if layout.registers is None else layout.registers
        positions, where = torch.cat([layout.readout, registers]).unique(return_inverse=True)
        maps = layout.rows_to_maps(step.mixer.mixing(step.pre_norm(step.before), positions))
        readout, register = where.split([len(layout.readout), len(registers)])
        return maps[:, readout], None if layout.registers is None else maps[:, register]

    def token_mixing(self, images: Tensor, block: int = -1) -> Tensor:
        wanted = self._block_index(block)
        x, _ = self._embed(images)
        step = next(step for i, step in enumerate(self._steps(x)) if i == wanted)
        return step.mixer.mixing(step.pre_norm(step.before))

    def decompose(self, images: Tensor, blocks: Sequence[int] = (-1,)) -> list[list[Mixing]]:
        """Y = MX of each direction of several blocks' mixers, in one pass; see :class:`~backbones.mixers.Mixing`."""
        wanted = [self._block_index(b) for b in blocks]
        x, _ = self._embed(images)
        parts = {}
        for i, step in enumerate(self._steps(x)):
            if i in wanted:
                parts[i] = step.mixer.decompose(step.pre_norm(step.before))
        return [parts[i] for i in wanted]
