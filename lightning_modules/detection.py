"""Object detection and instance segmentation: Cascade Mask R-CNN, or plain Mask R-CNN, behind any backbone.

Shapes: B images, H x W pixels, m objects of an image, d detections, K classes.
"""

from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_iou
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from backbones import Backbone, Stream
from common.collectives import gather_objects
from common.pictures import class_colours, pictures
from heads import CascadeMaskRCNN, MaskRCNN
from heads.layers import resize
from lightning_modules.dense import DenseTraining, is_plain
from lightning_modules.extremes import SIDE, Extremes
from lightning_modules.hparams import record_hyperparameters
from lightning_modules.pretraining import Logged
from metrics import DetectionAP, bitmaps

SHOWN_SCORE = 0.3
"""Detections with less are not drawn."""
DETECTORS = {"cascade": CascadeMaskRCNN, "mask_rcnn": MaskRCNN}


class InstanceSegmentation(DenseTraining):
    """A backbone, a neck, and a detector that gives boxes and masks.

    Batches hold ``image`` (B, 3, H, W), padded on the right and below, ``valid`` (B, 2) rows and columns without that,
    and ``original`` (B, 2) height and width before resizing; training batches also ``boxes``, ``labels`` and ``masks``
    of each image, in its frame as it comes, and evaluation batches ``truth``, the annotations in the original frame.

    Args:
        backbone: fine-tuned, or frozen.
        num_classes: K.
        detector: ``cascade`` of three stages, or plain ``mask_rcnn``.
        neck: ``auto`` is ``fpn`` for a pyramid, and ``simple`` (of the last tap alone) for a plain backbone.
        neck_channels: of the levels.
        fc_channels, mask_channels: of the box heads and the mask heads.
        rpn_samples, roi_samples: anchors and candidates of an image that are trained on.
        score_threshold: detections score strictly more.
        max_detections: of an image.
        taps, stream, taps_norm, frozen: see :class:`DenseTraining`, as all that follows.
    """

    headline = "val/APm"
    trained_part = "detector"

    def __init__(
        self,
        backbone: Backbone,
        num_classes: int = 80,
        detector: Literal["cascade", "mask_rcnn"] = "cascade",
        neck: str = "auto",
        neck_channels: int = 256,
        fc_channels: int = 1024,
        mask_channels: int = 256,
        rpn_samples: int = 256,
        roi_samples: int = 512,
        score_threshold: float = 0.05,
        max_detections: int = 100,
        taps: list[int] | None = None,
        stream: Stream = "published",
        taps_norm: bool = True,
        frozen: bool = False,
        lr: float = 1e-4,
        weight_decay: float = 0.1,
        layer_decay: float | None = None,
        schedule: Literal["poly", "steps"] = "steps",
        power: float = 1.0,
        milestones: list[float] = [8, 11],  # noqa: B006  # a value, never changed
        gamma: float = 0.1,
        warmup_steps: int = 500,
        warmup_factor: float = 1e-3,
        clip_grad: float | None = None,
        grad_checkpointing: bool = False,
        backbone_weights: str | None = None,
        weights_key: str = "teacher",
    ) -> None:
        if detector not in DETECTORS:
            raise ValueError(f"model.init_args.detector={detector!r}; allowed: {', '.join(DETECTORS)}")
        if neck == "auto":
            neck = "simple" if is_plain(backbone) else "fpn"
        if neck == "simple" and taps is None:
            taps = [-1]
        super().__init__(
            backbone, taps, stream, taps_norm, neck, neck_channels, frozen, lr, weight_decay, layer_decay, schedule,
            power, milestones, gamma, warmup_steps, warmup_factor, clip_grad, grad_checkpointing, backbone_weights,
            weights_key,
        )  # fmt: skip
        record_hyperparameters(self, "backbone")
        if len(set(self.neck.out_channels)) > 1:
            raise ValueError(
                f"model.init_args.neck={neck!r} gives levels of {self.neck.out_channels} channels; a detector reads "
                "levels of one width: allowed are simple, feature2pyramid+fpn, fpn"
            )
        self.num_classes = num_classes
        self.detector = DETECTORS[detector](
            num_classes, self.neck.out_channels[0], self.neck.out_channels[0], fc_channels, mask_channels,
            [int(stride) for stride in self.neck.strides], rpn_samples, roi_samples=roi_samples,
            score_threshold=score_threshold, max_detections=max_detections,
        )  # fmt: skip
        self.precision = DetectionAP(num_classes)
        self._images = 0
        self._shown = Extremes()
        self._rows: list[dict[str, Any]] = []
        self._arrays: dict[str, np.ndarray] = {}

    # ---- forward ------------------------------------------------------------------------------------------

    def forward(  # type: ignore[override]
        self, images: Tensor, sizes: Any = None, original_sizes: Any = None
    ) -> list[dict[str, Tensor]]:  # fmt: skip
        """Images (B, 3, H, W) to ``boxes`` (d, 4), ``scores`` (d), ``labels`` (d) and ``masks`` (d, h, w) of each.

        Args:
            images: padded on the right and below, or not at all.
            sizes: (h, w) of each without padding; None for the whole of them.
            original_sizes: (h, w) of each before it was resized, in whose frame the detections are; None for ``sizes``.
        """
        whole = [(images.shape[-2], images.shape[-1])] * len(images)
        sizes = whole if sizes is None else [(int(h), int(w)) for h, w in sizes]
        original = sizes if original_sizes is None else [(int(h), int(w)) for h, w in original_sizes]
        return self.detector.predict(self.levels(self.padded(images)), sizes, original)

    def training_loss(self, batch: dict[str, Any]) -> tuple[Tensor, Logged]:
        images = self.padded(batch["image"])
        targets = [
            {"boxes": boxes, "labels": labels, "masks": masks}
            for boxes, labels, masks in zip(batch["boxes"], batch["labels"], batch["masks"], strict=True)
        ]
        sizes = [(h, w) for h, w in batch["valid"].tolist()]
        losses = self.detector.loss(self.levels(images), targets, sizes)
        return losses["loss"], {name: value.detach() for name, value in losses.items() if name != "loss"}

    # ---- evaluation ---------------------------------------------------------------------------------------

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        if not len(batch["image"]):
            return
        found = self(batch["image"], batch["valid"].tolist(), batch["original"].tolist())
        self.precision.update(batch["image_id"].tolist(), found, batch["truth"])
        self._images += len(found)
        shown = pictures(batch["image"], self.trainer.datamodule)
        for key, image, (h, w), detected, truth in zip(
            batch["key"], shown, batch["valid"].tolist(), found, batch["truth"], strict=True
        ):
            picture = partial(self._picture, image[:, :h, :w], detected, truth)
            self._shown.offer(mean_iou(detected, truth), key, picture)

    def _picture(self, image: Tensor, detected: dict[str, Tensor], truth: dict[str, Any]) -> dict[str, np.ndarray]:
        """(h, w, 3) uint8 each: the image, with what was detected, and with the truth."""
        masks = {"predicted": detected["masks"].cpu(), "target": bitmaps(truth["masks"]).cpu()}
        size = next((mask.shape[-2:] for mask in masks.values() if len(mask)), image.shape[-2:])
        scale = min(1.0, SIDE / max(size))
        size = torch.Size(round(side * scale) for side in size)
        small = (resize(image[None], size)[0] * 255).round().byte().cpu()
        certain = detected["scores"].cpu() >= SHOWN_SCORE
        boxes, labels = (detected[name].cpu()[certain] for name in ("boxes", "labels"))
        parts = {
            "predicted": (masks["predicted"][certain], boxes, labels),
            "target": (masks["target"], truth["boxes"].cpu(), truth["labels"].cpu()),
        }  # fmt: skip
        drawn = {name: draw_objects(small, *part, scale, self.num_classes) for name, part in parts.items()}
        return {name: picture.movedim(0, -1).numpy() for name, picture in ({"image": small} | drawn).items()}

    def on_validation_epoch_end(self) -> None:
        scores = self.precision.compute()
        self.precision.reset()
        images = sum(gather_objects(self._images))
        names = getattr(self.trainer.datamodule, "class_names", None) or []
        values = {
            f"{ours}{ending}": scores[f"{kind}_{theirs}"].item()
            for kind, ours in (("bbox", "APb"), ("segm", "APm"))
            for theirs, ending in ENDINGS.items()
        }
        self._rows = [
            {"metric": k, "class": None, "name": None, "value": v, "images": images}
            for k, v in values.items()
            if v >= 0
        ]
        self._rows += [
            {"metric": ours, "class": i, "name": names[i] if i < len(names) else None, "value": value,
             "images": images}
            for kind, ours in (("bbox", "APb"), ("segm", "APm"))
            for i, value in enumerate(scores[f"{kind}_per_class"].tolist())
            if value >= 0
        ]  # fmt: skip
        self._arrays = {f"precision_{kind}": curves(scores[f"{kind}_precision"]) for kind in ("bbox", "segm")}
        self._arrays |= self._shown.arrays()
        self._images, self._shown = 0, Extremes()
        self.log_dict({f"val/{k}": v for k, v in values.items() if v >= 0}, prog_bar=False)

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Keys, and of image i ``boxes_i``, ``scores_i``, ``labels_i`` and ``masks_i`` in its original frame."""
        found = self(batch["image"], batch["valid"].tolist(), batch["original"].tolist())
        return {"key": batch["key"]} | {f"{k}_{i}": v for i, one in enumerate(found) for k, v in one.items()}

    # ---- records ------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """COCO's numbers of the latest validation, as shares in 1: over all classes, and AP of each that has one."""
        return self._rows

    def arrays(self) -> dict[str, np.ndarray]:
        """``precision_bbox`` and ``precision_segm`` (3, 101), means over classes by recall at IoU 0.5, 0.75, and over
        0.5 to 0.95; and pictures of the images whose objects are found worst and best."""
        return self._arrays


