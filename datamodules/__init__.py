"""Images from sharded WebDataset tars."""

from datamodules.imagenet import ImageNetDataModule
from datamodules.imagenet_s import ImageNetSDataModule
from datamodules.multicrop import MultiCropConfig
from datamodules.robustness import RobustnessDataModule, RobustnessSet

__all__ = ["ImageNetDataModule", "ImageNetSDataModule", "MultiCropConfig", "RobustnessDataModule", "RobustnessSet"]
