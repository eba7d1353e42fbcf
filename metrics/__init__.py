"""Metrics on torch and torchmetrics."""

from metrics.binary_auc import BinaryAUC
from metrics.functional import binary_auc, masks_to_grid, roc_curve
from metrics.knn import KNNAccuracy, knn_scores, topk_accuracy
from metrics.mixing_rank import effective_rank, numerical_rank, partition, rank_bound, singular_values

__all__ = [
    "BinaryAUC", "KNNAccuracy", "binary_auc", "effective_rank", "knn_scores", "masks_to_grid", "numerical_rank",
    "partition", "rank_bound", "roc_curve", "singular_values", "topk_accuracy",
]  # fmt: skip
