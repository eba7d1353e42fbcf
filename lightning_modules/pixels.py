"""Holds what weights were trained on against what the data module feeds them, and records it in checkpoints."""

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
        size = self._image_size("val")
        by_others = [] if wanted.interpolation in (None, INTERPOLATION) else [f"resized by {wanted.interpolation}"]
        if wanted.size is not None and size is not None and wanted.size != (size, size):
            by_others.append(f"of {wanted.size[0]} x {wanted.size[1]} pixels")
        if by_others:
            here = f"{'' if size is None else f'{size} x {size}, '}{INTERPOLATION}"
            rank_zero_info(f"{wanted.source} says that images were {', '.join(by_others)}; evaluated here: {here}")

    def _image_size(self, stage: str) -> int | None:
        """Of the data; None where no data module of ours says so."""
        ask = getattr(getattr(getattr(self, "_trainer", None), "datamodule", None), "image_size", None)
        return None if ask is None else ask(stage)

    def _used_pixels(self) -> Pixels | None:
        """What the data are normalised by; None where no data module of ours says so."""
        trainer: Any = getattr(self, "_trainer", None)
        data = getattr(trainer, "datamodule", None)
        mean, std = getattr(data, "mean", None), getattr(data, "std", None)
        if mean is None or std is None:
            return None
        side = self._image_size("train") or self._image_size("val")
        return Pixels(tuple(mean), tuple(std), "this run", None if side is None else (side, side))

    def on_fit_start(self) -> None:
        self._name_contradictions()

    def on_validation_start(self) -> None:
        self._name_contradictions()

    def on_test_start(self) -> None:
        self._name_contradictions()

    def on_predict_start(self) -> None:
        self._name_contradictions()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if (used := self._used_pixels()) is not None:
            checkpoint[KEY] = used.record()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.backbone.pixels = of_checkpoint(checkpoint, "the checkpoint") or self.backbone.pixels
