"""Necks: from a backbone's maps to maps at the strides that dense heads read.

The blocks of a plain backbone all give maps of one stride, 16 pixels say; dense heads read strides 4, 8, 16 and 32.
Shapes: B images, D_i channels of a backbone's map, h x w a plain backbone's grid.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from heads.layers import ChannelLayerNorm, ConvNormAct, init_convs, resize

SCALES = (4.0, 2.0, 1.0, 0.5)
"""Of a plain backbone's map to the four levels."""


class Neck(nn.Module, ABC):
    """Maps in, finest first; maps out, finest first. A neck sets what follows."""

    out_channels: list[int]
    """Of each map that comes out."""
    strides: list[float]
    """Pixels of the image a side of each map's cells."""

    @abstractmethod
    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Maps (B, D_i, h_i, w_i) in, maps out."""


class IdentityNeck(Neck):
    """A pyramid's maps as they are."""

    def __init__(self, in_channels: Sequence[int], strides: Sequence[float]) -> None:
        super().__init__()
        self.out_channels, self.strides = list(in_channels), list(strides)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        return list(maps)


class MultiLevelNeck(Neck):
    """Of each of four maps a 1 x 1 convolution, the map resized by 4, 2, 1 and 1/2, a 3 x 3 convolution.

    mmsegmentation's, without norm and activation. It resizes by the factor, not to a size: on odd sides a step of 1/2
    is exactly two cells.

    Args:
        in_channels: D_i of the four maps.
        stride: of all of them, pixels.
        out_channels: of each that comes out.
    """

    def __init__(self, in_channels: Sequence[int], stride: float, out_channels: int) -> None:
        super().__init__()
        _check_levels(in_channels)
        self.out_channels, self.strides = [out_channels] * len(SCALES), [stride / scale for scale in SCALES]
        self.lateral_convs = nn.ModuleList(
            ConvNormAct(width, out_channels, 1, norm=False, activation=False) for width in in_channels
        )
        self.convs = nn.ModuleList(
            ConvNormAct(out_channels, out_channels, 3, norm=False, activation=False) for _ in SCALES
        )
        init_convs(self, nn.init.xavier_uniform_)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for x, lateral, conv, scale in zip(maps, self.lateral_convs, self.convs, SCALES, strict=True):
            found.append(conv(F.interpolate(lateral(x), scale_factor=scale, mode="bilinear", align_corners=False)))
        return found


class Feature2Pyramid(Neck):
    """Four maps brought to four strides: transposed convolutions up, a maximum down.

    mmsegmentation's (BEiT's, iBOT's): two transposed 2 x 2 with a batch norm and GELU between them, one, nothing, and
    a maximum over 2 x 2.

    Args:
        width: D of the four maps, and of those that come out.
        stride: of all four, pixels.
    """

    def __init__(self, width: int, stride: float) -> None:
        super().__init__()
        self.out_channels, self.strides = [width] * len(SCALES), [stride / scale for scale in SCALES]
        self.upsample_4x = nn.Sequential(
            nn.ConvTranspose2d(width, width, 2, 2), nn.BatchNorm2d(width), nn.GELU(),
            nn.ConvTranspose2d(width, width, 2, 2),
        )  # fmt: skip
        self.upsample_2x = nn.Sequential(nn.ConvTranspose2d(width, width, 2, 2))

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        levels: list[Callable[[Tensor], Tensor]] = [
            self.upsample_4x, self.upsample_2x, lambda x: x, lambda x: F.max_pool2d(x, 2),
        ]  # fmt: skip
        return [level(x) for level, x in zip(levels, maps, strict=True)]


