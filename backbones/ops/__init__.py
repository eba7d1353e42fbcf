"""Pure functions under the mixers; every fast path has its slow reference beside it."""

from backbones.ops.bidirectional import Directions, bidirectional_ssd, c_kernels
from backbones.ops.causal_conv import causal_conv, causal_conv_reference
from backbones.ops.norm import GatedRMSNorm, RMSNorm, gated_rms_norm, rms_norm
from backbones.ops.recompute import recomputed
from backbones.ops.selective_scan import selective_scan, selective_scan_matrix, selective_scan_recurrent
from backbones.ops.ssd import BACKENDS, ssd, ssd_decay, ssd_log_decay, ssd_matrix, ssd_recurrent, ssd_scores
from backbones.ops.tracing import fixed, is_counted, is_free, is_traced, is_watched

__all__ = [
    "BACKENDS",
    "Directions",
    "GatedRMSNorm",
    "RMSNorm",
    "bidirectional_ssd",
    "c_kernels",
    "causal_conv",
    "causal_conv_reference",
    "fixed",
    "gated_rms_norm",
    "is_counted",
    "is_free",
    "is_traced",
    "is_watched",
    "recomputed",
    "rms_norm",
    "selective_scan",
    "selective_scan_matrix",
    "selective_scan_recurrent",
    "ssd",
    "ssd_decay",
    "ssd_log_decay",
    "ssd_matrix",
    "ssd_recurrent",
    "ssd_scores",
]
