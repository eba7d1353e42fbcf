"""Region proposals (Ren et al. 2015), with the parameter names and the arithmetic of mmdet's RPNHead.

Shapes: B images, L levels, A anchors a position, N anchors of an image, over all levels in order, y, x, ratio.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.precision import at_least_float32
from heads.boxes import DeltaCoder, Sizes, assign, grouped_nms, sample, smooth_l1


def anchors_of(
    shape: Sequence[int], stride: int, scale: float, ratios: Sequence[float], device: torch.device | None = None
) -> Tensor:
    """Anchors (h·w·A, 4) of one map, float32, in order y, x, ratio.

    The side is ``scale`` x ``stride``, w = side / √ratio, h = side · √ratio; centres are multiples of the stride,
    without half a stride's offset.

    Args:
        shape: (h, w) of the map.
        stride: pixels between its positions.
        scale: of the side.
        ratios: h / w.
        device: where they are made.
    """
    roots = torch.tensor(ratios, device=device).sqrt()
    half = torch.stack([scale * stride * (1 / roots), scale * stride * roots], -1) * 0.5
    y, x = (torch.arange(n, device=device, dtype=torch.float32) * stride for n in shape)
    centres = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)[:, :, None].repeat(1, 1, 2, 1).flatten(2)
    return (centres[:, :, None] + torch.cat([-half, half], -1)).reshape(-1, 4)


@dataclass
class RPNTargets:
    """What anchors are trained towards.

    Args:
        assigned: (B, N), -2 left out, -1 neither, 0 background, k the k-th box of the truth from 1.
        positive: (B, N) the sampled objects.
        sampled: (B, N) these and the sampled background.
        deltas: (P, 4) of the positives, by image and anchor.
        avg_factor: what losses are divided by.
    """

    assigned: Tensor
    positive: Tensor
    sampled: Tensor
    deltas: Tensor
    avg_factor: int


class RPNHead(nn.Module):
    """A 3×3 convolution and two 1×1: objectness and deltas of each anchor; weights from N(0, 0.01), biases 0.

    Defaults are those of mmdet's base Cascade Mask R-CNN.

    Args:
        in_channels: of every level.
        feat_channels: of the 3×3 convolution.
        strides: of the levels, in pixels.
        scale: side of an anchor in strides.
        ratios: h / w of a position's anchors.
        positive_iou, negative_iou, best_iou: see :func:`heads.boxes.assign`.
        num_samples: anchors trained on in an image.
        positive_fraction: at most, of these.
        allowed_border: pixels that an anchor trained on may reach over the image's edges; negative for any number.
        beta: of the smooth L1 loss; 0 is L1.
        nms_iou: an IoU strictly over it suppresses, within a level.
        train_proposals, test_proposals: (candidates of a level before suppression, proposals of an image).
    """

    def __init__(
        self, in_channels: int = 256, feat_channels: int = 256, strides: Sequence[int] = (4, 8, 16, 32, 64),
        scale: float = 8.0, ratios: Sequence[float] = (0.5, 1.0, 2.0), positive_iou: float = 0.7,
        negative_iou: float = 0.3, best_iou: float | None = 0.3, num_samples: int = 256,
        positive_fraction: float = 0.5, allowed_border: int = 0, beta: float = 1 / 9, nms_iou: float = 0.7,
        train_proposals: tuple[int, int] = (2000, 2000), test_proposals: tuple[int, int] = (1000, 1000),
    ) -> None:  # fmt: skip
        super().__init__()
        if negative_iou > positive_iou:
            raise ValueError(f"rpn: negative_iou={negative_iou} must be at most positive_iou={positive_iou}")
        self.strides, self.scale, self.ratios = tuple(strides), scale, tuple(ratios)
        self.positive_iou, self.negative_iou, self.best_iou = positive_iou, negative_iou, best_iou
        self.num_samples, self.positive_fraction = num_samples, positive_fraction
        self.allowed_border, self.beta, self.nms_iou = allowed_border, beta, nms_iou
        self.train_proposals, self.test_proposals = train_proposals, test_proposals
        self.coder = DeltaCoder()
        self.rpn_conv = nn.Conv2d(in_channels, feat_channels, 3, padding=1)
        self.rpn_cls = nn.Conv2d(feat_channels, len(ratios), 1)
        self.rpn_reg = nn.Conv2d(feat_channels, 4 * len(ratios), 1)
        for layer in (self.rpn_conv, self.rpn_cls, self.rpn_reg):  # mmdet's init_cfg: Normal, std 0.01
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)

    def forward(self, levels: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Levels (B, in_channels, h, w) to their logits (B, A, h, w) and deltas (B, 4·A, h, w)."""
        if len(levels) != len(self.strides):
            raise ValueError(f"rpn: {len(levels)} levels; strides={self.strides} name {len(self.strides)}")
        hidden = [F.relu(self.rpn_conv(level)) for level in levels]
        return [self.rpn_cls(h) for h in hidden], [self.rpn_reg(h) for h in hidden]

    def anchors(self, levels: Sequence[Tensor]) -> list[Tensor]:
        """(h·w·A, 4) of each level (…, h, w), in float32."""
        return [
            anchors_of(level.shape[-2:], stride, self.scale, self.ratios, level.device)
            for level, stride in zip(levels, self.strides, strict=True)
        ]

    def _taking_part(self, levels: Sequence[Tensor], size: tuple[int, int], padded: tuple[int, int]) -> Tensor:
        """(N) anchors centred on the image with its padding, and inside it as far as ``allowed_border`` asks."""
        parts = []
        for level, stride in zip(levels, self.strides, strict=True):
            y, x = (
                torch.arange(n, device=level.device) < math.ceil(pixels / stride)
                for n, pixels in zip(level.shape[-2:], padded, strict=True)
            )
            parts.append((y[:, None] & x).flatten().repeat_interleave(len(self.ratios)))
        valid = torch.cat(parts)
        if self.allowed_border < 0:
            return valid
        x1, y1, x2, y2 = torch.cat(self.anchors(levels)).unbind(-1)
        border, (h, w) = self.allowed_border, size
        return valid & (x1 >= -border) & (y1 >= -border) & (x2 < w + border) & (y2 < h + border)

    @torch.no_grad()
    def targets(
        self, levels: Sequence[Tensor], truth: Sequence[Tensor], sizes: Sizes, padded: Sizes | None = None,
        generator: torch.Generator | None = None,
    ) -> RPNTargets:  # fmt: skip
        """What is asked of each anchor.

        Args:
            levels: maps of the levels, of which the sizes are read.
            truth: boxes (m, 4) of each image, possibly none.
            sizes: (h, w) of each image without padding.
            padded: (h, w) of each image with the padding it would have by itself, beyond which no anchor takes part;
                None is the whole map.
            generator: of :func:`heads.boxes.sample`.
        """
        anchors = torch.cat(self.anchors(levels))
        assigned = torch.full((len(sizes), len(anchors)), -2, device=anchors.device)
        positive, sampled = (torch.zeros_like(assigned, dtype=torch.bool) for _ in range(2))
        deltas, number = [], 0
        for b, (boxes, size) in enumerate(zip(truth, sizes, strict=True)):
            everywhere = tuple(n * self.strides[0] for n in levels[0].shape[-2:])
            inside = self._taking_part(levels, size, everywhere if padded is None else padded[b])
            there = at_least_float32(boxes).to(anchors.device)
            assigned[b, inside] = assign(
                anchors[inside].to(there.dtype), there, self.positive_iou, self.negative_iou, self.best_iou
            )
            chosen, background = sample(assigned[b], self.num_samples, self.positive_fraction, generator)
            positive[b, chosen], sampled[b, chosen], sampled[b, background] = True, True, True
            deltas.append(self.coder.encode(anchors[chosen], there[assigned[b, chosen] - 1]))
            number += max(len(chosen), 1) + max(len(background), 1)  # as mmdet counts
        return RPNTargets(assigned, positive, sampled, torch.cat(deltas), number)

    def loss(self, logits: Sequence[Tensor], deltas: Sequence[Tensor], targets: RPNTargets) -> dict[str, Tensor]:
        """``loss_rpn_cls`` and ``loss_rpn_bbox``, (L) each, one a level, from what forward gave.

        Sums of the sampled anchors' binary cross entropy and of the positives' smooth L1, divided by the number of
        sampled anchors over the whole batch.
        """
        counts = [logit[0].numel() for logit in logits]
        ends = targets.deltas.new_zeros(*targets.positive.shape, 4)
        ends[targets.positive] = targets.deltas
        rows = zip(
            self._rows(logits, 1), self._rows(deltas, 4), targets.positive.split(counts, 1),
            targets.sampled.split(counts, 1), ends.split(counts, 1), strict=True,
        )  # fmt: skip
        classification, regression = [], []
        for logit, delta, positive, sampled, wanted in rows:
            logit = logit[..., 0][sampled]
            truth = positive[sampled].to(logit)
            classification.append(F.binary_cross_entropy_with_logits(logit, truth, reduction="sum"))
            regression.append(smooth_l1(delta[positive], wanted[positive].to(delta), self.beta))
        return {
            "loss_rpn_cls": torch.stack(classification) / targets.avg_factor,
            "loss_rpn_bbox": torch.stack(regression) / targets.avg_factor,
        }

    @torch.no_grad()
    def proposals(
        self, logits: Sequence[Tensor], deltas: Sequence[Tensor], sizes: Sizes, before: int, most: int,
    ) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
        """Boxes (n, 4) and scores (n) of each image, by falling score, without gradient.

        Args:
            logits, deltas: what forward gave.
            sizes: (h, w) of each image without padding, to which boxes are clipped.
            before: candidates of a level before suppression, those of the highest scores.
            most: proposals of an image.
        """
        anchors = self.anchors(logits)
        scores_of, deltas_of = [r[..., 0].sigmoid() for r in self._rows(logits, 1)], self._rows(deltas, 4)
        found = []
        for b, size in enumerate(sizes):
            boxes, scores, belongs = [], [], []
            for level, (anchor, score, delta) in enumerate(zip(anchors, scores_of, deltas_of, strict=True)):
                best, index = score[b].sort(descending=True, stable=True)
                best, index = best[:before], index[:before]
                boxes.append(self.coder.decode(anchor[index].to(delta.dtype), delta[b, index], size))
                scores.append(best)
                belongs.append(torch.full_like(index, level))
            box, score, group = torch.cat(boxes), torch.cat(scores), torch.cat(belongs)
            kept = (box[:, 2:] > box[:, :2]).all(1)
            box, score, group = box[kept], score[kept], group[kept]
            kept = grouped_nms(box, score, group, self.nms_iou)[:most]
            found.append((box[kept], score[kept]))
        return found

    @staticmethod
    def _rows(maps: Sequence[Tensor], width: int) -> list[Tensor]:
        """(B, A·width, h, w) of each level to (B, h·w·A, width), at least in float32."""
        return [at_least_float32(m).permute(0, 2, 3, 1).reshape(len(m), -1, width) for m in maps]
