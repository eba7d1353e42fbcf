"""Pieces of dense heads, with the parameter names of the published ones."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvNormAct(nn.Module):
    """A convolution that keeps the size, a batch norm and a ReLU, the last two where they are wanted.

    Parameters are ``conv`` and ``bn``; before a norm the convolution has no bias.

    Args:
        in_channels: of the input.
        out_channels: of the output.
        kernel_size: odd.
        norm: batch normalisation (eps 1e-5, momentum 0.1).
        activation: ReLU at the end.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, norm: bool = True, activation: bool = True
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=not norm)
        if norm:
            self.bn = nn.BatchNorm2d(out_channels)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_channels, h, w) to (B, out_channels, h, w)."""
        x = self.conv(x)
        if hasattr(self, "bn"):
            x = self.bn(x)
        return F.relu(x) if self.activation else x


class ChannelLayerNorm(nn.Module):
    """Layer normalisation over the channels of a map (eps 1e-6)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, h, w), each position normalised by itself."""
        return F.layer_norm(x.movedim(1, -1), self.weight.shape, self.weight, self.bias, 1e-6).movedim(-1, 1)


def resize(x: Tensor, size: tuple[int, int] | torch.Size) -> Tensor:
    """(B, C, h, w) to (B, C, *size), bilinear, pixel centres at halves."""
    return F.interpolate(x, size=tuple(size[-2:]), mode="bilinear", align_corners=False)


def init_convs(module: nn.Module, weight: Callable[[Tensor], Tensor]) -> None:
    """Fills every convolution's weight; its bias is 0."""
    for layer in module.modules():
        if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
            weight(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
