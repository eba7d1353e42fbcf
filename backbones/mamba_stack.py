"""A stack of Mamba blocks without MLPs: what Vim and Mamba-Reg share, on either Mamba. Names are Dino-Mamba's."""

import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from timm.layers import DropPath, trunc_normal_
from torch import Tensor, nn

from backbones.ops import RMSNorm
from backbones.sequence import SequenceBackbone, drop_path_rates
from backbones.tokens import PatchEmbed


class MambaBlock(nn.Module):
    """(x + drop_path(m), m) with m = mixer(norm(x)): the residual stream and the mixer's branch."""

    def __init__(self, dim: int, mixer: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.norm = RMSNorm(dim)
        self.mixer = mixer
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        branch = self.mixer(self.norm(x))
        return x + self.drop_path(branch), branch


class MambaStack(SequenceBackbone):
    """A stack of Mamba blocks and a final norm; a family says what its tokens and mixers are.

    Args:
        img_size: side of the image, or (height, width), for which positions are learned; others are resampled.
        patch_size: side of a patch.
        embed_dim: D.
        depth: number of blocks.
        drop_path: stochastic depth rate of the last block, growing linearly from 0 at the first.
        mixer: makes one block's mixer.
        in_chans: channels of the images.
        num_classes: of a classifier; 0 for none.
    """

    blocks_name, final_norm_name, pre_norm_name, mixer_name = "layers", "norm_f", "norm", "mixer"
    published_stream = "branch"

    def __init__(
        self, img_size: int | tuple[int, int], patch_size: int, embed_dim: int, depth: int, drop_path: float,
        mixer: Callable[[], nn.Module], in_chans: int, num_classes: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self._set_size(img_size, patch_size, embed_dim, depth)
        self.in_chans = in_chans
        self.patch_embed = PatchEmbed(patch_size, embed_dim, in_chans)
        self._build_tokens()
        self.layers = nn.ModuleList(MambaBlock(embed_dim, mixer(), rate) for rate in drop_path_rates(drop_path, depth))
        self.norm_f = RMSNorm(embed_dim)
        self._init_weights()
        self.reset_classifier(num_classes)

    @abstractmethod
    def _build_tokens(self) -> None:
        """Makes the parameters ``cls_token`` and ``pos_embed*``."""

    def _init_weights(self) -> None:
        """The reference's scheme; the mixers keep their own A, dt and convolutions."""
        fan_in = self.patch_embed.proj.weight[0].numel()
        trunc_normal_(self.patch_embed.proj.weight, std=math.sqrt(1 / fan_in) / 0.87962566103423978)  # LeCun
        nn.init.zeros_(self.patch_embed.proj.bias)
        for name, parameter in self.named_parameters(recurse=False):
            assert name.startswith(("cls_token", "pos_embed"))
            trunc_normal_(parameter, std=0.02)
        for block in self.layers:  # GPT-2's: residual branches shrink with depth
            nn.init.kaiming_uniform_(block.mixer.out_proj.weight, a=math.sqrt(5))
            with torch.no_grad():
                block.mixer.out_proj.weight /= math.sqrt(self.depth)
