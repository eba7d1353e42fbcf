"""Detectors behind a neck: proposals, then boxes and masks; parameter names are mmdet's.

Shapes: B images, m boxes of an image's ground truth, K classes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from heads.boxes import Sizes
from heads.cascade import CascadeRoIHead
from heads.mask_rcnn import StandardRoIHead
from heads.roi_head import RoIHead, Targets
from heads.rpn import RPNHead

CELLS = 14.0
"""Boxes of fewer cells a side of the finest level are read there: 56 pixels of stride 4."""


class Detector(nn.Module):
    """A region proposal network and what classifies and refines its proposals.

    Args:
        rpn_head: reads every level.
        roi_head: reads the first levels.
        size_divisor: of the padding an image would have by itself; anchors centred beyond it take no part in training.
    """

    def __init__(self, rpn_head: RPNHead, roi_head: RoIHead, size_divisor: int = 32) -> None:
        super().__init__()
        self.rpn_head, self.roi_head, self.size_divisor = rpn_head, roi_head, size_divisor

    def loss(
        self, levels: Sequence[Tensor], targets: Targets, sizes: Sizes, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """``loss``, the sum of the others; ``loss_rpn_cls``, ``loss_rpn_bbox``; and those of the RoI head.

        Every parameter is part of the graph, boxes or none.

        Args:
            levels: maps (B, C, h, w) of a neck, from the finest.
            targets: of each image: ``boxes`` (m, 4) in pixels of the input, ``labels`` (m) integers below K, ``masks``
                (m, H, W) bitmaps of the padded size; m may be 0.
            sizes: (h, w) of each image without padding.
            generator: of the CPU, from which samples are drawn; None is torch's own.
        """
        divisor = self.size_divisor
        padded = [(-(-h // divisor) * divisor, -(-w // divisor) * divisor) for h, w in sizes]
        logits, deltas = self.rpn_head(levels)
        wanted = self.rpn_head.targets(levels, [t["boxes"] for t in targets], sizes, padded, generator)
        losses = {name: value.sum() for name, value in self.rpn_head.loss(logits, deltas, wanted).items()}
        proposals = self.rpn_head.proposals(logits, deltas, sizes, *self.rpn_head.train_proposals)
        losses |= self.roi_head.loss(levels, [boxes for boxes, _ in proposals], targets, sizes, generator)
        return {"loss": torch.stack([v for k, v in losses.items() if "loss" in k]).sum(), **losses}

    @torch.no_grad()
    def predict(self, levels: Sequence[Tensor], sizes: Sizes, original_sizes: Sizes) -> list[dict[str, Tensor]]:
        """Detections of each image in its original frame: ``boxes`` (d, 4), ``scores`` (d) by falling score, ``labels``
        (d) and ``masks`` (d, h, w) booleans of the original size.

        Args:
            levels: maps (B, C, h, w) of a neck, from the finest.
            sizes: (h, w) of each image without padding, as it was given.
            original_sizes: (h, w) of each before it was resized.
        """
        logits, deltas = self.rpn_head(levels)
        proposals = self.rpn_head.proposals(logits, deltas, sizes, *self.rpn_head.test_proposals)
        return self.roi_head.predict(levels, [boxes for boxes, _ in proposals], sizes, original_sizes)


class CascadeMaskRCNN(Detector):
    """Cascade Mask R-CNN as mmdet's base configuration has it.

    Args:
        num_classes: of objects.
        in_channels: of the levels.
        rpn_channels: of the region proposal network.
        fc_channels: of the box heads.
        mask_channels: of the mask heads.
        strides: of the levels, in pixels; the last is read by the region proposal network only.
        rpn_samples: anchors trained on in an image.
        allowed_border: see :class:`heads.rpn.RPNHead`.
        train_proposals, test_proposals: (candidates of a level before suppression, proposals of an image).
        roi_samples: candidates trained on in an image, at each stage.
        score_threshold: detections score strictly more.
        nms_iou: an IoU strictly over it suppresses, within a class.
        max_detections: of an image.
    """

    def __init__(
        self, num_classes: int, in_channels: int = 256, rpn_channels: int = 256, fc_channels: int = 1024,
        mask_channels: int = 256, strides: Sequence[int] = (4, 8, 16, 32, 64), rpn_samples: int = 256,
        allowed_border: int = 0, train_proposals: tuple[int, int] = (2000, 2000),
        test_proposals: tuple[int, int] = (1000, 1000), roi_samples: int = 512, score_threshold: float = 0.05,
        nms_iou: float = 0.5, max_detections: int = 100,
    ) -> None:  # fmt: skip
        super().__init__(
            RPNHead(
                in_channels, rpn_channels, strides, num_samples=rpn_samples, allowed_border=allowed_border,
                train_proposals=train_proposals, test_proposals=test_proposals,
            ),
            CascadeRoIHead(
                num_classes, in_channels, fc_channels, mask_channels, num_samples=roi_samples, strides=strides[:-1],
                finest_scale=CELLS * strides[0], score_threshold=score_threshold, nms_iou=nms_iou,
                max_detections=max_detections,
            ),
        )  # fmt: skip


class MaskRCNN(Detector):
    """Plain Mask R-CNN as mmdet's base configuration has it: one stage, L1 regression losses, anchors over the edges.

    Arguments are those of :class:`CascadeMaskRCNN`.
    """

    def __init__(
        self, num_classes: int, in_channels: int = 256, rpn_channels: int = 256, fc_channels: int = 1024,
        mask_channels: int = 256, strides: Sequence[int] = (4, 8, 16, 32, 64), rpn_samples: int = 256,
        allowed_border: int = -1, train_proposals: tuple[int, int] = (2000, 1000),
        test_proposals: tuple[int, int] = (1000, 1000), roi_samples: int = 512, score_threshold: float = 0.05,
        nms_iou: float = 0.5, max_detections: int = 100,
    ) -> None:  # fmt: skip
        super().__init__(
            RPNHead(
                in_channels, rpn_channels, strides, num_samples=rpn_samples, allowed_border=allowed_border, beta=0.0,
                train_proposals=train_proposals, test_proposals=test_proposals,
            ),
            StandardRoIHead(
                num_classes, in_channels, fc_channels, mask_channels, num_samples=roi_samples, strides=strides[:-1],
                finest_scale=CELLS * strides[0], score_threshold=score_threshold, nms_iou=nms_iou,
                max_detections=max_detections,
            ),
        )  # fmt: skip
