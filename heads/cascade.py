"""Cascade R-CNN's box and mask heads (Cai and Vasconcelos 2018), with the parameter names of mmdet's CascadeRoIHead."""

from collections.abc import Sequence

from torch import nn

from heads.bbox_head import BBoxHead
from heads.mask_head import MaskHead
from heads.roi_head import RoIHead


class CascadeRoIHead(RoIHead):
    """Stages of stricter IoU, each on the boxes that the one before refined; regression is class-agnostic.

    Losses are named ``s0.loss_cls`` and so on.

    Args:
        num_classes: of objects.
        in_channels: of the levels.
        fc_channels: of the box heads.
        mask_channels: of the mask heads.
        ious: of each stage.
        loss_weights: of each stage.
        stds: of each stage's deltas.
        num_samples, positive_fraction, strides, finest_scale, score_threshold, nms_iou, max_detections: see
            :class:`heads.roi_head.RoIHead`.
    """

    def __init__(
        self, num_classes: int, in_channels: int = 256, fc_channels: int = 1024, mask_channels: int = 256,
        ious: Sequence[float] = (0.5, 0.6, 0.7), loss_weights: Sequence[float] = (1.0, 0.5, 0.25),
        stds: Sequence[Sequence[float]] = (
            (0.1, 0.1, 0.2, 0.2), (0.05, 0.05, 0.1, 0.1), (0.033, 0.033, 0.067, 0.067),
        ),
        num_samples: int = 512, positive_fraction: float = 0.25, strides: Sequence[int] = (4, 8, 16, 32),
        finest_scale: float = 56.0, score_threshold: float = 0.05, nms_iou: float = 0.5, max_detections: int = 100,
    ) -> None:  # fmt: skip
        if not len(ious) == len(loss_weights) == len(stds) > 0:
            raise ValueError(
                f"cascade: ious={ious}, loss_weights={loss_weights} and stds={stds} must have one entry a stage, at "
                "least one"
            )
        super().__init__(
            ious, loss_weights, None, num_samples, positive_fraction, strides, finest_scale, score_threshold, nms_iou,
            max_detections,
        )  # fmt: skip
        self.bbox_head = nn.ModuleList(
            BBoxHead(num_classes, in_channels, fc_channels, stds=s, class_agnostic=True) for s in stds
        )
        self.mask_head = nn.ModuleList(MaskHead(num_classes, in_channels, mask_channels) for _ in stds)

    def stages(self) -> list[tuple[str, BBoxHead, MaskHead]]:
        heads = zip(self.bbox_head, self.mask_head, strict=True)
        return [(f"s{i}.", box, mask) for i, (box, mask) in enumerate(heads)]  # type: ignore[misc]
