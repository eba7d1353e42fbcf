"""Metrics on torch and torchmetrics."""

from metrics.binary_auc import BinaryAUC
from metrics.functional import Comparison, binary_auc, masks_to_grid, pooled_binary_auc, position_map, roc_curve
from metrics.intervals import Difference, bootstrap_means, folded, interval, paired_difference
from metrics.knn import KNNAccuracy, knn_scores, topk_accuracy
from metrics.mixing_rank import effective_rank, numerical_rank, partition, rank_bound, singular_values

__all__ = [
    "BinaryAUC", "Comparison", "Difference", "KNNAccuracy", "binary_auc", "bootstrap_means", "effective_rank",
    "folded", "interval", "knn_scores", "masks_to_grid", "numerical_rank", "paired_difference", "partition",
    "pooled_binary_auc", "position_map", "rank_bound", "roc_curve", "singular_values", "topk_accuracy",
]  # fmt: skip
