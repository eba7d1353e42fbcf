"""k-NN evaluation of a frozen backbone."""

from typing import Any

import torch
from torch import Tensor

from backbones import Backbone, Stream
from common.collectives import all_reduce_min, gather_rows
from lightning_modules.hparams import record_hyperparameters
from lightning_modules.readings import Readings, ReadsBoth
from metrics import knn_scores, topk_accuracy


class KNN(ReadsBoth):
    """DINO's weighted k-NN vote: the validation set's embeddings against the training set's.

    The first evaluation loader is the bank, the second holds the queries (datamodule view ``knn``). The bank is
    gathered on every device; each device votes on its own queries.

    Args:
        backbone: frozen.
        num_classes: classes.
        k: numbers of neighbours, all from one search; the first is the headline.
        temperature: of the vote's weights.
        backbone_weights, weights_key: see FrozenBackboneModule.
        stream: ``published`` compares the backbone's embeddings, which every family reads from the residual stream; the
            others what a head would read of the last block in that stream. ``both`` votes by the embeddings and, in
            rows of their own, by the branch.
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
        stream: Readings = "published",
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
    def published_stream(self) -> Stream:
        """Of every family: the embedding is of the residual stream."""
        return "residual"

    @property
    def label_count(self) -> int:
        return self.num_classes

    def _reset(self) -> None:
        self._found: dict[Stream, list[list[Tensor]]] = {}
        self._labels: list[list[Tensor]] = [[], []]

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, D), what is compared."""
        return self._embedded(images, self.stream)

    def _embedded(self, images: Tensor, stream: Stream) -> Tensor:
        if stream == "published":
            return super().forward(images)
        return self.backbone.forward_readouts(images, 1, stream)[0].cls

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        images = batch["image"]
        if not len(images):
            return
        found = {self.stream: self(images)}
        other = self.read_other(lambda stream: {stream: self._embedded(images, stream)})
        for stream, embeddings in (found | (other or {})).items():
            self._found.setdefault(stream, [[], []])[dataloader_idx].append(embeddings.float())
        self._labels[dataloader_idx].append(batch["label"])

    def _joined(self, stream: Stream, loader: int) -> tuple[Tensor, Tensor]:
        """Embeddings and labels of this process's images of a loader; it may have none."""
        width = self.backbone.num_features if stream == "published" else self.backbone.cls_widths[-1]
        embeddings = self._found.get(stream, [[], []])[loader] or [torch.empty(0, width, device=self.device)]
        labels = self._labels[loader] or [torch.empty(0, dtype=torch.int64, device=self.device)]
        return torch.cat(embeddings), torch.cat(labels)

    def on_validation_epoch_end(self) -> None:
        streams = [self.stream]
        # a process without images has not learned that the backbone lacks the other stream
        if self.reads_both and all_reduce_min(int(self.other_stream is not None)):
            assert self.other_stream is not None
            streams.append(self.other_stream)
        rows = [row for stream in streams for row in self._votes(stream)]
        self._reset()
        if self.trainer.sanity_checking:
            return
        self._rows = rows
        for row in rows[: len(self.k)]:
            self.log(f"val/knn{row['k']}_top1", row["top1"])
        self.log("val/knn_top1", rows[0]["top1"], prog_bar=True)

    def _votes(self, stream: Stream) -> list[dict[str, Any]]:
        """A row for each k."""
        queries, answers = self._joined(stream, 1)
        bank, labels = (gather_rows(t) for t in self._joined(stream, 0))
        if self.trainer.sanity_checking:
            return []
        votes = knn_scores(queries, bank, labels, self.num_classes, self.k, self.temperature)
        total = gather_rows(answers.new_tensor([len(answers)])).sum()
        rows = []
        for k, vote in zip(self.k, votes, strict=True):
            accuracy = topk_accuracy(vote, answers) if len(answers) else {"top1": 0.0, "top5": 0.0}
            hits = torch.tensor([[round(float(v) * len(answers)) for v in accuracy.values()]], device=self.device)
            top1, top5 = (gather_rows(hits).sum(0) / total).tolist()
            row = {"k": k, "top1": top1, "top5": top5, "queries": int(total), "bank": len(bank)}
            rows.append(row | self.read_stream(stream))
        return rows

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def rows(self) -> list[dict[str, Any]]:
        """Per reading and k: top-1 and top-5."""
        return self._rows
