"""Semantic segmentation: UperNet with an auxiliary head, or one linear layer, behind any backbone.

Shapes: B images, C classes, H x W pixels.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import Tensor

from backbones import Backbone, Stream
from heads import FCNHead, LinearSegmentationHead, UPerHead, segmentation_loss
from heads.layers import resize
from heads.sliding import classes_at, segment_whole, segment_windows
from lightning_modules.dense import DenseTraining, is_plain
from lightning_modules.hparams import record_hyperparameters
from lightning_modules.pretraining import Logged
from lightning_modules.segmentation_scores import ScoresSegmentation


class SemanticSegmentation(ScoresSegmentation, DenseTraining):
    """A backbone, a neck, and a head that gives each pixel a class.

    Training batches hold ``image`` (B, 3, H, W) and ``target`` (B, H, W); evaluation batches ``image``, a list of
    (3, h, w), and ``target``, a list of label maps at whatever size they have, at which they are scored.

    Args:
        backbone: fine-tuned, or frozen.
        num_classes: C.
        head: ``upernet`` with an auxiliary FCN head; ``linear``, a batch norm and one layer on the levels side by side.
        channels: of UperNet's inner maps.
        aux_channels: of the auxiliary head's; 0 for no such head.
        aux_weight: of its loss.
        aux_index: which level it reads.
        dropout: of channels before the classes.
        ignore_index: of pixels without a class.
        inference: ``whole`` images, or windows that ``slide``.
        window: their height and width, pixels.
        window_stride: steps between them, pixels.
        windows_at_once: how many pass through the model together.
        taps, stream, taps_norm, frozen: see :class:`DenseTraining`, as all that follows.
        neck: ``auto`` is ``identity`` for a pyramid and for a linear head, and ``multilevel`` for a plain backbone.
    """

    trained_part = "head"
    views = ("train",)

    def __init__(
        self,
        backbone: Backbone,
        num_classes: int = 150,
        head: Literal["upernet", "linear"] = "upernet",
        channels: int = 512,
        aux_channels: int = 256,
        aux_weight: float = 0.4,
        aux_index: int = 2,
        dropout: float = 0.1,
        ignore_index: int = 255,
        inference: Literal["whole", "slide"] = "whole",
        window: tuple[int, int] = (512, 512),
        window_stride: tuple[int, int] = (341, 341),
        windows_at_once: int = 4,
        taps: list[int] | None = None,
        stream: Stream = "published",
        taps_norm: bool = True,
        neck: str = "auto",
        neck_channels: int | None = None,
        frozen: bool = False,
        lr: float = 6e-5,
        weight_decay: float = 0.05,
        layer_decay: float | None = None,
        schedule: Literal["poly", "steps"] = "poly",
        power: float = 1.0,
        milestones: list[float] = [],  # noqa: B006  # a value, never changed
        gamma: float = 0.1,
        warmup_steps: int = 1500,
        warmup_factor: float = 1e-6,
        clip_grad: float | None = None,
        grad_checkpointing: bool = False,
        backbone_weights: str | None = None,
        weights_key: str = "teacher",
    ) -> None:
        if neck == "auto":
            neck = "identity" if head == "linear" or not is_plain(backbone) else "multilevel"
        super().__init__(
            backbone, taps, stream, taps_norm, neck, neck_channels, frozen, lr, weight_decay, layer_decay, schedule,
            power, milestones, gamma, warmup_steps, warmup_factor, clip_grad, grad_checkpointing, backbone_weights,
            weights_key,
        )  # fmt: skip
        record_hyperparameters(self, "backbone")
        for name, value, allowed in (
            ("head", head, ("upernet", "linear")), ("inference", inference, ("whole", "slide")),
        ):  # fmt: skip
            if value not in allowed:
                raise ValueError(f"model.init_args.{name}={value!r}; allowed: {', '.join(allowed)}")
        widths = self.neck.out_channels
        self.aux_weight, self.auxiliary_head = aux_weight, None
        if head == "linear":
            self.decode_head: UPerHead | LinearSegmentationHead = LinearSegmentationHead(widths, num_classes, dropout)
        else:
            self.decode_head = UPerHead(widths, channels, num_classes, dropout=dropout)
            if aux_channels:
                if not 0 <= aux_index < len(widths):
                    raise ValueError(
                        f"model.init_args.aux_index={aux_index}; the neck gives levels 0..{len(widths) - 1}"
                    )
                self.auxiliary_head = FCNHead(widths[aux_index], aux_channels, num_classes, 1, aux_index, dropout)
        self.inference, self.windows_at_once = inference, windows_at_once
        self.window, self.window_stride = tuple(window), tuple(window_stride)
        self.start_scores(num_classes, ignore_index)

    # ---- forward ------------------------------------------------------------------------------------------

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) of any size to logits (B, C, H, W), as ``inference`` says."""
        if self.inference == "whole":
            return segment_whole(self.pixel_logits, images)
        return segment_windows(self.pixel_logits, images, self.window, self.window_stride, self.windows_at_once)

    def pixel_logits(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) of any size, in one piece, to logits (B, C, H, W)."""
        padded = self.padded(images)
        logits = resize(self.decode_head(self.levels(padded)), padded.shape)
        return logits[..., : images.shape[-2], : images.shape[-1]]

    def training_loss(self, batch: dict[str, Any]) -> tuple[Tensor, Logged]:
        levels, target = self.levels(batch["image"]), batch["target"]
        found = segmentation_loss(self.decode_head(levels), target, self.ignore_index)
        loss, logged = found.loss, {"accuracy": found.accuracy}
        if self.auxiliary_head is not None:
            aux = segmentation_loss(self.auxiliary_head(levels), target, self.ignore_index)
            loss = loss + self.aux_weight * aux.loss
            logged |= {"aux_loss": aux.loss.detach(), "aux_accuracy": aux.accuracy}
        return loss, logged

    # ---- evaluation ---------------------------------------------------------------------------------------

    def segmented(self, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """Images (3, h, w) of any sizes to class maps, each of its size (H, W)."""
        for image, size in zip(images, sizes, strict=True):
            yield classes_at(self(image[None]), size)[0]

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        targets = batch["target"]
        found = self.segmented(batch["image"], [(target.shape[0], target.shape[1]) for target in targets])
        for key, image, predicted, target in zip(batch["key"], batch["image"], found, targets, strict=True):
            self.score(key, image, predicted, target)

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"val/{name}": value for name, value in self.finish_scores().items()}, prog_bar=True)

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Keys, and a class map for each image, at the size of its label map."""
        found = self.segmented(batch["image"], [(target.shape[0], target.shape[1]) for target in batch["target"]])
        maps = {f"classes_{i}": predicted.int() for i, predicted in enumerate(found)}
        return {"key": batch["key"], **maps}
