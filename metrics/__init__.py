"""Metrics on torch and torchmetrics."""

from metrics.binary_auc import BinaryAUC
from metrics.functional import binary_auc, masks_to_grid
from metrics.knn import KNNAccuracy, knn_scores, topk_accuracy

__all__ = ["BinaryAUC", "KNNAccuracy", "binary_auc", "knn_scores", "masks_to_grid", "topk_accuracy"]
