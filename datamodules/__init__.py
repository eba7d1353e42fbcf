"""Images, and any other samples, from sharded WebDataset tars."""

import common  # noqa: F401  # first: no file of somebody else's is in the place of a package
from datamodules.ade20k import ADE20KDataModule
from datamodules.albumentations_transforms import AlbumentationsImage, AlbumentationsViews, PipelineViews
from datamodules.coco import COCODataModule
from datamodules.detection_transforms import WindowRule
from datamodules.imagenet import ImageNetDataModule
from datamodules.imagenet_s import ImageNetSDataModule
from datamodules.multicrop import MultiCropConfig
from datamodules.position import Position
from datamodules.robustness import RobustnessDataModule, RobustnessSet
from datamodules.segmentation_transforms import LabelRule
from datamodules.shard_datamodule import ShardDataModule, Split
from datamodules.transforms import (
    AnswersTransform,
    EvaluationTransform,
    MultiCropTransform,
    ProbeTransform,
    Transform,
)

__all__ = [
    "ADE20KDataModule",
    "AlbumentationsImage",
    "AlbumentationsViews",
    "AnswersTransform",
    "COCODataModule",
    "EvaluationTransform",
    "ImageNetDataModule",
    "ImageNetSDataModule",
    "LabelRule",
    "MultiCropConfig",
    "MultiCropTransform",
    "PipelineViews",
    "Position",
    "ProbeTransform",
    "RobustnessDataModule",
    "RobustnessSet",
    "ShardDataModule",
    "Split",
    "Transform",
    "WindowRule",
]
