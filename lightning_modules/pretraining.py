"""What every training of a backbone shares: optimiser, schedules, clipping, the guard, k-NN validation.

Shapes: B images a device, D num_features.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from backbones import Backbone, weights
from common.evaluation import Evaluation
from lightning_modules.clipping import clip_each
from lightning_modules.finite import FiniteGuard
from lightning_modules.hparams import global_batch_size
from lightning_modules.param_groups import param_groups_weight_decay
from lightning_modules.pixels import KnowsItsPixels
from lightning_modules.schedules import cosine_schedule
from metrics import KNNAccuracy

logger = logging.getLogger(__name__)

Logged = Mapping[str, Tensor | float | Callable[[], Tensor]]
"""Scalars by name; a function is called in those steps only that are logged."""


class Pretraining(KnowsItsPixels, Evaluation, LightningModule, ABC):
    """The base of methods: AdamW under per-step schedules, until the loss is no number.

    A method gives :meth:`training_loss`. It may override ``backbone`` (what is kept, scored and looked at), ``trained``
    (what the optimiser moves), :meth:`scheduled`, :meth:`after_update` and the validation, which by default scores the
    embeddings of ``image`` by k-NN, each against the others of the validation set.

    Args:
        backbone: what is trained; kept as ``backbone``, unless a method has a property of that name.
        lr: peak learning rate for 256 images a step; scaled by (global batch / 256).
        min_lr: its value at the end (not scaled).
        warmup_epochs: linear warm-up of the learning rate from 0.
        weight_decay, weight_decay_end: cosine, on tensors with more than one axis; None keeps it constant.
        clip_grad: largest L2 norm of a gradient; None or 0 for no clipping.
        clip: of ``each`` parameter's gradient by itself, or of ``all`` together.
        global_batch_size: images per optimiser step over all devices, for the learning rate; None asks the
            datamodule's ``batch_size``.
        knn_k: neighbours of the validation score; None for no such score.
        grad_checkpointing: keep only the blocks' inputs for the backward pass: less memory, one more forward pass.
        init_weights: what the backbone starts from, a file or name that :func:`backbones.weights.load` reads; None for
            its initialisation. A run that is resumed goes on from its checkpoint instead.
        weights_key: which network of a full checkpoint that is.

    Raises:
        FloatingPointError: after a non-finite loss, naming its step; nothing was updated by it. On CUDA it may come
            up to ``trainer.log_every_n_steps`` steps later, in which nothing is updated either.
    """

    headline = "val/knn_top1"
    views: tuple[str, ...] | None = None
    """Views of ImageNetDataModule that a method trains on; None for any."""
    fixed_on_resume: tuple[str, ...] = ("init_weights", "weights_key")
    """Arguments that a run keeps when it is resumed."""
    backbone: Backbone
    weights_source: str
    """Where the backbone's parameters came from at the start."""

    def __init__(
        self, backbone: Backbone, lr: float = 5e-4, min_lr: float = 0.0, warmup_epochs: int = 10,
        weight_decay: float = 0.04, weight_decay_end: float | None = None, clip_grad: float | None = None,
        clip: Literal["each", "all"] = "all", global_batch_size: int | None = None, knn_k: int | None = 20,
        grad_checkpointing: bool = False, init_weights: str | None = None, weights_key: str = "teacher",
    ) -> None:  # fmt: skip
        super().__init__()
        if clip not in ("each", "all"):
            raise ValueError(f"clip={clip!r}; allowed: each, all")
        self._lr, self._min_lr, self._warmup_epochs = lr, min_lr, warmup_epochs
        self._weight_decay = weight_decay, weight_decay if weight_decay_end is None else weight_decay_end
        self._clip_grad, self._clip, self._batch = clip_grad, clip, global_batch_size
        self._init_weights, self._weights_key = init_weights, weights_key
        self.weights_source = backbone.weights_source
        backbone.set_grad_checkpointing(grad_checkpointing)
        if not isinstance(getattr(type(self), "backbone", None), property):
            self.backbone = backbone
        self.finite = FiniteGuard()
        self.check_every: int | None = None
        """Steps between looks at the guard; None for those that are logged on CUDA, and for every step elsewhere."""
        self.knn = None if knn_k is None else KNNAccuracy(k=knn_k)

    def on_fit_start(self) -> None:
        """Fills the backbone from ``init_weights``, in a new run only."""
        splits = getattr(self.trainer.datamodule, "splits", {})
        if (
            self.knn is not None
            and "val" in splits
            and (count := len(self.trainer.datamodule.source("val"))) <= self.knn.k
        ):
            logger.warning(
                "model.init_args.knn_k=%d: the validation set holds %d images, so all others of it vote",
                self.knn.k,
                count,
            )
        if self._init_weights is not None and self.trainer.ckpt_path is None:
            kind = self.start_from(self._init_weights, self._weights_key)
            logger.info("the backbone starts from %s (%s)", self._init_weights, kind)
            self.weights_source = f"trained from {self._init_weights} ({kind})"
        super().on_fit_start()
        self.backbone.pixels = self._used_pixels() or self.backbone.pixels

    def start_from(self, source: str, key: str) -> str:
        """Loads the trained backbone; a method with several copies of it overrides this. Returns the format."""
        return weights.load(self.backbone, source, key)

    # ---- what a method gives ------------------------------------------------------------------------------

    @abstractmethod
    def training_loss(self, batch: dict[str, Any]) -> Tensor | tuple[Tensor, Logged]:
        """The loss, a scalar, and, if anything, what is logged beside it as ``train/NAME``."""

    @property
    def trained(self) -> nn.Module:
        """What the optimiser moves."""
        return self

    @property
    def uniform_loss(self) -> float | None:
        """The loss of a model that gives every image the same uniform answer; None where there is no such value."""
        return None

    def after_update(self, values: dict[str, float], skip_update: Tensor | None) -> None:
        """Called after each optimiser step.

        Args:
            values: the step's :meth:`scheduled`.
            skip_update: a boolean scalar on the device; where it is true the optimiser did nothing, and nothing else
                should move. None where that is known to be false.
        """

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

    def _schedule_step(self, batch_idx: int) -> int:
        """Where the optimiser step of a batch stands in a run as it is asked for now.

        A run that was resumed with another number of steps an epoch took others before: where epochs end it, they
        count.
        """
        if self.trainer.max_steps != -1:
            return self.trainer.global_step
        return self._epoch * self._steps_per_epoch + batch_idx // self.trainer.accumulate_grad_batches

    def scheduled(self, step: int) -> dict[str, float]:
        """Values of an optimiser step by name, ``lr`` and ``weight_decay`` among them."""
        total, warmup = self._total_steps, self._warmup_epochs * self._steps_per_epoch
        return {
            "lr": cosine_schedule(step, total, self._peak_lr, self._min_lr, warmup),
            "weight_decay": cosine_schedule(step, total, *self._weight_decay),
        }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.global_batch_size = global_batch_size(self, self._batch)
        self._peak_lr = peak = self._lr * self.global_batch_size / 256
        if self.trainer.max_epochs in (None, -1) and self.trainer.max_steps == -1:
            raise ValueError("the schedules need an end: set trainer.max_epochs or trainer.max_steps")
        groups = param_groups_weight_decay(self.trained, self._weight_decay[0])
        for group in groups:
            group["initial_lr"] = peak
        return torch.optim.AdamW(groups, lr=peak, fused=self.device.type in ("cpu", "cuda"))

    # ---- one step -----------------------------------------------------------------------------------------

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        found = self.training_loss(batch)
        loss, logged = (found, {}) if isinstance(found, Tensor) else found
        self.finite.note(loss, self.trainer.global_step)
        if self._due(self._steps_between_checks):
            self.finite.check()
        if self._steps_between_checks > 1:  # as GradScaler tells fused optimisers to do nothing
            self.trainer.optimizers[0].found_inf = self.finite.skip_update.float()
        if self._due(self.trainer.log_every_n_steps):  # each value is a transfer, and the device waits for some
            self._log_step(loss, logged, batch_idx)
        return loss

    @property
    def _steps_between_checks(self) -> int:
        return self.check_every or (self.trainer.log_every_n_steps or 1 if self.device.type == "cuda" else 1)

    def _due(self, every: int) -> bool:
        """Whether this step is one of every so many, as Lightning counts those that it logs."""
        return (self.trainer.global_step + 1) % max(1, every) == 0

    def _log_step(self, loss: Tensor, logged: Logged, batch_idx: int) -> None:
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log_dict({f"train/{k}": v() if callable(v) else v for k, v in logged.items()})
        self.log_dict({f"schedule/{k}": v for k, v in self.scheduled(self._schedule_step(batch_idx)).items()})

    def on_train_epoch_end(self) -> None:
        self.finite.check()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """No checkpoint is written after a step that is about to stop the run."""
        self.finite.check()
        super().on_save_checkpoint(checkpoint)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: Any = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        if gradient_clip_val is not None:
            how = "each parameter by itself" if self._clip == "each" else "all gradients together"
            raise ValueError(f"{type(self).__name__} clips {how}: set model.clip_grad, not trainer.gradient_clip_val")
        if self._clip_grad and self._clip == "each":
            groups = optimizer.param_groups
            clip_each([p.grad for group in groups for p in group["params"] if p.grad is not None], self._clip_grad)
        elif self._clip_grad:
            torch.nn.utils.clip_grad_norm_(self.trained.parameters(), self._clip_grad)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        values = self.scheduled(self._schedule_step(batch_idx))
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = values["lr"] * group.get("lr_scale", 1.0)
            if group.get("decays", i == 0):  # checkpoints of before do not say
                group["weight_decay"] = values["weight_decay"]
        # with a look at every step no such loss comes this far
        skip_update = self.finite.skip_update if self._steps_between_checks > 1 else None

        def unscaled_closure() -> Any:
            """With a scale on the loss (16-mixed) Lightning leaves it in the gradients for a fused optimiser to take
            out, which is after they were clipped and looked at."""
            loss = optimizer_closure()
            scaler = getattr(self.trainer.precision_plugin, "scaler", None)
            fused = getattr(optimizer, "optimizer", optimizer)
            if scaler is not None and loss is not None and getattr(fused, "_step_supports_amp_scaling", False):
                scaler.unscale_(fused)
            return loss

        super().optimizer_step(epoch, batch_idx, optimizer, unscaled_closure)
        self.after_update(values, skip_update)

    # ---- validation and prediction ------------------------------------------------------------------------

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to embeddings (B, D)."""
        return self.backbone.embedding(images)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        if self.knn is None:
            return
        images = batch["image"]
        # an empty batch is recorded too: a rank whose state stays empty would miss the gathering
        embeddings = self(images) if len(images) else images.new_empty(0, self.backbone.num_features)
        labelled = batch["label"] >= 0
        self.knn.update(embeddings[labelled], batch["label"][labelled])

    def on_validation_epoch_end(self) -> None:
        if self.knn is not None:
            scores = self.knn.compute()
            if not scores["top1"].isnan():  # images without classes are no better or worse
                self.log_dict({f"val/knn_{k}": v for k, v in scores.items()}, prog_bar=True)
            self.knn.reset()

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        embeddings = self.backbone.embedding(batch["image"])
        return {"key": batch["key"], "label": batch["label"], "embedding": embeddings}
