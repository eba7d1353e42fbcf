"""Vim on bidirectional Mamba-2, with the class token in the middle. Parameter names are Dino-Mamba's."""

import torch
from torch import Tensor, nn

from backbones.mamba_stack import MambaStack
from backbones.mixers import BidirectionalMamba2
from backbones.registry import register_sizes
from backbones.tokens import Layout, cls_first, other_positions


class VisionMamba(MambaStack):
    """Vim (Zhu et al. 2024) on Mamba-2, as pretrained by Dino-Mamba.

    The sequence holds the class token with its position at index 0 **and** once more, without position, at
    ⌊(N+1)/2⌋; the second is read out. Intermediate features are the final norm of a mixer's branch, without the
    residual stream. Both are the reference's behaviour, which its published weights hang on.

    Args:
        img_size, patch_size, embed_dim, depth, drop_path, in_chans, num_classes: see
            :class:`~backbones.mamba_stack.MambaStack`.
        d_state, headdim, expand, d_conv, chunk_size, backend, dt_min, dt_max, A_init_range: see
            :class:`~backbones.mixers.BidirectionalMamba2`.
    """

    def __init__(
        self, img_size: int | tuple[int, int] = 224, patch_size: int = 16, embed_dim: int = 512, depth: int = 24,
        drop_path: float = 0.0, d_state: int = 64, headdim: int = 64, expand: int = 2, d_conv: int = 4,
        chunk_size: int = 256, backend: str = "auto", in_chans: int = 3, num_classes: int = 0,
        dt_min: float = 0.001, dt_max: float = 0.1,
        A_init_range: tuple[float, float] = (1.0, 16.0),
    ) -> None:  # fmt: skip
        def mixer() -> nn.Module:
            return BidirectionalMamba2(
                embed_dim, d_state, headdim, expand, d_conv, dt_min=dt_min, dt_max=dt_max, A_init_range=A_init_range,
                chunk_size=chunk_size, backend=backend,
            )  # fmt: skip

        super().__init__(img_size, patch_size, embed_dim, depth, drop_path, mixer, in_chans, num_classes)

    def _build_tokens(self) -> None:
        patches = self.grid_size[0] * self.grid_size[1]
        self.cls_token = nn.Parameter(torch.zeros(1, 1, self.num_features))
        self.pos_embed = nn.Parameter(torch.zeros(1, patches + 1, self.num_features))

    def _embed(self, images: Tensor) -> tuple[Tensor, Layout]:
        grid = self.patch_embed.grid(images)
        cls = self.cls_token.expand(images.shape[0], -1, -1)
        x = cls_first(self.patch_embed(images), cls, self.pos_embed, self.grid_size, grid)
        middle = x.shape[1] // 2
        x = torch.cat([x[:, :middle], cls, x[:, middle:]], 1)
        readout = middle + torch.arange(1, device=x.device)
        first = torch.zeros_like(readout)
        patches = other_positions(x.shape[1], torch.cat([first, readout]))
        return x, Layout(grid, patches, readout, twin=first)


register_sizes(
    VisionMamba,
    vim_tiny_patch16_224={"embed_dim": 256},
    vim_small_patch16_224={"embed_dim": 512},
    vim_base_patch16_224={"embed_dim": 768},
)
