"""Vim as published with ImageNet classifiers: on bidirectional Mamba-1. Parameter names are its own.

With ``num_classes=0`` it is a backbone alone, and :func:`backbones.weights.load` leaves a file's classifier out.
"""

import torch
from torch import Tensor, nn

from backbones.mamba_stack import MambaStack
from backbones.mixers import BidirectionalMamba1
from backbones.registry import register_sizes
from backbones.tokens import Layout, other_positions, resample_pos_embed


class VimMamba1(MambaStack):
    """Vim (Zhu et al. 2024) as published with ImageNet classifiers.

    Unlike :class:`~backbones.VisionMamba` the class token stands once, at ⌊N/2⌋ among the N patches, and positions
    are added to the sequence it already stands in.

    Args:
        img_size, patch_size, embed_dim, depth, drop_path, in_chans: see :class:`~backbones.mamba_stack.MambaStack`.
        d_state, expand, d_conv, chunk_size: see :class:`~backbones.mixers.BidirectionalMamba1`.
        num_classes: of the classifier; 0 for none.
    """

    def __init__(
        self, img_size: int | tuple[int, int] = 224, patch_size: int = 16, embed_dim: int = 384, depth: int = 24,
        drop_path: float = 0.0, d_state: int = 16, expand: int = 2, d_conv: int = 4, chunk_size: int = 32,
        num_classes: int = 0, in_chans: int = 3,
    ) -> None:  # fmt: skip
        def mixer() -> nn.Module:
            return BidirectionalMamba1(embed_dim, d_state, expand, d_conv, chunk_size=chunk_size)

        super().__init__(img_size, patch_size, embed_dim, depth, drop_path, mixer, in_chans, num_classes)

    def _build_tokens(self) -> None:
        patches = self.grid_size[0] * self.grid_size[1]
        self.cls_token = nn.Parameter(torch.zeros(1, 1, self.num_features))
        self.pos_embed = nn.Parameter(torch.zeros(1, patches + 1, self.num_features))

    def extra_positions_at(self, grid: tuple[int, int]) -> int:
        """Where the class token and its position stand."""
        return grid[0] * grid[1] // 2

    def _embed(self, images: Tensor) -> tuple[Tensor, Layout]:
        grid = self.patch_embed.grid(images)
        learned, here = self.extra_positions_at(self.grid_size), self.extra_positions_at(grid)
        x = self.patch_embed(images)
        patch_pos = torch.cat([self.pos_embed[:, :learned], self.pos_embed[:, learned + 1 :]], 1)
        x = x + resample_pos_embed(patch_pos, self.grid_size, grid)
        cls = (self.cls_token + self.pos_embed[:, learned : learned + 1]).expand(images.shape[0], -1, -1)
        x = torch.cat([x[:, :here], cls.to(x.dtype), x[:, here:]], 1)
        at = here + torch.arange(1, device=x.device)
        return x, Layout(grid, other_positions(x.shape[1], at), at)


register_sizes(
    VimMamba1,
    vim_tiny_mamba1_patch16_224={"embed_dim": 192},
    vim_small_mamba1_patch16_224={"embed_dim": 384},
    vim_base_mamba1_patch16_224={"embed_dim": 768},
)
