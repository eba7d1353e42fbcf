"""Token mixers: softmax attention, linear attention, bidirectional Mamba-2 and Mamba-1."""

from backbones.mixers.attention import SoftmaxAttention
from backbones.mixers.base import Mixing
from backbones.mixers.linear_attention import KEY_AXES, LinearAttention
from backbones.mixers.mamba1 import BidirectionalMamba1
from backbones.mixers.mamba2 import BidirectionalMamba2, ScanInputs

__all__ = [
    "KEY_AXES",
    "BidirectionalMamba1",
    "BidirectionalMamba2",
    "LinearAttention",
    "Mixing",
    "ScanInputs",
    "SoftmaxAttention",
]
