"""Training and evaluation: the only place that joins backbones and metrics."""

from lightning_modules.binary_auc import BinaryAUCEvaluation
from lightning_modules.dino import DINO
from lightning_modules.dino_head import DINOHead
from lightning_modules.dino_loss import DINOLoss
from lightning_modules.knn import KNN
from lightning_modules.linear_probe import HeadSpec, LinearProbe
from lightning_modules.rank import TokenMixingRanks
from lightning_modules.robustness import RobustnessEvaluation
from lightning_modules.supervised import Supervised

__all__ = [
    "DINO",
    "KNN",
    "BinaryAUCEvaluation",
    "DINOHead",
    "DINOLoss",
    "HeadSpec",
    "LinearProbe",
    "RobustnessEvaluation",
    "Supervised",
    "TokenMixingRanks",
]