ENDINGS = {"AP": "", "AP50": "50", "AP75": "75", "APs": "_small", "APm": "_medium", "APl": "_large"}
"""COCO's names to those of the paper's table."""


def mean_iou(detected: dict[str, Tensor], truth: dict[str, Any]) -> float:
    """Mean over an image's objects of the IoU of the best box of its class; NaN where there is no object."""
    boxes = truth["boxes"].to(detected["boxes"])
    if not len(boxes):
        return float("nan")
    if not len(detected["boxes"]):
        return 0.0
    ious = box_iou(boxes, detected["boxes"])
    same = truth["labels"].to(detected["labels"])[:, None] == detected["labels"]
    return float((ious * same).amax(1).mean())


def curves(precision: Tensor) -> np.ndarray:
    """Precision (T, R, K), -1 where a class is not there, to (3, R): at IoU 0.5, at 0.75, and the mean over all."""
    there = precision[..., (precision > -1).all((0, 1))]
    return torch.stack([there[0].mean(-1), there[5].mean(-1), there.mean((0, 2))]).numpy()


def draw_objects(
    image: Tensor, masks: Tensor, boxes: Tensor, labels: Tensor, scale: float, num_classes: int
) -> Tensor:  # fmt: skip
    """(3, h, w) uint8 with masks and boxes of another scale drawn over it."""
    if not len(boxes):
        return image
    colours = [tuple(class_colours(num_classes)[label]) for label in labels.tolist()]
    small = F.interpolate(masks[None].float(), image.shape[-2:], mode="nearest-exact")[0].bool()
    image = draw_segmentation_masks(image, small, alpha=0.5, colors=colours)
    return draw_bounding_boxes(image, boxes * scale, colors=colours)
