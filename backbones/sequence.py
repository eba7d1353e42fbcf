"""What the families that are a plain stack of blocks over one token sequence share."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from backbones.base import BlockView, Features, MixingBackbone, Stream
from backbones.mixers import Mixing
from backbones.tokens import Layout, patch_grid, resample_pos_embed


class BlockTrace(NamedTuple):
    """One block at work."""

    mixer: nn.Module
    pre_norm: nn.Module
    before: Tensor
    """(B, L, D) the stream before the block; the mixer's input is ``pre_norm(before)``."""
    residual: Tensor
    """(B, L, D) the stream after the block."""
    branch: Tensor
    """(B, L, D) what the mixer adds to it."""

    @property
    def mixer_input(self) -> Tensor:
        """(B, L, D)."""
        return self.pre_norm(self.before)


def drop_path_rates(last: float, depth: int) -> list[float]:
    """Stochastic depth growing linearly from 0 at the first block to ``last`` at the last."""
    return [last * i / max(1, depth - 1) for i in range(depth)]


class SequenceBackbone(MixingBackbone):
    """A stack of blocks, each from the stream (B, L, D) to the stream after it and what its mixer added.

    A family says how an image becomes a sequence, what its blocks are and where the mixer stands in one. It holds
    ``pos_embed``, the positions of the patches and of the tokens that it names in :meth:`extra_positions_at`.
    """

    mixer_name: str
    """A block's attributes: its mixer, and the norm before it."""
    pre_norm_name: str
    blocks_name: str
    """Attributes of the model: its blocks, and the final norm."""
    final_norm_name: str

    def _set_size(self, img_size: int | tuple[int, int], patch_size: int, embed_dim: int, depth: int) -> None:
        """The sizes that the contract asks for."""
        self.num_features, self.patch_size = embed_dim, patch_size
        self.grid_size = patch_grid(img_size, patch_size)
        self.feature_info = [
            {"num_chs": embed_dim, "reduction": patch_size, "module": f"{self.blocks_name}.{i}"} for i in range(depth)
        ]

    @property
    def embedding_is_cls(self) -> bool:  # type: ignore[override]
        return self.global_pool == "token"

    @abstractmethod
    def _embed(self, images: Tensor) -> tuple[Tensor, Layout]:
        """(B, C, H, W) to the first sequence (B, L, D) and where things stand in it."""

    @torch.no_grad()
    def check_size(self, height: int, width: int) -> None:
        """Lays a blank image out as tokens; the blocks take sequences of any length."""
        parameter = next(self.parameters())
        self._embed(parameter.new_zeros(1, self.in_chans or 3, height, width))

    @property
    def _blocks(self) -> nn.ModuleList:
        return getattr(self, self.blocks_name)

    def _final_norm(self, tokens: Tensor) -> Tensor:
        return getattr(self, self.final_norm_name)(tokens)

    def _traces(self, x: Tensor) -> Iterator[BlockTrace]:
        """Runs the blocks one after the other."""
        for block in self._blocks:
            before, (x, branch) = x, self._run(block, x)
            yield BlockTrace(getattr(block, self.mixer_name), getattr(block, self.pre_norm_name), before, x, branch)

    def _encode(self, images: Tensor) -> tuple[Tensor, Layout]:
        """The last sequence (B, L, D), normed, and where things stand in it."""
        x, layout = self._embed(images)
        for block in self._blocks:
            x, _ = self._run(block, x)
        return self._final_norm(x), layout

    def pooled_features(self, images: Tensor) -> Tensor:
        """(B, D); with ``global_pool=""`` all tokens (B, L, D) in sequence order."""
        tokens, layout = self._encode(images)
        if self.global_pool == "token":
            return layout.readout_mean(tokens)
        return tokens[:, layout.patches].mean(1) if self.global_pool else tokens

    def forward_features(self, images: Tensor) -> Features:
        tokens, layout = self._encode(images)
        return layout.split(tokens)

    def forward_intermediates(
        self, images: Tensor, n: int | Sequence[int] = 1, stream: Stream = "published", norm: bool = True
    ) -> list[Features]:
        sequences, layout = self.forward_sequences(images, n, stream, norm)
        return [layout.split(tokens) for tokens in sequences]

    def forward_sequences(
        self, images: Tensor, n: int | Sequence[int] = 1, stream: Stream = "published", norm: bool = True
    ) -> tuple[list[Tensor], Layout]:
        """:meth:`forward_intermediates` before it is sorted: (B, L, D) of each block, and where things stand in it."""
        wanted, read = self.block_indices(n), self.resolve_stream(stream)
        x, layout = self._embed(images)
        found = [getattr(trace, read) for i, trace in enumerate(self._traces(x)) if i in wanted]
        return [self._final_norm(tokens) if norm else tokens for tokens in found], layout

    def inspect(
        self, images: Tensor, blocks: Sequence[int] = (-1,), mixing: bool = True, stream: Stream = "published"
    ) -> list[BlockView]:
        wanted, read = [self.block_index(b) for b in blocks], self.resolve_stream(stream)
        x, layout = self._embed(images)
        views = {}
        for i, trace in enumerate(self._traces(x)):
            if i in wanted:
                features = layout.split(self._final_norm(getattr(trace, read)))
                views[i] = BlockView(features, *(self._mixing_maps(trace, layout) if mixing else (None, None)))
        return [views[i] for i in wanted]

    @staticmethod
    def _mixing_maps(trace: BlockTrace, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """Rows of a block's mixing matrix over the patches: at the read-out tokens, and at the registers."""
        registers = layout.readout[:0] if layout.registers is None else layout.registers
        positions, where = torch.cat([layout.readout, registers]).unique(return_inverse=True)
        maps = layout.rows_to_maps(trace.mixer.mixing(trace.mixer_input, positions))
        readout, register = where.split([len(layout.readout), len(registers)])
        return maps[:, readout], None if layout.registers is None else maps[:, register]

    def token_mixing(self, images: Tensor, block: int = -1) -> Tensor:
        return next(self.mixings(images, (block,)))[0]

    def mixings(self, images: Tensor, blocks: Sequence[int]) -> Iterator[tuple[Tensor, Layout]]:
        wanted = self.block_indices(blocks)
        x, layout = self._embed(images)
        for i, trace in enumerate(self._traces(x)):
            if i in wanted:
                yield trace.mixer.mixing(trace.mixer_input), layout

    def decompose(
        self, images: Tensor, blocks: Sequence[int] = (-1,), max_heads: int | None = None
    ) -> list[list[Mixing]]:
        wanted = [self.block_index(b) for b in blocks]
        x, _ = self._embed(images)
        parts = {}
        for i, trace in enumerate(self._traces(x)):
            if i in wanted:
                parts[i] = trace.mixer.decompose(trace.mixer_input, max_heads)
        return [parts[i] for i in wanted]

    @property
    def mixer_heads(self) -> list[tuple[int, int]]:
        shapes = [getattr(getattr(block, self.mixer_name), "head_shape", None) for block in self._blocks]
        known = [shape for shape in shapes if shape is not None]  # a mixer that somebody put there need not say
        return known if len(known) == len(shapes) else []

    def head_outputs(self, images: Tensor, blocks: Sequence[int] = (-1,)) -> list[Tensor]:
        if not self.mixer_heads:
            raise ValueError(f"{type(self).__name__}: its mixers' channels are not grouped in heads")
        wanted = [self.block_index(b) for b in blocks]
        x, layout = self._embed(images)
        outputs = {
            i: layout.readout_mean(trace.mixer.head_outputs(trace.mixer_input))
            for i, trace in enumerate(self._traces(x))
            if i in wanted
        }
        return [outputs[i] for i in wanted]

    # ---- checkpoints --------------------------------------------------------------------------------------

    def extra_positions_at(self, grid: tuple[int, int]) -> int:
        """Where positions of tokens other than patches stand among those of a patch grid in ``pos_embed``."""
        return 0

    def adapt_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Positions learned on another square grid are resampled. ValueError where they are of no square grid."""
        state = super().adapt_state_dict(state)
        wanted, pos = self.pos_embed, state.get("pos_embed")
        if pos is None or pos.shape == wanted.shape or pos.shape[2:] != wanted.shape[2:]:
            return state
        grid = self.grid_size
        extra = wanted.shape[1] - grid[0] * grid[1]
        side = round((pos.shape[1] - extra) ** 0.5)
        if side * side + extra != pos.shape[1]:
            raise ValueError(f"pos_embed of {pos.shape[1]} tokens is no square grid and {extra} extra tokens")
        learned, here = (self.extra_positions_at(g) for g in ((side, side), grid))
        patches = torch.cat([pos[:, :learned], pos[:, learned + extra :]], 1)
        patches = resample_pos_embed(patches.float(), (side, side), grid).to(pos.dtype)
        fitted = torch.cat([patches[:, :here], pos[:, learned : learned + extra], patches[:, here:]], 1)
        return state | {"pos_embed": fitted}
