"""Training and evaluation: the only place that joins backbones, heads and metrics."""

import common  # noqa: F401  # first: no file of somebody else's is in the place of a package
from heads import DINOHead, HeadSpec
from lightning_modules.binary_auc import BinaryAUCEvaluation
from lightning_modules.detection import InstanceSegmentation
from lightning_modules.dino import DINO
from lightning_modules.dino_loss import DINOLoss
from lightning_modules.ema import EMATeacher
from lightning_modules.knn import KNN
from lightning_modules.linear_probe import LinearProbe
from lightning_modules.mixing_rank import TokenMixingRanks
from lightning_modules.patch_knn import PatchKNN
from lightning_modules.pretraining import Pretraining
from lightning_modules.robustness import RobustnessEvaluation
from lightning_modules.segmentation import SemanticSegmentation
from lightning_modules.supervised import Supervised
from lightning_modules.token_statistics import TokenStatistics

__all__ = [
    "DINO",
    "KNN",
    "BinaryAUCEvaluation",
    "DINOHead",
    "DINOLoss",
    "EMATeacher",
    "HeadSpec",
    "InstanceSegmentation",
    "LinearProbe",
    "PatchKNN",
    "Pretraining",
    "RobustnessEvaluation",
    "SemanticSegmentation",
    "Supervised",
    "TokenMixingRanks",
    "TokenStatistics",
]
