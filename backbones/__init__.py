"""Visual backbones on torch and timm."""

from backbones.base import Backbone, BlockView, Features
from backbones.linear_vit import LinearVisionTransformer
from backbones.mamba_reg import MambaReg
from backbones.sequence import SequenceBackbone
from backbones.supervised import SupervisedMambaReg, SupervisedVim
from backbones.timm_model import TimmModel
from backbones.vim import VisionMamba
from backbones.vit import VisionTransformer

__all__ = [
    "Backbone",
    "BlockView",
    "Features",
    "LinearVisionTransformer",
    "MambaReg",
    "SequenceBackbone",
    "SupervisedMambaReg",
    "SupervisedVim",
    "TimmModel",
    "VisionMamba",
    "VisionTransformer",
]
