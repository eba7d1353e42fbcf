"""Features of boxes from the levels of a pyramid.

Shapes: B images, n boxes, C channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.ops import roi_align

from common.precision import at_least_float32


def with_image(boxes: Sequence[Tensor]) -> Tensor:
    """Boxes (n_b, 4) of each image to rows (Σ n_b, 5): image, box."""
    return torch.cat([torch.cat([b.new_full((len(b), 1), i), b], 1) for i, b in enumerate(boxes)])


def level_of(rois: Tensor, num_levels: int, finest_scale: float = 56.0) -> Tensor:
    """Level (n) of each row (n, 5): ⌊log2(√area / finest_scale + 1e-6)⌋, from 0 to ``num_levels`` - 1."""
    side = ((rois[:, 3] - rois[:, 1]) * (rois[:, 4] - rois[:, 2])).sqrt()
    return (side / finest_scale + 1e-6).log2().floor().clamp(0, num_levels - 1).long()


def roi_features(
    levels: Sequence[Tensor], rois: Tensor, size: int, strides: Sequence[int] = (4, 8, 16, 32),
    finest_scale: float = 56.0,
) -> Tensor:  # fmt: skip
    """RoIAlign (He et al. 2017) of each box on the level of its size, aligned, as many samples as a bin has cells.

    Boxes that reach over a map's edge are not clipped first. The result is connected to every level, boxes or none.

    Args:
        levels: maps (B, C, h, w), from the finest.
        rois: (n, 5) image, box; at least in float32.
        size: bins on each side.
        strides: of the levels, in pixels.
        finest_scale: √area from twice of which a box is on the second level.

    Returns:
        (n, C, size, size) in the maps' number format.
    """
    level = level_of(rois, len(levels), finest_scale)
    parts = []
    for i, (features, stride) in enumerate(zip(levels, strides, strict=True)):
        wide = at_least_float32(features)  # coordinates of boxes need it too
        parts.append(roi_align(wide, rois[level == i].to(wide.dtype), size, 1 / stride, 0, True))
    back = level.argsort(stable=True).argsort()
    return torch.cat(parts)[back].to(levels[0].dtype)
