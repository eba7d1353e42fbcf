"""Heads on torch: what is put behind a backbone."""

from heads.cascade import CascadeRoIHead
from heads.detector import CascadeMaskRCNN, Detector, MaskRCNN
from heads.dino import DINOHead
from heads.linear import HeadSpec
from heads.mask_rcnn import StandardRoIHead
from heads.rpn import RPNHead

__all__ = [
    "CascadeMaskRCNN",
    "CascadeRoIHead",
    "DINOHead",
    "Detector",
    "HeadSpec",
    "MaskRCNN",
    "RPNHead",
    "StandardRoIHead",
]
