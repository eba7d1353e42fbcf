"""The mask head, what it is trained towards and how its masks are put into images; names are mmdet's FCNMaskHead.

Shapes: n boxes, m boxes of the ground truth, K classes, S side of a mask (28).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import roi_align

from common.precision import at_least_float32, exact
from heads.boxes import clip
from heads.layers import ConvNormAct

PIXELS_AT_ONCE = 2**24
"""Pixels of whole masks held as floating numbers, in targets and in pasting."""


class MaskHead(nn.Module):
    """3×3 convolutions, a transposed convolution to twice the side and one mask for each class.

    Weights start as mmdet's: Kaiming-normal by the fan out, biases 0.

    Args:
        num_classes: K.
        in_channels: of the features.
        channels: of the convolutions.
        num_convs: how many.
    """

    def __init__(self, num_classes: int, in_channels: int = 256, channels: int = 256, num_convs: int = 4) -> None:
        super().__init__()
        widths = [in_channels] + [channels] * num_convs
        self.convs = nn.ModuleList(
            ConvNormAct(a, b, 3, norm=False) for a, b in zip(widths[:-1], widths[1:], strict=True)
        )
        self.upsample = nn.ConvTranspose2d(widths[-1], channels, 2, stride=2)
        self.conv_logits = nn.Conv2d(channels, num_classes, 1)
        for layer in (*(block.conv for block in self.convs), self.upsample, self.conv_logits):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor) -> Tensor:
        """(n, in_channels, S / 2, S / 2) to logits (n, K, S, S), at least in float32."""
        for block in self.convs:
            features = block(features)
        return at_least_float32(self.conv_logits(F.relu(self.upsample(features))))


def of_class(masks: Tensor, labels: Tensor) -> Tensor:
    """(n, S, S) of (n, K, S, S): that of each box's class."""
    return masks[torch.arange(len(labels), device=labels.device), labels]


def mask_targets(bitmaps: Tensor, boxes: Tensor, matched: Tensor, side: int = 28) -> Tensor:
    """What the masks of boxes are trained towards: RoIAlign of whole bitmaps, from one half on.

    Args:
        bitmaps: (m, H, W) of an image, 0 or 1.
        boxes: (n, 4), clipped here to the bitmaps.
        matched: (n) which bitmap is a box's.
        side: S.

    Returns:
        (n, S, S) booleans.
    """
    boxes = clip(at_least_float32(boxes), bitmaps.shape[-2:])
    found = torch.zeros(len(boxes), side, side, dtype=torch.bool, device=boxes.device)
    step = max(1, PIXELS_AT_ONCE // max(bitmaps[:1].numel(), 1))
    for first in range(0, len(bitmaps), step):
        here = (matched >= first) & (matched < first + step)
        rois = torch.cat([(matched[here] - first).to(boxes)[:, None], boxes[here]], 1)
        maps = bitmaps[first : first + step, None].to(boxes)
        found[here] = roi_align(maps, rois, side, 1.0, 0, True)[:, 0] >= 0.5
    return found


def mask_loss(logits: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
    """Mean binary cross entropy of the masks of the true classes; 0 of a graph without boxes.

    Args:
        logits: (n, K, S, S).
        targets: (n, S, S) of :func:`mask_targets`.
        labels: (n) below K.
    """
    chosen = of_class(logits, labels)
    loss = F.binary_cross_entropy_with_logits(chosen, targets.to(chosen), reduction="sum")
    return loss / max(chosen.numel(), 1)


def _weights(low: Tensor, high: Tensor, pixels: int, side: int) -> Tensor:
    """(n, pixels, side) how much a mask's cells count at each pixel's centre: bilinear, and zero outside."""
    centres = torch.arange(pixels, device=low.device, dtype=low.dtype) + 0.5
    there = (centres - low[:, None]) / (high - low)[:, None] * side - 0.5
    cells = torch.arange(side, device=low.device, dtype=low.dtype)
    return (1 - (there[..., None] - cells).abs()).clamp(min=0)


def paste_masks(masks: Tensor, boxes: Tensor, size: Sequence[int], threshold: float = 0.5) -> Tensor:
    """Masks of boxes in their image: bilinear at pixel centres, zeros outside, from the threshold on.

    mmdet samples the mask with ``grid_sample``; bilinear weights of rows and of columns are two matrix products, which
    cost no grid. A box without area has no pixels.

    Args:
        masks: (n, S, S) probabilities.
        boxes: (n, 4) in the pixels of the image.
        size: (h, w) of the image.
        threshold: of the probability.

    Returns:
        (n, h, w) booleans.
    """
    pasted = torch.zeros(len(masks), *size, dtype=torch.bool, device=masks.device)
    step = max(1, PIXELS_AT_ONCE // max(size[0] * size[1], 1))
    # in float64, in which neither autocast nor TF32 rounds products
    for chunk, (x1, y1, x2, y2), out in zip(
        exact(masks).split(step), (b.unbind(1) for b in exact(boxes).split(step)), pasted.split(step), strict=True
    ):
        rows, columns = _weights(y1, y2, size[0], masks.shape[-1]), _weights(x1, x2, size[1], masks.shape[-1])
        area = ((x2 > x1) & (y2 > y1))[:, None, None]
        out.copy_((rows @ chunk @ columns.mT >= threshold) & area)
    return pasted
