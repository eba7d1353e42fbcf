"""Vim on bidirectional Mamba-2, with the class token in the middle. Parameter names are Dino-Mamba's."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator

import torch
from timm.layers import DropPath, trunc_normal_
from torch import Tensor, nn

from backbones.mixers import BidirectionalMamba2
from backbones.ops import RMSNorm
from backbones.registry import register_sizes
from backbones.sequence import SequenceBackbone, Step, drop_path_rates
from backbones.tokens import Layout, PatchEmbed, cls_first, other_positions, patch_grid


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
    """

    def __init__(
        self, img_size: int | tuple[int, int], patch_size: int, embed_dim: int, depth: int, drop_path: float,
        mixer: Callable[[], nn.Module],
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed_dim, self.patch_size, self.depth = embed_dim, patch_size, depth
        self.grid_size = patch_grid(img_size, patch_size)
        self.patch_embed = PatchEmbed(patch_size, embed_dim)
        self._build_tokens()
        self.layers = nn.ModuleList(MambaBlock(embed_dim, mixer(), rate) for rate in drop_path_rates(drop_path, depth))
        self.norm_f = RMSNorm(embed_dim)
        self._init_weights()

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

    def _steps(self, x: Tensor) -> Iterator[Step]:
        for block in self.layers:
            before = x
            x, branch = self._run(block, x)
            yield Step(block.mixer, block.norm, before, branch)

    @property
    def _final_norm(self) -> nn.Module:
        return self.norm_f

    def _encode(self, images: Tensor) -> tuple[Tensor, Layout]:
        """The last block's residual stream (B, L, D), normed, and where things stand in it."""
        x, layout = self._embed(images)
        for block in self.layers:
            x, _ = self._run(block, x)
        return self.norm_f(x), layout

    def forward(self, images: Tensor) -> Tensor:
        tokens, layout = self._encode(images)
        return layout.readout_mean(tokens)


class VisionMamba(MambaStack):
    """Vim (Zhu et al. 2024) on Mamba-2, as pretrained by Dino-Mamba.

    The sequence holds the class token with its position at index 0 **and** once more, without position, at
    ⌊(N+1)/2⌋; the second is read out. Intermediate features are the final norm of a mixer's branch, without the
    residual stream. Both are the reference's behaviour, which its published weights hang on.

    Args:
        img_size, patch_size, embed_dim, depth, drop_path: see :class:`MambaStack`.
        d_state, headdim, expand, d_conv, chunk_size, backend: see :class:`~backbones.mixers.BidirectionalMamba2`.
    """

    def __init__(
        self, img_size: int | tuple[int, int] = 224, patch_size: int = 16, embed_dim: int = 512, depth: int = 24,
        drop_path: float = 0.0, d_state: int = 64, headdim: int = 64, expand: int = 2, d_conv: int = 4,
        chunk_size: int = 256, backend: str = "auto",
    ) -> None:  # fmt: skip
        def mixer() -> nn.Module:
            return BidirectionalMamba2(
                embed_dim, d_state, headdim, expand, d_conv, chunk_size=chunk_size, backend=backend
            )

        super().__init__(img_size, patch_size, embed_dim, depth, drop_path, mixer)

    def _build_tokens(self) -> None:
        patches = self.grid_size[0] * self.grid_size[1]
        self.cls_token = nn.Parameter(torch.zeros(1, 1, self.embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, patches + 1, self.embed_dim))

    def _embed(self, images: Tensor) -> tuple[Tensor, Layout]:
        grid = self.patch_embed.grid(images)
        cls = self.cls_token.expand(images.shape[0], -1, -1)
        x = cls_first(self.patch_embed(images), cls, self.pos_embed, self.grid_size, grid)
        middle = x.shape[1] // 2
        x = torch.cat([x[:, :middle], cls, x[:, middle:]], 1)
        patches = other_positions(x.shape[1], torch.tensor([0, middle]))
        return x, Layout(grid, patches.to(x.device), torch.tensor([middle], device=x.device))


register_sizes(
    VisionMamba,
    vim_tiny_patch16_224={"embed_dim": 256},
    vim_small_patch16_224={"embed_dim": 512},
    vim_base_patch16_224={"embed_dim": 768},
)
