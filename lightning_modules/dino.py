"""DINO pretraining of any Backbone.

Shapes: B images a device, V views (the global ones first), D embed_dim, K out_dim.
"""

import copy
import math
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from backbones import Backbone
from lightning_modules.clipping import clip_each
from lightning_modules.dino_head import DINOHead
from lightning_modules.dino_loss import DINOLoss, LossParts
from lightning_modules.ema import ema_update
from lightning_modules.finite import FiniteGuard
from lightning_modules.hparams import record_hyperparameters
from lightning_modules.parameter_groups import decayed_and_free
from lightning_modules.schedules import cosine_schedule, linear_warmup
from metrics import KNNAccuracy


class MultiCropNetwork(nn.Module):
    """A backbone and its head over a list of views: one backbone pass per resolution, one head pass for all."""

    def __init__(self, backbone: Backbone, head: DINOHead) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, views: list[Tensor]) -> tuple[Tensor, Tensor]:
        """V tensors (B, 3, H_v, W_v), equal sizes next to each other, to embeddings and bottlenecks, V·B of each."""
        groups: list[list[Tensor]] = []
        for view in views:
            if groups and groups[-1][0].shape[-2:] == view.shape[-2:]:
                groups[-1].append(view)
            else:
                groups.append([view])
        embeddings = torch.cat([self.backbone(torch.cat(group)) for group in groups])
        return embeddings, self.head.bottleneck(embeddings)


