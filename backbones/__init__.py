"""Visual backbones on torch and timm."""

from backbones.base import Backbone, BlockView, Features
from backbones.linear_vit import LinearVisionTransformer
from backbones.mamba_reg import MambaReg
from backbones.timm_model import TimmModel
from backbones.vim import VisionMamba
from backbones.vit import VisionTransformer

__all__ = [
    "Backbone",
    "BlockView",
    "Features",
    "LinearVisionTransformer",
    "MambaReg",
    "TimmModel",
    "VisionMamba",
    "VisionTransformer",
]
