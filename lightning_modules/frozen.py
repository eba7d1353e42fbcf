"""What every evaluation of a frozen backbone shares."""

import logging

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from backbones import Backbone, weights

logger = logging.getLogger(__name__)


class FrozenBackboneModule(LightningModule):
    """Holds a backbone in eval mode without gradients, and fills it once from ``backbone_weights``.

    The weights are read when a run starts and not at construction, so a checkpoint, which holds the backbone,
    reloads without the file it came from.

    Args:
        backbone: what is evaluated.
        backbone_weights: a file that :func:`backbones.weights.load` reads; None keeps the initialisation.
        weights_key: which network of a full checkpoint.
    """

    headline_metric: str
    weights_source: str
    """Where the backbone's parameters come from."""

    def __init__(self, backbone: Backbone, backbone_weights: str | None, weights_key: str) -> None:
        super().__init__()
        self.backbone = backbone.requires_grad_(False).eval()
        self._weights, self._weights_key = backbone_weights, weights_key
        self.weights_source = getattr(backbone, "weights_source", "random initialisation")

    def train(self, mode: bool = True) -> "FrozenBackboneModule":
        super().train(mode)
        self.backbone.eval()
        return self

    def setup(self, stage: str) -> None:
        if self._weights is not None:
            kind = weights.load(self.backbone, self._weights, self._weights_key)
            logger.info("loaded the backbone from %s (%s)", self._weights, kind)
            self.weights_source = f"{self._weights} ({kind})"
            self._weights = None

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to embeddings (B, D)."""
        return self.backbone(images)


def gather_rows(rows: Tensor) -> Tensor:
    """Concatenates (n_r, ...) of all ranks in rank order; ranks may have different numbers of rows, or none."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return rows
    count = rows.new_tensor([len(rows)], dtype=torch.int64)
    counts = [count.clone() for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count)
    sizes = [int(c.item()) for c in counts]
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [padded.clone() for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
