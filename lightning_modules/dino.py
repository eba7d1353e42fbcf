"""DINO pretraining of any Backbone.

Shapes: B images a device, V views (the global ones first), D num_features, K out_dim.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones import Backbone, weights
from heads import DINOHead
from lightning_modules.dino_loss import DINOLoss
from lightning_modules.ema import EMATeacher
from lightning_modules.hparams import record_hyperparameters
from lightning_modules.pretraining import Logged, Pretraining
from lightning_modules.schedules import cosine_schedule, linear_warmup


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
        embeddings = torch.cat([self.backbone.embedding(torch.cat(group)) for group in groups])
        return embeddings, self.head.bottleneck(embeddings)


class DINO(EMATeacher, Pretraining):
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
        global_batch_size, knn_k, grad_checkpointing, init_weights, weights_key: see :class:`Pretraining`.

    Raises:
        ValueError: for a teacher temperature that is not below the student's, or half-precision parameters.
        FloatingPointError: see :class:`Pretraining`.
    """

    views = ("multicrop",)

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
        init_weights: str | None = None,
        weights_key: str = "teacher",
    ) -> None:
        super().__init__(
            backbone, lr, min_lr, warmup_epochs, weight_decay, weight_decay_end, clip_grad, "each", global_batch_size,
            knn_k, grad_checkpointing, init_weights, weights_key,
        )  # fmt: skip
        record_hyperparameters(self, "backbone")
        for name, temp in (("warmup_teacher_temp", warmup_teacher_temp), ("teacher_temp", teacher_temp)):
            if not 0 < temp < student_temp:
                raise ValueError(f"{name}={temp} must lie between 0 and student_temp={student_temp}, or DINO collapses")
        head = DINOHead(
            backbone.num_features,
            out_dim,
            hidden_dim,
            bottleneck_dim,
            head_layers,
            use_bn_in_head,
            norm_last_layer,
        )
        self.student = MultiCropNetwork(backbone, head)
        self.follow(self.student)
        self.loss = DINOLoss(out_dim, student_temp, center_momentum, centering)

    @property
    def backbone(self) -> Backbone:  # type: ignore[override]  # the teacher's, not an attribute
        """The teacher's backbone, which is what is kept, scored and looked at."""
        return self.teacher.backbone  # type: ignore[return-value]

    def setup(self, stage: str) -> None:
        """ValueError where the data show fewer views of an image than the loss compares."""
        train = getattr(self.trainer.datamodule, "splits", {}).get("train") if stage == "fit" else None
        count = len(getattr(getattr(train, "transform", None), "views", ()))
        teacher = self.hparams.num_global_crops
        if count and not teacher <= count >= 2:
            raise ValueError(
                f"model.init_args.num_global_crops={teacher}: the data show {count} view(s) of an image; wanted at "
                f"least {max(2, teacher)} (2 and multicrop.num_local, or the counts of multicrop_pipelines)"
            )
        super().setup(stage)

    def start_from(self, source: str, key: str) -> str:
        """The student's backbone; the teacher is its copy again."""
        kind = weights.load(self.student.backbone, source, key)
        self.teacher.load_state_dict(self.student.state_dict())
        self.backbone.pixels = self.student.backbone.pixels
        return kind

    @property
    def trained(self) -> nn.Module:
        return self.student

    @property
    def uniform_loss(self) -> float:
        """ln K."""
        return math.log(self.hparams.out_dim)

    def scheduled(self, step: int) -> dict[str, float]:
        """Learning rate, weight decay, EMA momentum and teacher temperature of an optimiser step."""
        hp = self.hparams
        momentum = cosine_schedule(step, self._total_steps, hp.momentum, hp.momentum_end)
        return super().scheduled(step) | {"momentum": momentum, "teacher_temp": self.teacher_temp}

    @property
    def teacher_temp(self) -> float:
        """The teacher's temperature in this epoch."""
        hp = self.hparams
        return linear_warmup(self._epoch, hp.warmup_teacher_temp_epochs, hp.warmup_teacher_temp, hp.teacher_temp)

    def training_loss(self, batch: dict[str, Any]) -> tuple[Tensor, Logged]:
        crops = batch["crops"]
        with torch.no_grad():
            embeddings, z = self.teacher(crops[: self.hparams.num_global_crops])
            teacher = self.teacher.head.last_layer(z)
        _, z = self.student(crops)
        prototypes = self.student.head.last_layer.prototypes()
        parts = self.loss.of_prototypes(z, prototypes, teacher, len(crops), self.teacher_temp)
        self.loss.observe(teacher)
        return parts.loss, {
            "teacher_entropy": parts.teacher_entropy, "kl": parts.kl, "feature_std": lambda: spread(embeddings),
        }  # fmt: skip

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: Any = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        """Clips each parameter by itself, then drops the prototypes' gradients while they are frozen."""
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        if self._epoch < self.hparams.freeze_last_layer_epochs:
            for parameter in self.student.head.last_layer.parameters():
                parameter.grad = None

    def after_update(self, values: dict[str, float], skip_update: Tensor | None) -> None:
        self.loss.update_center(skip_update)
        self.update_teacher(self.student, values["momentum"], skip_update)


def spread(embeddings: Tensor) -> Tensor:
    """How far embeddings (N, D) lie apart: 1 is evenly over the sphere, 0 is one point."""
    return F.normalize(embeddings.float(), dim=-1).std(0, correction=0).mean() * math.sqrt(embeddings.shape[-1])
