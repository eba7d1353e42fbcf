"""Mamba-Reg on bidirectional Mamba-2: registers spread evenly through the sequence, read out as their mean."""

import torch
from torch import Tensor, nn

from backbones.mamba_stack import MambaStack
from backbones.mixers import BidirectionalMamba2
from backbones.ops import fixed
from backbones.registry import register_sizes
from backbones.tokens import Layout, other_positions, register_positions, resample_pos_embed


class SpreadRegisters(MambaStack):
    """Tokens of Mamba-Reg: R registers with positions of their own, one after each ⌊N/(R+1)⌋ patches."""

    num_registers: int

    def _build_tokens(self) -> None:
        if self.num_registers < 1:
            raise ValueError(f"num_registers={self.num_registers} must be at least 1; use VisionMamba for none")
        patches = self.grid_size[0] * self.grid_size[1]
        self.cls_token = nn.Parameter(torch.zeros(1, self.num_registers, self.num_features))
        self.pos_embed_cls = nn.Parameter(torch.zeros(1, self.num_registers, self.num_features))
        self.pos_embed = nn.Parameter(torch.zeros(1, patches, self.num_features))

    def _embed(self, images: Tensor) -> tuple[Tensor, Layout]:
        grid = self.patch_embed.grid(images)
        count = grid[0] * grid[1]
        if fixed(count) <= self.num_registers if isinstance(count, Tensor) else count <= self.num_registers:
            raise ValueError(
                f"num_registers={self.num_registers} wants more than {self.num_registers} patches; "
                f"a {images.shape[-2]} x {images.shape[-1]} image has {count}"
            )
        x = self.patch_embed(images) + resample_pos_embed(self.pos_embed, self.grid_size, grid)
        registers = (self.cls_token + self.pos_embed_cls).expand(images.shape[0], -1, -1)
        at = register_positions(count, self.num_registers, x.device)
        patches = other_positions(count + self.num_registers, at)
        order = torch.argsort(torch.cat([patches, at]))
        x = torch.cat([x, registers.to(x.dtype)], 1)[:, order]
        return x, Layout(grid, patches, at, at)


class MambaReg(SpreadRegisters):
    """Mamba-Reg (Wang et al. 2024) on Mamba-2, as pretrained by Dino-Mamba.

    Args:
        img_size, patch_size, embed_dim, depth, drop_path, in_chans, num_classes: see
            :class:`~backbones.mamba_stack.MambaStack`.
        d_state, headdim, expand, d_conv, chunk_size, backend, dt_min, dt_max, A_init_range: see
            :class:`~backbones.mixers.BidirectionalMamba2`.
        num_registers: R.

    Raises:
        ValueError: where an image has fewer patches than registers + 1.
    """

    def __init__(
        self, img_size: int | tuple[int, int] = 224, patch_size: int = 16, embed_dim: int = 768, depth: int = 24,
        drop_path: float = 0.0, d_state: int = 64, headdim: int = 64, expand: int = 2, d_conv: int = 4,
        chunk_size: int = 256, backend: str = "auto", num_registers: int = 12,
        in_chans: int = 3, num_classes: int = 0, dt_min: float = 0.001, dt_max: float = 0.1,
        A_init_range: tuple[float, float] = (1.0, 16.0),
    ) -> None:  # fmt: skip
        def mixer() -> nn.Module:
            return BidirectionalMamba2(
                embed_dim, d_state, headdim, expand, d_conv, dt_min=dt_min, dt_max=dt_max, A_init_range=A_init_range,
                chunk_size=chunk_size, backend=backend,
            )  # fmt: skip

        self.num_registers = num_registers
        super().__init__(img_size, patch_size, embed_dim, depth, drop_path, mixer, in_chans, num_classes)


register_sizes(
    MambaReg,
    mambar_tiny_patch16_224={"embed_dim": 256},
    mambar_small_patch16_224={"embed_dim": 512},
    mambar_base_patch16_224={"embed_dim": 768},
)
