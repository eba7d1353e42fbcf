"""Images from sharded WebDataset tars."""

from datamodules.imagenet import ImageNetDataModule
from datamodules.imagenet_s import ImageNetSDataModule
from datamodules.multicrop import MultiCropConfig

__all__ = ["ImageNetDataModule", "ImageNetSDataModule", "MultiCropConfig"]
