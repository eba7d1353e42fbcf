"""UperNet (Xiao et al. 2018) and the auxiliary FCN head. Parameter names and behaviour are mmsegmentation's.

Shapes: B images, C classes, h_i x w_i of a map, finest first.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.precision import at_least_float32
from heads.layers import ConvNormAct, init_convs, resize
from heads.necks import top_down


class SegmentationLoss(NamedTuple):
    """Of one head."""

    loss: Tensor
    """Cross-entropy, summed over the labelled pixels and divided by all of them, unlabelled ones too."""
    accuracy: Tensor
    """Share of labelled pixels whose class is found; 0 where there are none."""


def segmentation_loss(logits: Tensor, labels: Tensor, ignore_index: int = 255) -> SegmentationLoss:
    """Logits resized to the labels, and held against them, in float32 or higher.

    Args:
        logits: (B, C, h, w).
        labels: (B, H, W) integer.
        ignore_index: of pixels that take no part.
    """
    logits = resize(at_least_float32(logits), labels.shape[1:])
    labels = labels.long()
    labelled = labels != ignore_index
    total = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
    right = ((logits.argmax(1) == labels) & labelled).sum()
    return SegmentationLoss(total / (labels.numel() + EPS), right / (labelled.sum() + EPS))


EPS = torch.finfo(torch.float32).eps


class DecodeHead(nn.Module):
    """Dropout of whole channels, and a 1 x 1 convolution to classes, ``conv_seg``."""

    def __init__(self, channels: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout2d(dropout)
        self.conv_seg = nn.Conv2d(channels, num_classes, 1)

    def init_weights(self) -> None:
        """mmsegmentation's: Kaiming normal before ReLUs, N(0, 0.01) for the classes."""
        init_convs(self, lambda weight: nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu"))
        nn.init.normal_(self.conv_seg.weight, std=0.01)

    def classify(self, x: Tensor) -> Tensor:
        return self.conv_seg(self.dropout(x))


class UPerHead(DecodeHead):
    """Pyramid pooling of the coarsest map, sums from there down, all levels joined at the finest.

    Args:
        in_channels: of the maps, finest first.
        channels: of every inner map.
        num_classes: C.
        pool_scales: cells a side that the coarsest map is averaged to.
        dropout: of channels before the classes.
    """

    def __init__(
        self, in_channels: Sequence[int], channels: int = 512, num_classes: int = 150,
        pool_scales: Sequence[int] = (1, 2, 3, 6), dropout: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__(channels, num_classes, dropout)
        *finer, coarsest = in_channels
        self.psp_modules = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(scale), ConvNormAct(coarsest, channels, 1)) for scale in pool_scales
        )
        self.bottleneck = ConvNormAct(coarsest + len(pool_scales) * channels, channels, 3)
        self.lateral_convs = nn.ModuleList(ConvNormAct(width, channels, 1) for width in finer)
        self.fpn_convs = nn.ModuleList(ConvNormAct(channels, channels, 3) for _ in finer)
        self.fpn_bottleneck = ConvNormAct(len(in_channels) * channels, channels, 3)
        self.init_weights()

    def pyramid_pooling(self, coarsest: Tensor) -> Tensor:
        """(B, D, h, w) to (B, channels, h, w)."""
        pooled = [resize(module(coarsest), coarsest.shape) for module in self.psp_modules]
        return self.bottleneck(torch.cat([coarsest, *pooled], 1))

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps to logits (B, C, h_0, w_0)."""
        finer = [conv(x) for conv, x in zip(self.lateral_convs, maps[:-1], strict=True)]
        *sums, coarsest = top_down([*finer, self.pyramid_pooling(maps[-1])])
        levels = [*(conv(x) for conv, x in zip(self.fpn_convs, sums, strict=True)), coarsest]
        joined = torch.cat([levels[0], *(resize(x, levels[0].shape) for x in levels[1:])], 1)
        return self.classify(self.fpn_bottleneck(joined))


class FCNHead(DecodeHead):
    """Convolutions on one of the maps (Long et al. 2015).

    Args:
        in_channels: of that map.
        channels: of the inner ones.
        num_classes: C.
        num_convs: 3 x 3 convolutions before the classes.
        in_index: which map it reads.
        dropout: of channels before the classes.
    """

    def __init__(
        self, in_channels: int, channels: int = 256, num_classes: int = 150, num_convs: int = 1, in_index: int = 2,
        dropout: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__(channels, num_classes, dropout)
        self.in_index = in_index
        widths = [in_channels] + [channels] * num_convs
        self.convs = nn.Sequential(*(ConvNormAct(a, b, 3) for a, b in zip(widths[:-1], widths[1:], strict=True)))
        self.init_weights()

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps to logits (B, C, h_i, w_i)."""
        return self.classify(self.convs(maps[self.in_index]))


class LinearSegmentationHead(DecodeHead):
    """A batch norm and one 1 x 1 convolution on the levels side by side, as DINOv2 probes features.

    Args:
        in_channels: of the maps, which are brought to the first one's size.
        num_classes: C.
        dropout: of channels before the classes.
    """

    def __init__(self, in_channels: Sequence[int], num_classes: int, dropout: float = 0.0) -> None:
        super().__init__(sum(in_channels), num_classes, dropout)
        self.bn = nn.BatchNorm2d(sum(in_channels))
        nn.init.normal_(self.conv_seg.weight, std=0.01)
        if self.conv_seg.bias is not None:
            nn.init.zeros_(self.conv_seg.bias)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps to logits (B, C, h_0, w_0)."""
        joined = torch.cat([maps[0], *(resize(x, maps[0].shape) for x in maps[1:])], 1)
        return self.classify(self.bn(joined))
