"""Heads on torch: what is put behind a backbone."""

from heads.dino import DINOHead
from heads.linear import HeadSpec
from heads.necks import (
    FPN,
    Feature2Pyramid,
    IdentityNeck,
    MultiLevelNeck,
    Neck,
    SimpleFeaturePyramid,
    build_neck,
)
from heads.upernet import FCNHead, LinearSegmentationHead, UPerHead, segmentation_loss

__all__ = [
    "FPN", "DINOHead", "FCNHead", "Feature2Pyramid", "HeadSpec", "IdentityNeck", "LinearSegmentationHead",
    "MultiLevelNeck", "Neck",
    "SimpleFeaturePyramid", "UPerHead", "build_neck", "segmentation_loss",
]  # fmt: skip
