"""Supervised training, for comparison with pretraining on the same data.

Shapes: B images, D embed_dim, C classes.
"""

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from backbones import Backbone
from lightning_modules.hparams import record_hyperparameters
from lightning_modules.parameter_groups import decayed_and_free
from lightning_modules.schedules import cosine_schedule


class Supervised(LightningModule):
    """A backbone and a linear classifier trained together: AdamW, cross-entropy, warm-up and cosine per step.

    Its checkpoints load into evaluations as DINO's do. Training and validation batches hold ``image`` and ``label``.

    Args:
        backbone: trained.
        num_classes: C.
        lr: learning rate for 256 images a step; scaled by (global batch / 256).
        warmup_epochs: of linear warm-up from 0.
        weight_decay: on matrices; none on vectors (biases, norms, decays).
        label_smoothing: of the cross-entropy.
        clip_grad: largest norm of all gradients together.
    """

    headline_metric = "val/top1"

    def __init__(
        self,
        backbone: Backbone,
        num_classes: int = 1000,
        lr: float = 0.0005,
        warmup_epochs: int = 5,
        weight_decay: float = 0.05,
        label_smoothing: float = 0.1,
        clip_grad: float = 1.0,
    ) -> None:
        super().__init__()
        record_hyperparameters(self, "backbone")
        self.backbone, self.num_classes = backbone, num_classes
        self.classifier = nn.Linear(backbone.embed_dim, num_classes)
        self.top1 = MulticlassAccuracy(num_classes, average="micro")
        self._rows: list[dict[str, object]] = []

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to logits (B, C)."""
        return self.classifier(self.backbone(images))

    def configure_optimizers(self) -> Any:
        decayed, free = decayed_and_free(self)
        peak = self._peak_lr
        return torch.optim.AdamW(
            [
                {"params": decayed, "initial_lr": peak, "weight_decay": self.hparams.weight_decay},
                {"params": free, "initial_lr": peak, "weight_decay": 0.0},
            ]
        )

    @property
    def _peak_lr(self) -> float:
        return self.hparams.lr * getattr(self.trainer.datamodule, "batch_size", 256) / 256

    @cached_property
    def _total_steps(self) -> int:
        """Optimiser steps of the run; see DINO's."""
        return int(self.trainer.estimated_stepping_batches)

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Sets the learning rate of the step."""
        total, hp = self._total_steps, self.hparams
        warmup = hp.warmup_epochs * total // max(1, self.trainer.max_epochs or 1)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = cosine_schedule(self.trainer.global_step, total, self._peak_lr, 0.0, warmup)

    def configure_gradient_clipping(self, optimizer: Any, *_: object, **__: object) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), self.hparams.clip_grad)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["image"]), batch["label"], label_smoothing=self.hparams.label_smoothing)
        if not loss.isfinite():
            raise FloatingPointError(f"the loss is {loss.item()} at step {self.global_step}; lower the learning rate")
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        if len(batch["image"]):
            self.top1.update(self(batch["image"]), batch["label"])

    def on_validation_epoch_end(self) -> None:
        top1 = self.top1.compute().item()
        self.top1.reset()
        self._rows = [{"epoch": self.current_epoch, "top1": top1}]
        self.log("val/top1", top1, prog_bar=True)

    def results(self) -> list[dict[str, object]]:
        """Top-1 after the last epoch."""
        return self._rows
