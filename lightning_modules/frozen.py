"""What every evaluation of a frozen backbone shares."""

import logging
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from backbones import STREAMS, Backbone, Stream, weights
from common.evaluation import Evaluation
from lightning_modules.pixels import KnowsItsPixels

logger = logging.getLogger(__name__)


class FrozenBackboneModule(KnowsItsPixels, Evaluation, LightningModule):
    """Holds a backbone in eval mode without gradients, and fills it once from ``backbone_weights``.

    The weights are read when a run starts and not at construction, so a checkpoint, which holds the backbone,
    reloads without the file it came from.

    Args:
        backbone: what is evaluated.
        backbone_weights: a file that :func:`backbones.weights.load` reads; None keeps the initialisation.
        weights_key: which network of a full checkpoint.
        stream: which stream of the blocks is read; see :meth:`backbones.Backbone.forward_intermediates`.
    """

    fixed_on_resume: tuple[str, ...] = ("backbone_weights", "weights_key", "stream")
    """Arguments that give what was trained another meaning: they stay when a run is resumed."""
    weights_source: str
    """Where the backbone's parameters come from."""

    def __init__(
        self, backbone: Backbone, backbone_weights: str | None, weights_key: str, stream: Stream = "published"
    ) -> None:
        super().__init__()
        if stream not in STREAMS:
            raise ValueError(f"model.init_args.stream={stream!r}; allowed: {', '.join(STREAMS)}")
        self.stream: Stream = stream
        self.backbone = backbone.requires_grad_(False).eval()
        self._weights, self._weights_key = backbone_weights, weights_key
        self.weights_source = backbone.weights_source

    @property
    def published_stream(self) -> Stream:
        """Which stream, ``branch`` or ``residual``, is that of the family's published results."""
        return self.backbone.published_stream

    def read_stream(self, stream: Stream | None = None) -> dict[str, str]:
        """Columns of a row: ``stream``, the one that is read (None asks for the module's), and ``reading``, whether it
        is the ``published`` one or the ``other``."""
        asked = stream or self.stream
        found = self.published_stream if asked == "published" else asked
        return {"stream": found, "reading": "published" if found == self.published_stream else "other"}

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

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["weights_source"] = self.weights_source

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.weights_source = checkpoint.get("weights_source", self.weights_source)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to embeddings (B, D)."""
        return self.backbone.embedding(images)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        return {"key": batch["key"], "label": batch["label"], "embedding": self(batch["image"])}
