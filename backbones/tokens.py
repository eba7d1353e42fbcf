"""From an image to a token sequence: patches, positions, and where CLS and registers stand.

Shapes: B images, D embed_dim, h x w patch grid, N = h·w patches, L tokens.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.base import Features
from backbones.ops import fixed, is_free, is_traced
from common.precision import at_least_float32


class Layout(NamedTuple):
    """Where things stand in a sequence of L tokens."""

    grid: tuple[int, int]
    patches: Tensor
    """(N) positions of the patches, in raster order."""
    readout: Tensor
    """(T) positions of the tokens the embedding is the mean of."""
    registers: Tensor | None = None
    """(R) positions of the registers, where the family has any."""
    twin: Tensor | None = None
    """(1) position of a class token that stands in the sequence too and is not read out, where there is one."""

    def readout_mean(self, tokens: Tensor) -> Tensor:
        """(B, L, ...) to (B, ...)."""
        return tokens[:, self.readout].mean(1)

    def split(self, tokens: Tensor) -> Features:
        """(B, L, D) normed tokens to :class:`Features`."""
        patches = tokens[:, self.patches].transpose(1, 2).unflatten(-1, self.grid)
        return Features(
            self.readout_mean(tokens), patches, None if self.registers is None else tokens[:, self.registers]
        )

    def rows_to_maps(self, rows: Tensor) -> Tensor:
        """(B, heads, R, L) rows of a mixing matrix to (B, R, heads, h, w)."""
        return rows[..., self.patches].transpose(1, 2).unflatten(-1, self.grid)


class PatchEmbed(nn.Module):
    """Non-overlapping patches by one strided convolution."""

    def __init__(self, patch_size: int, embed_dim: int, in_chans: int = 3) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, patch_size)

    def grid(self, images: Tensor) -> tuple[int, int]:
        """The patch grid of images. ValueError names the side that is no multiple of the patch."""
        return patch_grid((images.shape[-2], images.shape[-1]), self.patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) to (B, N, D)."""
        height, width = self.grid(images)
        if is_traced() and is_free(height, width):  # a file refuses a size that it would else cut to whole patches
            images = images.reshape(*images.shape[:2], height * self.patch_size, width * self.patch_size)
        return self.proj(images).flatten(2).transpose(1, 2)


def patch_grid(size: int | tuple[int, int], patch_size: int) -> tuple[int, int]:
    """Patches along height and width. ValueError names the side that is no multiple of the patch."""
    height, width = (size, size) if isinstance(size, int) else size
    for name, side in (("height", height), ("width", width)):
        side = fixed(side) if isinstance(side, Tensor) else side
        if side < patch_size or side % patch_size:
            raise ValueError(f"image {name} {side} is not a multiple of patch_size {patch_size}: set img_size or crop")
    return height // patch_size, width // patch_size


def resample_pos_embed(pos: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Bicubic resampling of patch positions (1, N, D) from one grid to another.

    As the published weights were trained: by the scale factor (side + 0.1) / old side. Where that rule would give
    another number of tokens, by size.
    """
    if is_traced() and is_free(*new):
        return _resample_to_any(pos, old, new)
    if old == new:
        return pos
    grid = pos.unflatten(1, old).permute(0, 3, 1, 2)
    scale = tuple((n + 0.1) / o for n, o in zip(new, old, strict=True))
    by_scale = all(math.floor(o * s) == n for o, s, n in zip(old, scale, new, strict=True))
    if by_scale:
        grid = F.interpolate(grid, scale_factor=scale, mode="bicubic")
    else:
        grid = F.interpolate(grid, size=new, mode="bicubic")
    return grid.flatten(2).transpose(1, 2)


def _resample_to_any(pos: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """The same to a grid of free size, by products with the matrices of both axes."""
    device, dtype = pos.device, at_least_float32(pos).dtype
    targets = [torch.arange(n, device=device).to(dtype) for n in new]
    sides = [torch.ones_like(target).sum() for target in targets]
    same = (sides[0] == old[0]) & (sides[1] == old[1])
    grid = pos.to(dtype).unflatten(1, old).permute(0, 3, 1, 2)
    vertical, horizontal = (
        _bicubic(target, o, (n + torch.where(same, 0.0, 0.1)) / o)
        for target, n, o in zip(targets, sides, old, strict=True)
    )
    return (vertical @ grid @ horizontal.transpose(0, 1)).flatten(2).transpose(1, 2).to(pos.dtype)


def _bicubic(target: Tensor, old: int, scale: Tensor) -> Tensor:
    """(n, old) what each target cell 0..n-1 takes of the old ones: Keys' kernel with a = -3/4, edges repeated."""
    source = (target + 0.5) / scale - 0.5
    first = torch.floor(source)
    away = source - first
    cells = torch.arange(old, device=target.device)
    weights = torch.zeros_like(source)[:, None]
    for tap in (-1, 0, 1, 2):
        x = (away - tap).abs()[:, None]
        near = ((1.25 * x - 2.25) * x) * x + 1
        far = ((-0.75 * x + 3.75) * x - 6) * x + 3
        at = (first + tap).clamp(0, old - 1)[:, None]
        weights = weights + torch.where(x <= 1, near, far) * (at == cells).to(target.dtype)
    return weights


def cls_first(patches: Tensor, cls: Tensor, pos: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """(B, N, D) patches behind the class token (B, 1, D), with positions (1, 1 + N_old, D) resampled to their grid."""
    patch_pos = resample_pos_embed(pos[:, 1:], old, new)
    return torch.cat([cls, patches], 1) + torch.cat([pos[:, :1], patch_pos], 1)


def register_positions(num_patches: int, num_registers: int, device: torch.device | None = None) -> Tensor:
    """Mamba-Reg's even spread: ⌊N/(R+1)⌋ patches before each register; (R)."""
    gap = num_patches // (num_registers + 1)
    return gap + torch.arange(num_registers, device=device) * (gap + 1)


def other_positions(length: int, taken: Tensor) -> Tensor:
    """Positions 0..length-1 that are not among the ``taken`` ones (in order), in order."""
    free = torch.arange(length - fixed(taken.shape[0]), device=taken.device)
    before = taken - torch.arange(fixed(taken.shape[0]), device=taken.device)  # free ones before each taken one
    return free + (free[:, None] >= before).sum(1)
