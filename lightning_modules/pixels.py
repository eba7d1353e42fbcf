"""Holds what weights were trained on against what the data module feeds them, and records it in checkpoints."""

from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from backbones import Backbone
from backbones.pixels import KEY, Pixels, of_checkpoint, shown

INTERPOLATION = "bicubic"
"""What our data modules resize by."""


class KnowsItsPixels:
    """Mixed into a LightningModule with a ``backbone``.

    ``backbone.pixels`` says how its weights were fed, where they tell; a data module without a ``mean`` and ``std`` of
    its own takes these. Other values, and another interpolation, are named once, before the first step. Checkpoints
    hold what the data were normalised by.
    """

    backbone: Backbone
    _named = False

    def _name_contradictions(self) -> None:
        """Called when all weights are loaded."""
        wanted, used = self.backbone.pixels, self._used_pixels()
        if self._named or wanted is None or used is None:
            return
        self._named = True
        if not wanted.normalizes_as(used.mean, used.std):
            rank_zero_warn(
                f"data.init_args.mean={shown(used.mean)}, std={shown(used.std)}, but {wanted.source} says that the "
                f"weights were trained with mean {shown(wanted.mean)}, std {shown(wanted.std)}: leave mean and std "
                "null to feed them so"
            )
        elif not wanted.normalizes_as(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD):
            rank_zero_info(f"images are normalised by {wanted.source}: mean {shown(used.mean)}, std {shown(used.std)}")
        if wanted.interpolation not in (None, INTERPOLATION):
            rank_zero_info(f"{wanted.source} resizes by {wanted.interpolation}; the data here by {INTERPOLATION}")

    def _used_pixels(self) -> Pixels | None:
        """What the data are normalised by; None where no data module of ours says so."""
        trainer: Any = getattr(self, "_trainer", None)
        data = getattr(trainer, "datamodule", None)
        mean, std = getattr(data, "mean", None), getattr(data, "std", None)
        return None if mean is None or std is None else Pixels(tuple(mean), tuple(std), "this run")

    def on_fit_start(self) -> None:
        self._name_contradictions()

    def on_validation_start(self) -> None:
        self._name_contradictions()

    def on_test_start(self) -> None:
        self._name_contradictions()

    def on_predict_start(self) -> None:
        self._name_contradictions()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        used, known = self._used_pixels(), self.backbone.pixels
        if used is not None:
            if known is not None and known.normalizes_as(used.mean, used.std):
                used = replace(known, mean=used.mean, std=used.std)
            checkpoint[KEY] = used.record()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.backbone.pixels = of_checkpoint(checkpoint, "the checkpoint") or self.backbone.pixels
