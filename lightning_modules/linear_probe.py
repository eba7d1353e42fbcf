"""Linear probing: many heads trained at once on one frozen backbone pass.

Shapes: B images a device, F features that all heads read together, C classes.
"""

from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

from backbones import Backbone, Stream
from heads import HeadSpec
from lightning_modules.feature_cache import cache_features
from lightning_modules.frozen import FrozenBackboneModule
from lightning_modules.hparams import global_batch_size, record_hyperparameters
from lightning_modules.places import Places
from lightning_modules.predicted_classes import PredictsClasses
from lightning_modules.schedules import cosine_schedule


class LinearProbe(PredictsClasses, FrozenBackboneModule):
    """Linear classifiers on frozen features, by DINO's protocol.

    Heads start at N(0, 0.01) with bias 0 and are trained by SGD with momentum and a cosine per epoch to 0. Training
    and validation batches hold ``label`` and ``image``, or in its place ``features``, what :meth:`encode` gives.

    Args:
        backbone: frozen.
        heads: the heads, all fed by one backbone pass for each stream that they read, and one where they read outputs
            of mixers' heads.
        num_classes: C.
        momentum: of SGD.
        backbone_weights, weights_key, stream: see FrozenBackboneModule.
        global_batch_size: images per step over all devices, for the learning rates; None asks the datamodule.
    """

    headline = "val/top1"
    trained_part = "linear head"
    fixed_on_resume = (
        *FrozenBackboneModule.fixed_on_resume,
        "heads.*.n_last_blocks",
        "heads.*.block",
        "heads.*.stream",
        "heads.*.pooling",
        "heads.*.batch_norm",
    )
    needs_labels = True
    views = ("probe", "features")

    def __init__(
        self,
        backbone: Backbone,
        heads: list[HeadSpec],
        num_classes: int = 1000,
        momentum: float = 0.9,
        backbone_weights: str | None = None,
        weights_key: str = "teacher",
        global_batch_size: int | None = None,
        stream: Stream = "published",
    ) -> None:
        super().__init__(backbone, backbone_weights, weights_key, stream)
        record_hyperparameters(self, "backbone", "heads")
        if not heads:
            raise ValueError("model.init_args.heads is empty; list at least one head")
        self._places = Places(backbone, heads, self.stream)
        names = [head.name for head in heads]
        if len(set(names)) < len(names):
            raise ValueError(f"heads: {next(n for n in names if names.count(n) > 1)} is listed twice")
        self.specs, self.num_classes = heads, num_classes
        self.readouts = True
        """Whether ``cls`` is the embedding where a backbone has no class token; in version 0.1 it was the mean."""
        if not backbone.embedding_is_cls and any("cls" in head.parts for head in heads):
            rank_zero_info(
                f"heads: pooling=cls reads the class token; this {type(backbone).__name__}'s embedding, which k-NN "
                "compares, is pooled from other tokens too (pooling=mean reads the patches)"
            )
        widths = [info["num_chs"] for info in backbone.feature_info]
        sizes = widths, num_classes, backbone.cls_widths, backbone.mixer_heads
        self.heads = nn.ModuleList(head.build(*sizes) for head in heads)
        self.top1 = nn.ModuleList(MulticlassAccuracy(num_classes, average="micro") for _ in heads)
        top5 = min(5, num_classes)
        self.top5 = nn.ModuleList(MulticlassAccuracy(num_classes, top_k=top5, average="micro") for _ in heads)
        self.history: list[list[tuple[float, float]]] = []  # per epoch, per head: top-1, top-5
        self.images_trained = self.images_encoded = 0  # on this device, over all epochs of this run, once each pass
        self.val_images = SumMetric()
        self._images = 0

    @property
    def label_count(self) -> int:
        return self.num_classes

    def setup(self, stage: str) -> None:
        super().setup(stage)
        cache_features(self)

    def encode(self, images: Tensor) -> Tensor:
        """(B, F): all that the heads read, side by side, without gradients; see :class:`Places`."""
        self.images_encoded += len(images) * self._places.passes if self.training else 0
        with torch.no_grad():
            return self._places.read(images, self.readouts)

    def logits(self, encoded: Tensor) -> list[Tensor]:
        """(B, F) to the (B, C) of each head."""
        return [head(read) for head, read in zip(self.heads, self._places.split(encoded), strict=True)]

    def _encoded(self, batch: dict[str, Any]) -> Tensor:
        return batch["features"] if "features" in batch else self.encode(batch["image"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        batch = global_batch_size(self, self.hparams.global_batch_size)
        groups = [
            {
                "params": list(head.parameters()),
                "lr": spec.lr * batch / 256,
                "initial_lr": spec.lr * batch / 256,
                "weight_decay": spec.weight_decay,
            }
            for head, spec in zip(self.heads, self.specs, strict=True)
        ]
        epochs = self.trainer.max_epochs
        if epochs is None or epochs < 1:
            raise ValueError(f"the probe's schedule runs over epochs: set trainer.max_epochs (found {epochs})")
        return torch.optim.SGD(groups, momentum=self.hparams.momentum)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = cosine_schedule(epoch, self.trainer.max_epochs, group["initial_lr"], 0.0)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def _check_labels(self, labels: Tensor) -> None:
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes:
            raise ValueError(
                f"labels run from {int(labels.min())} to {int(labels.max())}, model.init_args.num_classes is "
                f"{self.num_classes}; set it to the data's number of classes"
            )

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self._check_labels(batch["label"])
        self.images_trained += len(batch["label"])
        losses = torch.stack([F.cross_entropy(y, batch["label"]) for y in self.logits(self._encoded(batch))])
        self.log("train/loss", losses.detach().mean(), prog_bar=True)
        return losses.sum()  # the heads share no parameter, so each learns from its own loss alone

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        if not len(batch["label"]):
            return
        self._check_labels(batch["label"])
        self.val_images.update(len(batch["label"]))
        for logits, top1, top5 in zip(self.logits(self._encoded(batch)), self.top1, self.top5, strict=True):
            top1.update(logits, batch["label"])
            top5.update(logits, batch["label"])

    def on_validation_epoch_end(self) -> None:
        now = [(m1.compute().item(), m5.compute().item()) for m1, m5 in zip(self.top1, self.top5, strict=True)]
        self._images = int(self.val_images.compute())
        for metric in (*self.top1, *self.top5, self.val_images):
            metric.reset()
        if not self.trainer.sanity_checking:
            self.history.append(now)
        best = max(now)
        self.log_dict({"val/top1": best[0], "val/top5": best[1]}, prog_bar=True)
        if len(self.specs) > 1:
            self.log_dict({f"val_heads/{s.name}": v[0] for s, v in zip(self.specs, now, strict=True)})

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Keys, labels, embeddings; of a trained probe what the head with the best last top-1 takes the images for."""
        found = super().predict_step(batch, batch_idx)
        if not self.has_learned:
            return found
        best = 0 if len(self.specs) == 1 else self._best_head()
        return found | self.predicted(self.logits(self.encode(batch["image"]))[best])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["probe_history"], checkpoint["probe_readouts"] = self.history, self.readouts

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.readouts = checkpoint.get("probe_readouts", False)
        self.history = [[tuple(v) for v in epoch] for epoch in checkpoint["probe_history"]]

    def rows(self) -> list[dict[str, Any]]:
        """Per head: what it reads, best and last top-1 and top-5 over the epochs validated so far."""
        rows: list[dict[str, Any]] = []
        for i, spec in enumerate(self.specs):
            top1 = [epoch[i][0] for epoch in self.history]
            if not top1:
                continue
            best = max(range(len(top1)), key=top1.__getitem__)
            rows.append(
                {"head": spec.name}
                | asdict(spec)
                | ({} if spec.block is None else {"n_last_blocks": None})
                | self.read_stream(spec.stream)
                | {
                    "top1_best": top1[best],
                    "top5_best": self.history[best][i][1],
                    "best_epoch": best,
                    "top1_last": top1[-1],
                    "top5_last": self.history[-1][i][1],
                    "images": self._images,
                    "parameters": sum(p.numel() for p in self.heads[i].parameters()),
                }
            )
        return rows

    def counts(self) -> dict[str, float]:
        """Training images of this device over all epochs, and how often each went through the backbone.

        Once for all heads; with features encoded beforehand once for all epochs, the validation set counted in.
        """
        passes = self.images_encoded / self.images_trained if self.images_trained else 0.0
        return {
            "heads": len(self.specs),
            "training_images": self.images_trained,
            "backbone_passes_per_training_image": passes,
        }

    def trained_head(self, name: str | None = None) -> tuple[HeadSpec, nn.Module]:
        """A head and what it reads; by name, or the one with the best last top-1."""
        names = [spec.name for spec in self.specs]
        if name is not None and name not in names:
            raise ValueError(f"the probe has no head {name!r}; it has {', '.join(names)}")
        if name is None and len(names) > 1 and not self.history:
            raise ValueError(f"the probe was never validated: say which of its heads, {', '.join(names)}")
        best = self._best_head() if len(names) > 1 else 0
        index = best if name is None else names.index(name)
        return self.specs[index], self.heads[index]

    def _best_head(self) -> int:
        """Number of the head with the best last top-1; the first where it was never validated."""
        return max(range(len(self.specs)), key=lambda i: self.history[-1][i][0]) if self.history else 0
