"""Vim and Mamba-Reg as published with ImageNet classifiers: on bidirectional Mamba-1. Parameter names are theirs.

With ``num_classes=0`` they are backbones alone, and :func:`backbones.weights.load` leaves a file's classifier out.
"""

import torch
from torch import Tensor, nn

from backbones.mamba_reg import SpreadRegisters
from backbones.mixers import BidirectionalMamba1
from backbones.ops import RMSNorm
from backbones.registry import register_sizes
from backbones.tokens import Layout, other_positions, resample_pos_embed
from backbones.vim import MambaStack


class SupervisedVim(MambaStack):
    """Vim (Zhu et al. 2024) as published with ImageNet classifiers.

    Unlike :class:`~backbones.VisionMamba` the class token stands once, at ⌊N/2⌋ among the N patches, and positions
    are added to the sequence it already stands in.

    Args:
        img_size, patch_size, embed_dim, depth, drop_path: see :class:`~backbones.vim.MambaStack`.
        d_state, expand, d_conv, chunk_size: see :class:`~backbones.mixers.BidirectionalMamba1`.
        num_classes: of the classifier; 0 for none.
    """

    def __init__(
        self, img_size: int | tuple[int, int] = 224, patch_size: int = 16, embed_dim: int = 384, depth: int = 24,
        drop_path: float = 0.0, d_state: int = 16, expand: int = 2, d_conv: int = 4, chunk_size: int = 32,
        num_classes: int = 0,
    ) -> None:  # fmt: skip
        def mixer() -> nn.Module:
            return BidirectionalMamba1(embed_dim, d_state, expand, d_conv, chunk_size=chunk_size)

        super().__init__(img_size, patch_size, embed_dim, depth, drop_path, mixer)
        if num_classes:
            self.head = nn.Linear(embed_dim, num_classes)

    def _build_tokens(self) -> None:
        patches = self.grid_size[0] * self.grid_size[1]
        self.cls_token = nn.Parameter(torch.zeros(1, 1, self.embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, patches + 1, self.embed_dim))

    def extra_positions_at(self, grid: tuple[int, int]) -> int:
        """Where the class token and its position stand."""
        return grid[0] * grid[1] // 2

    def _embed(self, images: Tensor) -> tuple[Tensor, Layout]:
        grid = self.patch_embed.grid(images)
        learned, here = self.extra_positions_at(self.grid_size), self.extra_positions_at(grid)
        x = self.patch_embed(images)
        patch_pos = torch.cat([self.pos_embed[:, :learned], self.pos_embed[:, learned + 1 :]], 1)
        x = x + resample_pos_embed(patch_pos, self.grid_size, grid)
        cls = (self.cls_token + self.pos_embed[:, learned : learned + 1]).expand(len(images), -1, -1)
        x = torch.cat([x[:, :here], cls.to(x.dtype), x[:, here:]], 1)
        at = torch.tensor([here])
        return x, Layout(grid, other_positions(x.shape[1], at).to(x.device), at.to(x.device))

    def pre_logits(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to the classifier's input (B, D): the embedding."""
        return self(images)

    def logits(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, num_classes); needs ``num_classes``."""
        return self.head(self.pre_logits(images))


class SupervisedMambaReg(SpreadRegisters):
    """Mamba-Reg (Wang et al. 2024) as published with ImageNet classifiers.

    The classifier reads all registers, each reduced by ``neck`` and then laid end to end.

    Args:
        img_size, patch_size, embed_dim, depth, drop_path: see :class:`~backbones.vim.MambaStack`.
        d_state, expand, d_conv, chunk_size: see :class:`~backbones.mixers.BidirectionalMamba1`.
        num_registers: R.
        cls_reduce: factor by which the neck narrows a register.
        num_classes: of the classifier; 0 for none.

    Raises:
        ValueError: where ``embed_dim`` is no multiple of ``cls_reduce``.
    """

    def __init__(
        self, img_size: int | tuple[int, int] = 224, patch_size: int = 16, embed_dim: int = 768, depth: int = 24,
        drop_path: float = 0.0, d_state: int = 16, expand: int = 2, d_conv: int = 4, chunk_size: int = 32,
        num_registers: int = 12, cls_reduce: int = 4, num_classes: int = 0,
    ) -> None:  # fmt: skip
        if embed_dim % cls_reduce:
            raise ValueError(f"embed_dim={embed_dim} is not a multiple of cls_reduce={cls_reduce}")

        def mixer() -> nn.Module:
            return BidirectionalMamba1(embed_dim, d_state, expand, d_conv, chunk_size=chunk_size)

        self.num_registers = num_registers
        super().__init__(img_size, patch_size, embed_dim, depth, drop_path, mixer)
        if num_classes:
            width = num_registers * embed_dim // cls_reduce
            self.neck = nn.Linear(embed_dim, embed_dim // cls_reduce, bias=False)
            self.norm_neck = RMSNorm(width)
            self.head = nn.Linear(width, num_classes)

    def pre_logits(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to the classifier's input (B, R · D / cls_reduce); needs ``num_classes``."""
        tokens, layout = self._encode(images)
        return self.norm_neck(self.neck(tokens[:, layout.readout]).flatten(1))

    def logits(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, num_classes); needs ``num_classes``."""
        return self.head(self.pre_logits(images))


register_sizes(
    SupervisedVim,
    vim_tiny_mamba1_patch16_224={"embed_dim": 192},
    vim_small_mamba1_patch16_224={"embed_dim": 384},
    vim_base_mamba1_patch16_224={"embed_dim": 768},
)
register_sizes(
    SupervisedMambaReg,
    mambar_small_mamba1_patch16_224={"embed_dim": 384, "cls_reduce": 2},
    mambar_base_mamba1_patch16_224={"embed_dim": 768, "cls_reduce": 4},
    mambar_large_mamba1_patch16_224={"embed_dim": 1024, "depth": 48, "num_registers": 16, "cls_reduce": 8},
)
