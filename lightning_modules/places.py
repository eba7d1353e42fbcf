"""The places of a backbone that linear heads read, each once, in as few passes as there are.

Shapes: B images, F_i what a head reads, F what all read together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from backbones import Backbone, MixingBackbone, Stream
from heads import HeadSpec
from heads.linear import MIXER_HEAD, pool, width_of


class Place(NamedTuple):
    """A part of one block in one stream."""

    stream: Stream
    """``branch`` or ``residual``."""
    block: int
    """From 0."""
    part: str


class Places:
    """Reads what several linear heads read: one pass for each stream, and one for outputs of mixers' heads.

    Args:
        backbone: is asked.
        specs: the linear heads.
        stream: of those that name none.

    Raises:
        ValueError: where the backbone does not have what a head reads.
    """

    def __init__(self, backbone: Backbone, specs: Sequence[HeadSpec], stream: Stream) -> None:
        mixer_heads = backbone.mixer_heads
        for spec in specs:
            spec.check(backbone.depth, backbone.num_registers, mixer_heads)
        self._backbone = backbone
        of_spec = [
            [
                Place(backbone.resolve_stream(spec.stream or stream), backbone.block_index(block), part)
                for block, part in spec.reads
            ]
            for spec in specs
        ]
        self._places = sorted({place for places in of_spec for place in places})
        self._columns = [[self._places.index(place) for place in places] for places in of_spec]
        widths = [info["num_chs"] for info in backbone.feature_info]
        self._widths = [width_of(p.part, p.block, widths, backbone.cls_widths, mixer_heads) for p in self._places]
        self._blocks: dict[Stream, list[int]] = {}  # of each pass, from the first to the last
        self._mixers: list[int] = []
        for place in self._places:
            blocks = self._mixers if MIXER_HEAD.fullmatch(place.part) else self._blocks.setdefault(place.stream, [])
            if place.block not in blocks:
                blocks.append(place.block)

    @property
    def passes(self) -> int:
        """Of the backbone, for each image."""
        return len(self._blocks) + bool(self._mixers)

    def read(self, images: Tensor, readouts: bool = True) -> Tensor:
        """(B, F): every place once, side by side.

        Args:
            images: (B, C, H, W).
            readouts: whether ``cls`` is as :meth:`backbones.Backbone.forward_readouts` gives it, or as
                ``forward_intermediates`` does.
        """
        backbone = self._backbone
        read = backbone.forward_readouts if readouts else backbone.forward_intermediates
        found = {
            (stream, block): features
            for stream, blocks in self._blocks.items()
            for block, features in zip(blocks, read(images, blocks, stream), strict=True)
        }
        outputs: dict[int, Tensor] = {}
        if self._mixers:
            assert isinstance(backbone, MixingBackbone)  # it has heads
            outputs = dict(zip(self._mixers, backbone.head_outputs(images, self._mixers), strict=True))
        parts = []
        for stream, block, part in self._places:
            head = MIXER_HEAD.fullmatch(part)
            parts.append(pool(found[stream, block], part) if head is None else outputs[block][:, int(head[1])])
        return torch.cat(parts, 1)

    def split(self, found: Tensor) -> list[Tensor]:
        """(B, F) to what each of the heads reads, (B, F_i)."""
        parts = found.split(self._widths, 1)
        return [torch.cat([parts[i] for i in columns], 1) for columns in self._columns]
