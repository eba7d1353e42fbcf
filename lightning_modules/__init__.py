"""Training and evaluation: the only place that joins backbones and metrics."""

from lightning_modules.dino import DINO
from lightning_modules.dino_head import DINOHead
from lightning_modules.dino_loss import DINOLoss

__all__ = ["DINO", "DINOHead", "DINOLoss"]
