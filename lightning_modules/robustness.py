"""A trained linear probe on test sets that share ImageNet's classes.

Shapes: B images, A right answers an image at most, C classes.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import SumMetric

from backbones import Backbone, Stream, weights
from backbones.weight_files import read
from heads import HeadSpec
from lightning_modules.frozen import FrozenBackboneModule
from lightning_modules.hparams import record_hyperparameters
from lightning_modules.linear_probe import LinearProbe
from lightning_modules.places import Places


def accepted(logits: Tensor, answers: Tensor, classes: list[int] | None) -> Tensor:
    """(B) whether the best class is a right one; the answer is sought among ``classes`` only, if any are given.

    Args:
        logits: (B, C).
        answers: (B, A) right classes, padded with -1.
        classes: numbers among C, or None for all.
    """
    if classes is None:
        best = logits.argmax(1)
    else:
        among = torch.tensor(classes, device=logits.device)
        best = among[logits[:, among].argmax(1)]
    return (best[:, None] == answers).any(1)


class RobustnessEvaluation(FrozenBackboneModule):
    """Top-1 accuracy of one trained linear head on each set of a RobustnessDataModule.

    Images without a right answer (ReaL's empty lists) take no part.

    Args:
        backbone: frozen.
        probe: a checkpoint of :class:`LinearProbe`, which holds its backbone, or a published linear classifier
            (``checkpoint.pth.tar``), which needs ``backbone_weights`` and ``head``.
        head: what the published classifier reads.
        head_name: which head of a LinearProbe checkpoint; None takes the one with the best last top-1.
        num_classes: C of a published classifier.
        backbone_weights, weights_key: see FrozenBackboneModule.
        stream: what a published classifier reads where ``head`` does not say; a LinearProbe checkpoint says it itself.
    """

    headline = "val/mean_top1"
    needs_labels = True

    def __init__(
        self,
        backbone: Backbone,
        probe: str,
        head: HeadSpec | None = None,
        head_name: str | None = None,
        num_classes: int = 1000,
        backbone_weights: str | None = None,
        weights_key: str = "teacher",
        stream: Stream = "published",
    ) -> None:
        super().__init__(backbone, backbone_weights, weights_key, stream)
        record_hyperparameters(self, "backbone", "head")
        self._probe, self._head_name = probe, head_name
        self.spec, self.num_classes = head, num_classes
        self.head: nn.Module | None = None
        self._readouts = True
        self._hits: list[SumMetric] = []
        self._images: list[SumMetric] = []
        self._rows: list[dict[str, Any]] = []

    def setup(self, stage: str) -> None:
        if self.head is not None:
            return
        if "pytorch-lightning_version" in read(self._probe):
            probe = LinearProbe.load_from_checkpoint(self._probe, map_location="cpu", weights_only=True)
            self.spec, self.head = probe.trained_head(self._head_name)
            self.stream, self._readouts = probe.stream, probe.readouts
            self._weights = self._weights or self._probe
        else:
            if self.spec is None or self._weights is None:
                raise ValueError(
                    f"{self._probe} is a classifier alone: say what it reads with model.init_args.head, such as "
                    "{n_last_blocks: 4, pooling: cls}, and give model.init_args.backbone_weights"
                )
            weight, bias = weights.linear(self._probe)
            backbone, mixer_heads = self.backbone, self.backbone.mixer_heads
            self.spec.check(backbone.depth, backbone.num_registers, mixer_heads)
            widths = [info["num_chs"] for info in backbone.feature_info]
            self.head = self.spec.build(widths, self.num_classes, backbone.cls_widths, mixer_heads)
            if self.head[1].weight.shape != weight.shape:
                raise ValueError(
                    f"{self._probe} has a weight of {tuple(weight.shape)}; the head {self.spec.name} of this backbone "
                    f"wants {tuple(self.head[1].weight.shape)}"
                )
            self.head[1].load_state_dict({"weight": weight, "bias": bias})
        self.head.requires_grad_(False).eval()
        super().setup(stage)

    def _sets(self) -> dict[str, list[int] | None]:
        classes = getattr(self.trainer.datamodule, "classes", None)
        if classes is None:
            raise ValueError("RobustnessEvaluation wants data of class_path: datamodules.RobustnessDataModule")
        return classes

    def on_validation_epoch_start(self) -> None:
        self._hits, self._images = ([SumMetric().to(self.device) for _ in self._sets()] for _ in range(2))

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        taking_part = (batch["answers"] >= 0).any(1)
        if not taking_part.any():
            return
        images, answers = batch["image"][taking_part], batch["answers"][taking_part]
        assert self.spec is not None and self.head is not None
        places = Places(self.backbone, [self.spec], self.stream)
        logits = self.head(places.split(places.read(images, self._readouts))[0])
        name, classes = list(self._sets().items())[dataloader_idx]
        if int(answers.max()) >= logits.shape[1] or max(classes or [0]) >= logits.shape[1]:
            raise ValueError(f"sets.{name}: classes up to {int(answers.max())}, the probe has {logits.shape[1]}")
        self._hits[dataloader_idx].update(accepted(logits, answers, classes).sum())
        self._images[dataloader_idx].update(len(images))

    def on_validation_epoch_end(self) -> None:
        self._rows = []
        for (name, classes), hits, images in zip(self._sets().items(), self._hits, self._images, strict=True):
            counted = int(images.compute())
            top1 = hits.compute().item() / max(1, counted)
            self._rows.append(
                {"set": name, "top1": top1, "images": counted, "classes": "all" if classes is None else len(classes)}
            )
            self.log(f"val/{name}_top1", top1)
        self.log("val/mean_top1", sum(row["top1"] for row in self._rows) / len(self._rows), prog_bar=True)

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def rows(self) -> list[dict[str, Any]]:
        """Per set: top-1, the images counted, and the number of classes an answer was sought among."""
        head = "" if self.spec is None else self.spec.name
        return [row | {"head": head, "probe": str(Path(self._probe).name)} for row in self._rows]
