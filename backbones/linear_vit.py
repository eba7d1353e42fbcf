"""ViT whose attention is linear: softmax(QK^T) replaced by ψ(Q)ψ(K)^T."""

from torch import nn

from backbones.mixers import LinearAttention
from backbones.registry import register_sizes
from backbones.vit import VisionTransformer


class LinearVisionTransformer(VisionTransformer):
    """:class:`VisionTransformer` with :class:`~backbones.mixers.LinearAttention`.

    Args:
        key_axis: what ψ normalises over for the keys, ``tokens`` (rows of M sum to 1) or ``channels``.
    """

    def __init__(
        self, img_size: int | tuple[int, int] = 224, patch_size: int = 16, embed_dim: int = 768, depth: int = 12,
        num_heads: int = 12, mlp_ratio: float = 4.0, drop_path: float = 0.0, num_registers: int = 0,
        key_axis: str = "tokens", in_chans: int = 3, num_classes: int = 0,
    ) -> None:  # fmt: skip
        self.key_axis = key_axis
        super().__init__(
            img_size,
            patch_size,
            embed_dim,
            depth,
            num_heads,
            mlp_ratio,
            drop_path,
            num_registers,
            in_chans,
            num_classes,
        )

    def _build_mixer(self) -> nn.Module:
        return LinearAttention(self.num_features, self.num_heads, self.key_axis)


register_sizes(
    LinearVisionTransformer,
    linear_vit_small_patch16_224={"embed_dim": 384, "num_heads": 6},
    linear_vit_base_patch16_224={"embed_dim": 768, "num_heads": 12},
)
