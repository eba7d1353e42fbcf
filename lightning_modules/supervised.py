"""Supervised training, for comparison with pretraining on the same data.

Shapes: B images, D num_features, C classes.
"""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from backbones import Backbone
from lightning_modules.hparams import record_hyperparameters
from lightning_modules.predicted_classes import PredictsClasses
from lightning_modules.pretraining import Pretraining


class Supervised(PredictsClasses, Pretraining):
    """A backbone and a linear classifier trained together: AdamW, cross-entropy, warm-up and cosine per step.

    Its checkpoints load into evaluations as DINO's do. Training and validation batches hold ``image`` and ``label``.

    Args:
        backbone: trained.
        num_classes: C.
        lr: learning rate for 256 images a step; scaled by (global batch / 256).
        warmup_epochs: of linear warm-up from 0.
        weight_decay: on matrices; none on vectors (biases, norms, decays).
        label_smoothing: of the cross-entropy.
        clip_grad: largest norm of all gradients together; None or 0 for no clipping.
        global_batch_size, grad_checkpointing, init_weights, weights_key: see :class:`Pretraining`.
    """

    headline = "val/top1"
    needs_labels = True
    trained_part = "classifier"
    views = ("probe",)

    def __init__(
        self,
        backbone: Backbone,
        num_classes: int = 1000,
        lr: float = 0.0005,
        warmup_epochs: int = 5,
        weight_decay: float = 0.05,
        label_smoothing: float = 0.1,
        clip_grad: float | None = 1.0,
        global_batch_size: int | None = None,
        grad_checkpointing: bool = False,
        init_weights: str | None = None,
        weights_key: str = "teacher",
    ) -> None:
        super().__init__(
            backbone, lr, 0.0, warmup_epochs, weight_decay, None, clip_grad, "all", global_batch_size, None,
            grad_checkpointing, init_weights, weights_key,
        )  # fmt: skip
        record_hyperparameters(self, "backbone")
        self.num_classes = num_classes
        self.classifier = nn.Linear(backbone.num_features, num_classes)
        self.top1 = MulticlassAccuracy(num_classes, average="micro")
        self._rows: list[dict[str, Any]] = []

    @property
    def label_count(self) -> int:
        return self.num_classes

    @property
    def uniform_loss(self) -> float:
        """ln C."""
        return math.log(self.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, C)."""
        return self.classifier(self.backbone.embedding(images))

    def training_loss(self, batch: dict[str, Any]) -> Tensor:
        return F.cross_entropy(self(batch["image"]), batch["label"], label_smoothing=self.hparams.label_smoothing)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        if len(batch["image"]):
            self.top1.update(self(batch["image"]), batch["label"])

    def on_validation_epoch_end(self) -> None:
        top1 = self.top1.compute().item()
        self.top1.reset()
        self._rows = [{"epoch": self.current_epoch, "top1": top1}]
        self.log("val/top1", top1, prog_bar=True)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Keys, labels, embeddings; of a trained model what it takes the images for."""
        found = super().predict_step(batch, batch_idx)
        return found | self.predicted(self.classifier(found["embedding"])) if self.has_learned else found

    def rows(self) -> list[dict[str, Any]]:
        """Top-1 after the last epoch."""
        return self._rows
