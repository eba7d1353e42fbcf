"""Visual backbones on torch and timm."""

import common  # noqa: F401  # first: no file of somebody else's is in the place of a package
from backbones.base import STREAMS, Backbone, BlockView, Features, MixingBackbone, Stream
from backbones.hierarchical import HierarchicalBackbone, StageTrace
from backbones.linear_vit import LinearVisionTransformer
from backbones.mamba_reg import MambaReg
from backbones.mamba_reg_mamba1 import MambaRegMamba1
from backbones.sequence import SequenceBackbone
from backbones.timm_model import TimmModel
from backbones.vim import VisionMamba
from backbones.vim_mamba1 import VimMamba1
from backbones.vit import VisionTransformer

SupervisedVim, SupervisedMambaReg = VimMamba1, MambaRegMamba1
"""Their names until version 0.1, which checkpoints of that time hold."""

__all__ = [
    "STREAMS",
    "Backbone",
    "BlockView",
    "Features",
    "HierarchicalBackbone",
    "LinearVisionTransformer",
    "MambaReg",
    "MambaRegMamba1",
    "MixingBackbone",
    "SequenceBackbone",
    "StageTrace",
    "Stream",
    "SupervisedMambaReg",
    "SupervisedVim",
    "TimmModel",
    "VimMamba1",
    "VisionMamba",
    "VisionTransformer",
]
