"""Mamba-Reg as published with ImageNet classifiers: on bidirectional Mamba-1. Parameter names are its own.

With ``num_classes=0`` it is a backbone alone, and :func:`backbones.weights.load` leaves a file's classifier out.
"""

from torch import Tensor, nn

from backbones.mamba_reg import SpreadRegisters
from backbones.mixers import BidirectionalMamba1
from backbones.ops import RMSNorm
from backbones.registry import register_sizes


class MambaRegMamba1(SpreadRegisters):
    """Mamba-Reg (Wang et al. 2024) as published with ImageNet classifiers.

    The classifier reads all registers, each reduced by ``neck`` and then laid end to end.

    Args:
        img_size, patch_size, embed_dim, depth, drop_path, in_chans: see :class:`~backbones.mamba_stack.MambaStack`.
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
        in_chans: int = 3,
    ) -> None:  # fmt: skip
        if embed_dim % cls_reduce:
            raise ValueError(f"embed_dim={embed_dim} is not a multiple of cls_reduce={cls_reduce}")

        def mixer() -> nn.Module:
            return BidirectionalMamba1(embed_dim, d_state, expand, d_conv, chunk_size=chunk_size)

        self.num_registers, self.cls_reduce = num_registers, cls_reduce
        super().__init__(img_size, patch_size, embed_dim, depth, drop_path, mixer, in_chans, num_classes)

    def _build_classifier(self) -> None:
        narrow = self.num_features // self.cls_reduce
        width = self.num_registers * narrow
        if self.num_classes:
            self.neck, self.norm_neck = nn.Linear(self.num_features, narrow, bias=False), RMSNorm(width)
        else:
            self.neck = self.norm_neck = nn.Identity()
        self.head = self._linear_head(width)

    def pre_logits(self, images: Tensor) -> Tensor:
        """(B, C, H, W) to the classifier's input (B, R · D / cls_reduce). ValueError where there is no classifier."""
        if not self.num_classes:
            raise ValueError("MambaRegMamba1 has no neck without a classifier: build it with num_classes")
        tokens, layout = self._encode(images)
        return self.norm_neck(self.neck(tokens[:, layout.readout]).flatten(1))


register_sizes(
    MambaRegMamba1,
    mambar_small_mamba1_patch16_224={"embed_dim": 384, "cls_reduce": 2},
    mambar_base_mamba1_patch16_224={"embed_dim": 768, "cls_reduce": 4},
    mambar_large_mamba1_patch16_224={"embed_dim": 1024, "depth": 48, "num_registers": 16, "cls_reduce": 8},
)
