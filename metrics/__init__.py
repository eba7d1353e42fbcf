"""Metrics on torch and torchmetrics."""

from metrics.average_precision import DetectionAP, bitmaps, run_lengths
from metrics.binary_auc import BinaryAUC
from metrics.block_rank import block_ranks, chunks, decay_block, triangle
from metrics.correlation import Coefficient, Correlation, correlation, mean_correlation
from metrics.functional import Comparison, binary_auc, masks_to_grid, position_map, roc_curve, sides
from metrics.intervals import (
    Difference,
    bootstrap_counts,
    bootstrap_means,
    difference_of,
    folded,
    interval,
    paired_difference,
)
from metrics.knn import KNNAccuracy, knn_scores, nearest_votes, topk_accuracy
from metrics.mixing_rank import effective_rank, numerical_rank, rank_bound, singular_values
from metrics.pooled import POOLED_DRAWS, PooledAUC
from metrics.rank_claims import Claim, rank_claims
from metrics.segmentation import SegmentationScores, segmentation_areas, segmentation_scores
from metrics.token_statistics import (
    grid_diagonal,
    mixing_distance,
    norm_statistics,
    patch_distances,
    row_entropy,
    uniform_distance,
)

__all__ = [
    "POOLED_DRAWS",
    "BinaryAUC",
    "Claim",
    "Coefficient",
    "Comparison",
    "Correlation",
    "DetectionAP",
    "Difference",
    "KNNAccuracy",
    "PooledAUC",
    "SegmentationScores",
    "binary_auc",
    "bitmaps",
    "block_ranks",
    "bootstrap_counts",
    "bootstrap_means",
    "chunks",
    "correlation",
    "decay_block",
    "difference_of",
    "effective_rank",
    "folded",
    "grid_diagonal",
    "interval",
    "knn_scores",
    "masks_to_grid",
    "mean_correlation",
    "mixing_distance",
    "nearest_votes",
    "norm_statistics",
    "numerical_rank",
    "paired_difference",
    "patch_distances",
    "position_map",
    "rank_bound",
    "rank_claims",
    "roc_curve",
    "row_entropy",
    "run_lengths",
    "segmentation_areas",
    "segmentation_scores",
    "sides",
    "singular_values",
    "topk_accuracy",
    "triangle",
    "uniform_distance",
]  # fmt: skip
