"""Mask R-CNN's box and mask head (He et al. 2017), with the parameter names of mmdet's StandardRoIHead."""

from collections.abc import Sequence

from heads.bbox_head import BBoxHead
from heads.mask_head import MaskHead
from heads.roi_head import RoIHead


class StandardRoIHead(RoIHead):
    """One stage with deltas for each class.

    Defaults are those of mmdet's base Mask R-CNN, which differs from its cascade in more than the stages: the
    regression loss is L1, and a box of the truth takes its best candidates where their IoU is at least 0.5.

    Args:
        num_classes: of objects.
        in_channels: of the levels.
        fc_channels: of the box head.
        mask_channels: of the mask head.
        iou: from which a candidate is positive.
        stds: of the deltas.
        beta: of the smooth L1 loss; 0 is L1.
        best_iou, num_samples, positive_fraction, strides, finest_scale, score_threshold, nms_iou, max_detections: see
            :class:`heads.roi_head.RoIHead`.
    """

    def __init__(
        self, num_classes: int, in_channels: int = 256, fc_channels: int = 1024, mask_channels: int = 256,
        iou: float = 0.5, stds: Sequence[float] = (0.1, 0.1, 0.2, 0.2), beta: float = 0.0,
        best_iou: float | None = 0.5, num_samples: int = 512, positive_fraction: float = 0.25,
        strides: Sequence[int] = (4, 8, 16, 32), finest_scale: float = 56.0, score_threshold: float = 0.05,
        nms_iou: float = 0.5, max_detections: int = 100,
    ) -> None:  # fmt: skip
        super().__init__(
            (iou,), (1.0,), best_iou, num_samples, positive_fraction, strides, finest_scale, score_threshold, nms_iou,
            max_detections,
        )  # fmt: skip
        self.bbox_head = BBoxHead(num_classes, in_channels, fc_channels, stds=stds, class_agnostic=False, beta=beta)
        self.mask_head = MaskHead(num_classes, in_channels, mask_channels)

    def stages(self) -> list[tuple[str, BBoxHead, MaskHead]]:
        return [("", self.bbox_head, self.mask_head)]
