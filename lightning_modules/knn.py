"""k-NN evaluation of a frozen backbone."""

from typing import Any

import torch
from torch import Tensor

from backbones import Backbone, Stream
from common.collectives import gather_rows
from lightning_modules.frozen import FrozenBackboneModule
from lightning_modules.hparams import record_hyperparameters
from metrics import knn_scores, topk_accuracy


class KNN(FrozenBackboneModule):
    """DINO's weighted k-NN vote: the validation set's embeddings against the training set's.

    The first evaluation loader is the bank, the second holds the queries (datamodule view ``knn``). The bank is
    gathered on every device; each device votes on its own queries.

    Args:
        backbone: frozen.
        num_classes: classes.
        k: numbers of neighbours, all from one search; the first is the headline.
        temperature: of the vote's weights.
        backbone_weights, weights_key: see FrozenBackboneModule.
        stream: ``published`` compares the backbone's embeddings, the others what a head would read of the last block in
            that stream.
    """

    headline = "val/knn_top1"
    needs_labels = True
    views = ("knn",)

    def __init__(
        self,
        backbone: Backbone,
        num_classes: int = 1000,
        k: list[int] = [20, 10, 100, 200],  # noqa: B006  # never changed
        temperature: float = 0.07,
        backbone_weights: str | None = None,
        weights_key: str = "teacher",
        stream: Stream = "published",
    ) -> None:
        super().__init__(backbone, backbone_weights, weights_key, stream)
        record_hyperparameters(self, "backbone")
        if not k or min(k) < 1:
            raise ValueError(f"model.init_args.k={k}: wanted positive numbers of neighbours")
        self.num_classes, self.k, self.temperature = num_classes, list(k), temperature
        self._rows: list[dict[str, Any]] = []
        self._reset()

    def setup(self, stage: str) -> None:
        bank = getattr(self.trainer.datamodule, "bank_size", None)
        if bank is not None and stage != "predict" and max(self.k) > bank:
            raise ValueError(
                f"model.init_args.k={self.k}: the bank, data.init_args.train_shards, holds {bank} images, so none has "
                f"{max(self.k)} neighbours; allowed: up to {bank}"
            )
        super().setup(stage)

    @property
    def label_count(self) -> int:
        return self.num_classes

    def _reset(self) -> None:
        self._found: list[list[tuple[Tensor, Tensor]]] = [[], []]

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, D), what is compared."""
        if self.stream == "published":
            return super().forward(images)
        return self.backbone.forward_readouts(images, 1, self.stream)[0].cls

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        if len(batch["image"]):
            self._found[dataloader_idx].append((self(batch["image"]).float(), batch["label"]))

    def _joined(self, loader: int) -> tuple[Tensor, Tensor]:
        if not self._found[loader]:
            width = self.backbone.num_features if self.stream == "published" else self.backbone.cls_widths[-1]
            empty = torch.empty(0, width, device=self.device)
            return empty, torch.empty(0, dtype=torch.int64, device=self.device)
        embeddings, labels = zip(*self._found[loader], strict=True)
        return torch.cat(embeddings), torch.cat(labels)

    def on_validation_epoch_end(self) -> None:
        queries, answers = self._joined(1)
        bank, labels = (gather_rows(t) for t in self._joined(0))
        self._reset()
        if self.trainer.sanity_checking:
            return
        votes = knn_scores(queries, bank, labels, self.num_classes, self.k, self.temperature)
        total = gather_rows(answers.new_tensor([len(answers)])).sum()
        self._rows = []
        for k, vote in zip(self.k, votes, strict=True):
            accuracy = topk_accuracy(vote, answers) if len(answers) else {"top1": 0.0, "top5": 0.0}
            hits = torch.tensor([[round(float(v) * len(answers)) for v in accuracy.values()]], device=self.device)
            top1, top5 = (gather_rows(hits).sum(0) / total).tolist()
            self._rows.append({"k": k, "top1": top1, "top5": top5, "queries": int(total), "bank": len(bank)})
            self.log(f"val/knn{k}_top1", top1)
        self.log("val/knn_top1", self._rows[0]["top1"], prog_bar=True)

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def rows(self) -> list[dict[str, Any]]:
        """Per k: top-1 and top-5."""
        return self._rows