class NormedConv2d(nn.Conv2d):
    """A convolution that keeps the size, without bias, and a channel layer norm, ``norm``."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False)
        self.norm = ChannelLayerNorm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class SimpleFeaturePyramid(Neck):
    """Five levels from the last map alone (ViTDet, Li et al. 2022). detectron2's, with its names ``simfp_2`` to 5.

    Args:
        width: D of the map.
        stride: of it, pixels.
        out_channels: of each level.
    """

    def __init__(self, width: int, stride: float, out_channels: int = 256) -> None:
        super().__init__()
        self.out_channels = [out_channels] * (len(SCALES) + 1)
        self.strides = [stride / scale for scale in SCALES] + [stride * 4]
        half, quarter = width // 2, width // 4
        scaled: list[tuple[list[nn.Module], int]] = [
            ([_up(width, half), ChannelLayerNorm(half), nn.GELU(), _up(half, quarter)], quarter),
            ([_up(width, half)], half),
            ([], width),
            ([nn.MaxPool2d(2)], width),
        ]
        for level, (layers, made) in enumerate(scaled, 2):
            convs = [NormedConv2d(made, out_channels, 1), NormedConv2d(out_channels, out_channels, 3)]
            self.add_module(f"simfp_{level}", nn.Sequential(*layers, *convs))

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        levels = [self.get_submodule(f"simfp_{level}")(maps[-1]) for level in range(2, 2 + len(SCALES))]
        return [*levels, levels[-1][..., ::2, ::2]]


class FPN(Neck):
    """Feature pyramid network (Lin et al. 2017), mmdetection's: 1 x 1, sums from the coarse down, 3 x 3, all with bias.

    Args:
        in_channels: D_i of the pyramid's maps.
        strides: of them, pixels.
        out_channels: of each level, of which there is one more, every second cell of the last.
    """

    def __init__(self, in_channels: Sequence[int], strides: Sequence[float], out_channels: int = 256) -> None:
        super().__init__()
        self.out_channels = [out_channels] * (len(in_channels) + 1)
        self.strides = [*strides, strides[-1] * 2]
        self.lateral_convs = nn.ModuleList(
            ConvNormAct(width, out_channels, 1, norm=False, activation=False) for width in in_channels
        )
        self.fpn_convs = nn.ModuleList(
            ConvNormAct(out_channels, out_channels, 3, norm=False, activation=False) for _ in in_channels
        )
        init_convs(self, nn.init.xavier_uniform_)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        sums = top_down([lateral(x) for lateral, x in zip(self.lateral_convs, maps, strict=True)], "nearest")
        levels = [conv(x) for conv, x in zip(self.fpn_convs, sums, strict=True)]
        return [*levels, levels[-1][..., ::2, ::2]]


class Necks(Neck):
    """One neck behind another."""

    def __init__(self, *necks: Neck) -> None:
        super().__init__()
        self.necks = nn.ModuleList(necks)
        self.out_channels, self.strides = necks[-1].out_channels, necks[-1].strides

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        for neck in self.necks:
            maps = neck(maps)
        return list(maps)


def top_down(maps: Sequence[Tensor], mode: str = "bilinear") -> list[Tensor]:
    """Maps, finest first, each with the resized sum of all coarser ones added."""
    sums = [maps[-1]]
    for x in reversed(maps[:-1]):
        coarse = resize(sums[0], x.shape) if mode == "bilinear" else F.interpolate(sums[0], x.shape[2:], mode=mode)
        sums.insert(0, x + coarse)
    return sums


def build_neck(kind: str, widths: Sequence[int], strides: Sequence[float], out_channels: int) -> Neck:
    """A neck for maps of a backbone.

    Args:
        kind: ``identity``; ``fpn`` for a pyramid; ``multilevel``, ``feature2pyramid``, ``simple`` (of the last map
            alone) or ``feature2pyramid+fpn`` for a plain backbone.
        widths: D_i of the maps.
        strides: of the maps, pixels.
        out_channels: of what comes out, where the neck leaves that open.

    Raises:
        ValueError: for another kind, or maps that it does not take.
    """
    plain = len(set(strides)) == 1
    if kind not in KINDS:
        raise ValueError(f"neck={kind!r}; allowed: {', '.join(KINDS)}")
    if kind not in (of_plain := [*PLAIN, "identity"] if plain else [k for k in KINDS if k not in PLAIN]):
        allowed = ", ".join(of_plain)
        shape = "are all of one size" if plain else "shrink from stage to stage"
        raise ValueError(f"neck={kind!r}: the backbone's maps {shape}; allowed for such: {allowed}")
    if not plain and any(2 * fine != coarse for fine, coarse in pairwise(strides)):
        raise ValueError(f"neck={kind!r}: strides {list(strides)} of the backbone's maps must double from map to map")
    return KINDS[kind](widths, strides, out_channels)


def _feature2pyramid(widths: Sequence[int], stride: float) -> Feature2Pyramid:
    _check_levels(widths)
    if len(set(widths)) > 1:
        raise ValueError(f"neck='feature2pyramid' takes maps of one width, found {list(widths)}")
    return Feature2Pyramid(widths[0], stride)


def _pyramid_fpn(widths: Sequence[int], strides: Sequence[float], out_channels: int) -> Neck:
    first = _feature2pyramid(widths, strides[0])
    return Necks(first, FPN(first.out_channels, first.strides, out_channels))


KINDS: dict[str, Callable[[Sequence[int], Sequence[float], int], Neck]] = {
    "identity": lambda widths, strides, out: IdentityNeck(widths, strides),
    "fpn": FPN,
    "multilevel": lambda widths, strides, out: MultiLevelNeck(widths, strides[0], out),
    "feature2pyramid": lambda widths, strides, out: _feature2pyramid(widths, strides[0]),
    "simple": lambda widths, strides, out: SimpleFeaturePyramid(widths[-1], strides[-1], out),
    "feature2pyramid+fpn": _pyramid_fpn,
}
PLAIN = ("multilevel", "feature2pyramid", "simple", "feature2pyramid+fpn")


def _check_levels(widths: Sequence[int]) -> None:
    if len(widths) != len(SCALES):
        raise ValueError(f"this neck takes {len(SCALES)} maps, found {len(widths)}: name {len(SCALES)} taps")


def _up(in_channels: int, out_channels: int) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(in_channels, out_channels, 2, 2)
