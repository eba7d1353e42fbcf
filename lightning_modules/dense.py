"""What training for dense tasks shares: a backbone, fine-tuned or frozen, a neck, and a recipe by steps.

Shapes: B images, H x W pixels, D_i x h_i x w_i of a level.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from backbones import Backbone, Stream
from heads import Neck, build_neck
from lightning_modules.param_groups import param_groups_weight_decay
from lightning_modules.pretraining import Pretraining
from lightning_modules.schedules import poly_schedule, step_schedule, warmed_up

TAPS = {12: (3, 5, 7, 11), 24: (5, 11, 17, 23)}
"""Blocks that are read of a plain backbone, by its depth."""
LEVELS = 4


def default_taps(depth: int) -> tuple[int, ...]:
    """The usual blocks for depths of 12 and 24; evenly spaced ones, the last among them, for others.

    ValueError for fewer than four blocks.
    """
    if depth < LEVELS:
        raise ValueError(f"model.init_args.taps=null: the backbone has {depth} blocks; name those that are read")
    return TAPS.get(depth, tuple(depth * (i + 1) // LEVELS - 1 for i in range(LEVELS)))


def is_plain(backbone: Backbone) -> bool:
    """Whether all blocks give maps of one size, and it is no pyramid."""
    return len({info["reduction"] for info in backbone.feature_info}) == 1


class DenseTraining(Pretraining, ABC):
    """A backbone and what is behind it, trained by AdamW with a warm-up and a schedule by steps.

    Args:
        backbone: fine-tuned, or frozen.
        taps: blocks or stages that are read, counted from 0; None for all stages of a pyramid, blocks 3, 5, 7, 11 of
            12, 5, 11, 17, 23 of 24, and four evenly spaced ones of other plain backbones.
        stream: which stream of the blocks is read; see :meth:`backbones.Backbone.forward_intermediates`.
        taps_norm: read the blocks behind the backbone's final norm.
        neck: see :func:`heads.build_neck`.
        neck_channels: of what comes out of the neck, where that leaves it open; None for the backbone's width.
        frozen: the backbone stays as it is, in eval mode.
        lr: peak learning rate, of whatever batch.
        weight_decay: on matrices; none on biases, norms, tokens and positions.
        layer_decay: factor of the learning rate from the head to the backbone's last block, and from each block to the
            one before it; None for one rate.
        schedule: ``poly`` falls to 0 at the last step; ``steps`` falls at milestones.
        power: of ``poly``.
        milestones: of ``steps``, in epochs.
        gamma: of ``steps``.
        warmup_steps: optimiser steps of linear warm-up.
        warmup_factor: of the learning rate, where it starts.
        clip_grad: largest norm of all gradients together; None or 0 for no clipping.
        backbone_weights: what the backbone starts from: ``init_weights`` of :class:`Pretraining`.
        grad_checkpointing, weights_key: see there.
    """

    fixed_on_resume = ("backbone_weights", "weights_key", "stream", "taps", "taps_norm", "frozen")
    backbone: Backbone
    neck: Neck

    def __init__(
        self, backbone: Backbone, taps: Sequence[int] | None, stream: Stream, taps_norm: bool, neck: str,
        neck_channels: int | None, frozen: bool, lr: float, weight_decay: float, layer_decay: float | None,
        schedule: Literal["poly", "steps"], power: float, milestones: Sequence[float], gamma: float, warmup_steps: int,
        warmup_factor: float, clip_grad: float | None, grad_checkpointing: bool, backbone_weights: str | None,
        weights_key: str,
    ) -> None:  # fmt: skip
        super().__init__(
            backbone, lr, 0.0, 0, weight_decay, None, clip_grad, "all", None, None, grad_checkpointing,
            backbone_weights, weights_key,
        )  # fmt: skip
        if schedule not in ("poly", "steps"):
            raise ValueError(f"model.init_args.schedule={schedule!r}; allowed: poly, steps")
        self.schedule, self.power, self.milestones, self.gamma = schedule, power, list(milestones), gamma
        self.warmup_steps, self.warmup_factor, self.layer_decay = warmup_steps, warmup_factor, layer_decay
        if taps is None:
            taps = default_taps(backbone.depth) if is_plain(backbone) else range(backbone.depth)
        self.taps, self.stream, self.taps_norm = backbone.block_indices(taps), stream, taps_norm
        backbone.resolve_stream(stream)
        read = [backbone.feature_info[tap] for tap in self.taps]
        self.neck = build_neck(
            neck, [info["num_chs"] for info in read], [info["reduction"] for info in read],
            neck_channels or max(info["num_chs"] for info in read),
        )  # fmt: skip
        self.frozen = frozen
        if frozen:
            backbone.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "DenseTraining":
        super().train(mode)
        if self.frozen:
            self.backbone.eval()
        return self

    # ---- forward ------------------------------------------------------------------------------------------

    def levels(self, images: Tensor) -> list[Tensor]:
        """(B, C, H, W), sides multiples of the patch, to the neck's maps (B, D_i, h_i, w_i), finest first."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            blocks = self.backbone.forward_intermediates(images, self.taps, self.stream, self.taps_norm)
        return self.neck([features.patches for features in blocks])

    def padded(self, images: Tensor) -> Tensor:
        """(B, C, H, W) with zeros on the right and below, to sides that the backbone takes."""
        patch = self.backbone.patch_size
        bottom, right = (-side % patch for side in images.shape[-2:])
        return F.pad(images, (0, right, 0, bottom)) if bottom or right else images

    # ---- recipe -------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Leaves out of training what no level hangs on, such as blocks behind the last tap."""
        super().setup(stage)
        if stage == "fit" and not self.frozen:
            unused = self._unused()
            for name in unused:
                self.backbone.get_parameter(name).requires_grad_(False)
            if unused:
                shown = ", ".join(unused[:3]) + (", …" if len(unused) > 3 else "")
                rank_zero_info(f"{len(unused)} parameters of the backbone reach no level and stay as they are: {shown}")

    def _unused(self) -> list[str]:
        """Names of the backbone's parameters that get no gradient from the taps; found by one pass of a blank image."""
        parameters = [(name, p) for name, p in self.backbone.named_parameters() if p.requires_grad]
        side = 2 * self.backbone.patch_size
        blank = next(self.backbone.parameters()).new_zeros(1, self.backbone.in_chans or 3, side, side)
        training = self.backbone.training
        self.backbone.eval()  # no path is dropped, and no statistics move
        with torch.enable_grad():
            blocks = self.backbone.forward_intermediates(blank, self.taps, self.stream, self.taps_norm)
            total = torch.stack([features.patches.sum() for features in blocks]).sum()
            found = torch.autograd.grad(total, [p for _, p in parameters], allow_unused=True)
        self.backbone.train(training)
        return [name for (name, _), grad in zip(parameters, found, strict=True) if grad is None]

    def scheduled(self, step: int) -> dict[str, float]:
        """Learning rate and weight decay of an optimiser step."""
        lr = warmed_up(step, self._lr, self.warmup_steps, self.warmup_factor)
        if lr is None and self.schedule == "poly":
            lr = poly_schedule(step, self._total_steps, self._lr, self.warmup_steps, self.power)
        elif lr is None:
            lr = step_schedule(step / self._steps_per_epoch, self._lr, self.milestones, self.gamma)
        return {"lr": lr, "weight_decay": self._weight_decay[0]}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decay = self._weight_decay[0]
        groups = []
        if not self.frozen:
            groups = self.backbone.param_groups(decay, self.layer_decay)
            for group in groups:
                group["lr_scale"] = group.get("lr_scale", 1.0) * (self.layer_decay or 1.0)
                group["decays"] = group["weight_decay"] > 0
        groups += param_groups_weight_decay(self.behind, decay)
        for group in groups:
            group["initial_lr"] = self._lr
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=self._lr, fused=self.device.type in ("cpu", "cuda"))

    @property
    def behind(self) -> nn.ModuleDict:
        """What is trained behind the backbone, the neck first."""
        return nn.ModuleDict({name: module for name, module in self.named_children() if name != "backbone"})

    @abstractmethod
    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Scores a batch."""

    @abstractmethod
    def on_validation_epoch_end(self) -> None:
        """Logs the scores of all images, and keeps them."""
