"""The Vision Transformer of DINO: pre-norm blocks, CLS first, learned positions. Parameter names are DINO's."""

import torch
from timm.layers import DropPath, Mlp, trunc_normal_
from torch import Tensor, nn

from backbones.mixers import SoftmaxAttention
from backbones.sequence import SequenceBackbone, drop_path_rates
from backbones.tokens import Layout, PatchEmbed, cls_first


class TransformerBlock(nn.Module):
    """(x + a + mlp(norm2(x + a)), a) with a = mixer(norm1(x)): the residual stream and the mixer's branch."""

    def __init__(self, dim: int, mixer: nn.Module, mlp_ratio: float, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = mixer
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        branch = self.attn(self.norm1(x))
        x = x + self.drop_path(branch)
        return x + self.drop_path(self.mlp(self.norm2(x))), branch


class VisionTransformer(SequenceBackbone):
    """ViT with softmax attention (Dosovitskiy et al. 2021, as in Caron et al. 2021).

    Args:
        img_size: side of the image, or (height, width), for which positions are learned; others are resampled.
        patch_size: side of a patch.
        embed_dim: D.
        depth: number of blocks.
        num_heads: attention heads.
        mlp_ratio: hidden width of the MLP over D.
        drop_path: stochastic depth rate of the last block, growing linearly from 0 at the first.
        num_registers: registers behind the class token, without positions and not read out (Darcet et al. 2024).
        in_chans: channels of the images.
        num_classes: of a linear classifier; 0 for none.
    """

    blocks_name, final_norm_name, pre_norm_name, mixer_name = "blocks", "norm", "norm1", "attn"

    def __init__(
        self, img_size: int | tuple[int, int] = 224, patch_size: int = 16, embed_dim: int = 384, depth: int = 12,
        num_heads: int = 6, mlp_ratio: float = 4.0, drop_path: float = 0.0, num_registers: int = 0,
        in_chans: int = 3, num_classes: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self._set_size(img_size, patch_size, embed_dim, depth)
        self.in_chans = in_chans
        self.num_heads = num_heads
        self.patch_embed = PatchEmbed(patch_size, embed_dim, in_chans)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, self.grid_size[0] * self.grid_size[1] + 1, embed_dim))
        if num_registers:
            self.register_tokens = nn.Parameter(torch.zeros(1, num_registers, embed_dim))
            nn.init.normal_(self.register_tokens, std=1e-6)
        self.num_registers = num_registers
        self.blocks = nn.ModuleList(
            TransformerBlock(embed_dim, self._build_mixer(), mlp_ratio, rate)
            for rate in drop_path_rates(drop_path, depth)
        )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        trunc_normal_(self.pos_embed, std=0.02)
        trunc_normal_(self.cls_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        self.reset_classifier(num_classes)

    def _build_mixer(self) -> nn.Module:
        return SoftmaxAttention(self.num_features, self.num_heads)

    def _embed(self, images: Tensor) -> tuple[Tensor, Layout]:
        grid = self.patch_embed.grid(images)
        cls = self.cls_token.expand(images.shape[0], -1, -1)
        x = cls_first(self.patch_embed(images), cls, self.pos_embed, self.grid_size, grid)
        if not self.num_registers:
            index = torch.arange(x.shape[1], device=x.device)
            return x, Layout(grid, index[1:], index[:1])
        registers = self.register_tokens.expand(images.shape[0], -1, -1)
        x = torch.cat([x[:, :1], registers.to(x.dtype), x[:, 1:]], 1)
        index = torch.arange(x.shape[1], device=x.device)
        first = 1 + self.num_registers
        return x, Layout(grid, index[first:], index[:1], index[1:first])
