"""Heads on torch: what is put behind a backbone."""

from heads.cascade import CascadeRoIHead
from heads.detector import CascadeMaskRCNN, Detector, MaskRCNN
from heads.dino import DINOHead
from heads.linear import HeadSpec
from heads.mask_rcnn import StandardRoIHead
from heads.necks import (
    FPN,
    Feature2Pyramid,
    IdentityNeck,
    MultiLevelNeck,
    Neck,
    SimpleFeaturePyramid,
    build_neck,
)
from heads.rpn import RPNHead
from heads.upernet import FCNHead, LinearSegmentationHead, UPerHead, segmentation_loss

__all__ = [
    "FPN", "CascadeMaskRCNN", "CascadeRoIHead", "DINOHead", "Detector", "FCNHead", "Feature2Pyramid", "HeadSpec",
    "IdentityNeck", "LinearSegmentationHead", "MaskRCNN", "MultiLevelNeck", "Neck", "RPNHead", "SimpleFeaturePyramid",
    "StandardRoIHead", "UPerHead", "build_neck", "segmentation_loss",
]  # fmt: skip