class DINO(LightningModule):
    """Self-distillation with no labels (Caron et al. 2021); the defaults are the paper's recipe for visual Mamba.

    Training batches are dicts with ``crops``: V tensors (B, 3, H, W), normalised, the two global ones first.
    Validation batches hold ``image`` and ``label``; the teacher's embeddings are scored by k-NN, each image against
    the others. Centre, EMA and schedules move once per optimiser step, whatever the accumulation or world size.

    Args:
        backbone: the student; the teacher starts as its copy.
        out_dim, hidden_dim, bottleneck_dim, head_layers, use_bn_in_head, norm_last_layer: see DINOHead.
        lr: peak learning rate for 256 images a step; scaled by (global batch / 256).
        min_lr: its value at the end (not scaled).
        warmup_epochs: linear warm-up of the learning rate.
        weight_decay, weight_decay_end: cosine, on tensors with more than one axis.
        momentum, momentum_end: of the EMA, cosine.
        warmup_teacher_temp, teacher_temp, warmup_teacher_temp_epochs: linear per epoch, then constant.
        student_temp: the student's temperature, above the teacher's.
        center_momentum, centering: see DINOLoss.
        clip_grad: largest gradient norm of each parameter by itself; None or 0 for no clipping.
        freeze_last_layer_epochs: epochs in which the prototypes stay as they are.
        num_global_crops: how many of the first views the teacher sees.
        global_batch_size: images per optimiser step over all devices, for the learning rate; None asks the
            datamodule's ``batch_size``.
        knn_k: neighbours of the validation score.
        grad_checkpointing: keep only the blocks' inputs for the backward pass: less memory, one more forward pass.

    Raises:
        ValueError: for a teacher temperature that is not below the student's, or half-precision parameters.
        FloatingPointError: after a non-finite loss, naming its step; nothing was updated by it. On CUDA it may come
            up to ``trainer.log_every_n_steps`` steps later, in which nothing is updated either.
    """

    headline_metric = "val/knn_top1"

    def __init__(
        self,
        backbone: Backbone,
        out_dim: int = 65536,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
        head_layers: int = 3,
        use_bn_in_head: bool = False,
        norm_last_layer: bool = True,
        lr: float = 5e-4,
        min_lr: float = 1e-6,
        warmup_epochs: int = 10,
        weight_decay: float = 0.04,
        weight_decay_end: float = 0.4,
        momentum: float = 0.996,
        momentum_end: float = 1.0,
        warmup_teacher_temp: float = 0.04,
        teacher_temp: float = 0.07,
        warmup_teacher_temp_epochs: int = 30,
        student_temp: float = 0.1,
        center_momentum: float = 0.9,
        centering: str = "mean",
        clip_grad: float | None = 3.0,
        freeze_last_layer_epochs: int = 1,
        num_global_crops: int = 2,
        global_batch_size: int | None = None,
        knn_k: int = 20,
        grad_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        record_hyperparameters(self, "backbone")
        for name, temp in (("warmup_teacher_temp", warmup_teacher_temp), ("teacher_temp", teacher_temp)):
            if not 0 < temp < student_temp:
                raise ValueError(f"{name}={temp} must lie between 0 and student_temp={student_temp}, or DINO collapses")
        head = DINOHead(
            backbone.embed_dim,
            out_dim,
            hidden_dim,
            bottleneck_dim,
            head_layers,
            use_bn_in_head,
            norm_last_layer,
        )
        self.student = MultiCropNetwork(backbone, head)
        self.student.backbone.set_grad_checkpointing(grad_checkpointing)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False).eval()
        self.loss = DINOLoss(out_dim, student_temp, center_momentum, centering)
        self.finite = FiniteGuard()
        self.check_every: int | None = None
        """Steps between looks at the guard; None for those that are logged on CUDA, and for every step elsewhere."""
        self.knn = KNNAccuracy(k=knn_k)

    @property
    def backbone(self) -> Backbone:
        """The teacher's backbone, which is what is kept, scored and looked at."""
        return self.teacher.backbone

    def train(self, mode: bool = True) -> "DINO":
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to the teacher's embeddings (B, D)."""
        return self.backbone(images)

    # ---- schedules ----------------------------------------------------------------------------------------

    @property
    def _steps_per_epoch(self) -> int:
        return math.ceil(self.trainer.num_training_batches / self.trainer.accumulate_grad_batches)

    @cached_property
    def _total_steps(self) -> int:
        """Optimiser steps of the run. Not for ``configure_optimizers``: asking sets the loader up, there too early for
        a checkpoint inside an epoch to reach it."""
        return int(self.trainer.estimated_stepping_batches)

    @property
    def _epoch(self) -> int:
        """The epoch of the next optimiser step."""
        return self.trainer.current_epoch

    def scheduled(self, step: int) -> dict[str, float]:
        """Learning rate, weight decay and EMA momentum of an optimiser step."""
        hp, total = self.hparams, self._total_steps
        warmup = hp.warmup_epochs * self._steps_per_epoch
        return {
            "lr": cosine_schedule(step, total, self._peak_lr, hp.min_lr, warmup),
            "weight_decay": cosine_schedule(step, total, hp.weight_decay, hp.weight_decay_end),
            "momentum": cosine_schedule(step, total, hp.momentum, hp.momentum_end),
        }

    @property
    def teacher_temp(self) -> float:
        """The teacher's temperature in this epoch."""
        hp = self.hparams
        return linear_warmup(self._epoch, hp.warmup_teacher_temp_epochs, hp.warmup_teacher_temp, hp.teacher_temp)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        batch = self.hparams.global_batch_size or getattr(self.trainer.datamodule, "batch_size", None)
        if batch is None:
            raise ValueError(
                "global_batch_size is not set and the data have no batch_size: set model.global_batch_size"
            )
        self.global_batch_size = int(batch)
        self._peak_lr = peak = self.hparams.lr * self.global_batch_size / 256
        if self.trainer.max_epochs in (None, -1) and self.trainer.max_steps == -1:
            raise ValueError("the schedules need an end: set trainer.max_epochs or trainer.max_steps")
        decayed, free = decayed_and_free(self.student)
        groups: list[dict[str, Any]] = [
            {"params": decayed, "initial_lr": peak},
            {"params": free, "initial_lr": peak, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=peak, fused=self.device.type in ("cpu", "cuda"))

    # ---- one step -----------------------------------------------------------------------------------------

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        crops = batch["crops"]
        with torch.no_grad():
            embeddings, z = self.teacher(crops[: self.hparams.num_global_crops])
            teacher = self.teacher.head.last_layer(z)
        _, z = self.student(crops)
        prototypes = self.student.head.last_layer.prototypes()
        parts = self.loss.of_prototypes(z, prototypes, teacher, len(crops), self.teacher_temp)
        self.finite.note(parts.loss, self.trainer.global_step)
        if self._due(self._steps_between_checks):
            self.finite.check()
        if self._steps_between_checks > 1:  # as GradScaler tells fused optimisers to do nothing
            self.trainer.optimizers[0].found_inf = self.finite.held.float()
        self.loss.observe(teacher)
        if self._due(self.trainer.log_every_n_steps):  # each value is a transfer, and the device waits for some
            self._log_step(parts, embeddings)
        return parts.loss

    @property
    def _steps_between_checks(self) -> int:
        return self.check_every or (self.trainer.log_every_n_steps or 1 if self.device.type == "cuda" else 1)

    def _due(self, every: int) -> bool:
        """Whether this step is one of every so many, as Lightning counts those that it logs."""
        return (self.trainer.global_step + 1) % max(1, every) == 0

    def _log_step(self, parts: LossParts, embeddings: Tensor) -> None:
        spread = F.normalize(embeddings.float(), dim=-1).std(0, correction=0).mean() * math.sqrt(embeddings.shape[-1])
        self.log("train/loss", parts.loss.detach(), prog_bar=True)
        self.log_dict(
            {"train/teacher_entropy": parts.teacher_entropy, "train/kl": parts.kl, "train/feature_std": spread}
        )
        schedule = self.scheduled(self.trainer.global_step) | {"teacher_temp": self.teacher_temp}
        self.log_dict({f"schedule/{k}": v for k, v in schedule.items()})

    def on_train_epoch_end(self) -> None:
        self.finite.check()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """No checkpoint is written after a step that is about to stop the run."""
        self.finite.check()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: Any = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        """Clips each parameter by itself, then drops the prototypes' gradients while they are frozen."""
        if gradient_clip_val is not None:
            raise ValueError("DINO clips each parameter by itself: set model.clip_grad, not trainer.gradient_clip_val")
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.hparams.clip_grad:
            clip_each(gradients, self.hparams.clip_grad)
        if self._epoch < self.hparams.freeze_last_layer_epochs:
            for parameter in self.student.head.last_layer.parameters():
                parameter.grad = None

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        values = self.scheduled(self.trainer.global_step)
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = values["lr"]
            if i == 0:
                group["weight_decay"] = values["weight_decay"]
        held = self.finite.held if self._steps_between_checks > 1 else None  # else no such loss comes this far
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.loss.update_center(held)
        ema_update(self.teacher, self.student, values["momentum"], held)

    # ---- validation ---------------------------------------------------------------------------------------

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        images = batch["image"]
        # an empty batch is recorded too: a rank whose state stays empty would miss the gathering
        embeddings = self(images) if len(images) else images.new_empty(0, self.backbone.embed_dim)
        self.knn.update(embeddings, batch["label"])

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"val/knn_{k}": v for k, v in self.knn.compute().items()}, prog_bar=True)
        self.knn.reset()

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        return {"key": batch["key"], "label": batch["label"], "embedding": self(batch["image"])}
