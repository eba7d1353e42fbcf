"""DINO's weighted k-nearest-neighbour vote.

Shapes: Q queries, N bank, D embed_dim, C classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from common.precision import exact


def knn_scores(
    queries: Tensor,
    bank: Tensor,
    labels: Tensor,
    num_classes: int,
    k: int | list[int] = 20,
    temperature: float = 0.07,
    skip_self: bool = False,
    chunk: int = 1024,
    block: int = 65536,
) -> Tensor | list[Tensor]:
    """Votes of the k most similar bank embeddings, each weighted exp(cosine / temperature) (Caron et al. 2021).

    Args:
        queries: (Q, D), normalised here.
        bank: (N, D), normalised here.
        labels: (N) integers below ``num_classes``.
        num_classes: C.
        k: neighbours; more than there are means all. A list asks for several votes from one search.
        temperature: of the weights.
        skip_self: queries and bank are the same rows, and a row does not vote for itself.
        chunk, block: queries and bank rows at a time; what is held beside the arguments is chunk x block numbers.

    Returns:
        (Q, C) votes, or a list of them for a list of k.
    """
    ks = [k] if isinstance(k, int) else list(k)
    if not ks or min(ks) < 1:
        raise ValueError(f"knn: k={k} must be at least 1")
    if not len(bank):
        raise ValueError("knn: the bank is empty")
    largest = min(max(ks), len(bank) - int(skip_self))
    votes: list[list[Tensor]] = [[] for _ in ks]
    for start in range(0, len(queries), chunk):
        top, index = _nearest(queries[start : start + chunk], bank, largest, start if skip_self else None, block)
        weights, neighbours = (top / temperature).exp(), labels[index]
        for i, wanted in enumerate(ks):
            zeros = weights.new_zeros(len(top), num_classes)
            votes[i].append(zeros.scatter_add(1, neighbours[:, :wanted], weights[:, :wanted]))
    joined = [torch.cat(v) if v else bank.new_zeros(0, num_classes, dtype=torch.float32) for v in votes]
    return joined[0] if isinstance(k, int) else joined


def _nearest(queries: Tensor, bank: Tensor, k: int, own: int | None, block: int) -> tuple[Tensor, Tensor]:
    """Cosines (Q, k) of the most similar bank rows, falling, and their numbers; query i is not row ``own`` + i."""
    queries = F.normalize(queries.float(), dim=-1)
    top, index = queries.new_empty(len(queries), 0), queries.new_empty(len(queries), 0, dtype=torch.int64)
    for first in range(0, len(bank), block):
        similarity = queries @ F.normalize(bank[first : first + block].float(), dim=-1).t()
        if own is not None:
            rows = torch.arange(len(queries), device=queries.device)
            columns = rows + own - first
            here = (columns >= 0) & (columns < similarity.shape[1])
            similarity[rows[here], columns[here]] = -torch.inf
        values, found = similarity.topk(min(k, similarity.shape[1]), -1)
        values, found = torch.cat([top, values], -1), torch.cat([index, found + first], -1)
        top, best = values.topk(min(k, values.shape[1]), -1)
        index = found.gather(-1, best)
    return top, index


def nearest_votes(
    queries: Tensor, bank: Tensor, shares: Tensor, k: int, temperature: float, chunk: int = 1024, block: int = 65536
) -> Tensor:
    """Mean of the k most similar bank rows' shares, weighted by softmax(cosine / temperature).

    Args:
        queries: (Q, D), normalised here.
        bank: (N, D), normalised here.
        shares: (N, C) of each row's classes.
        k: neighbours; more than there are means all.
        temperature: of the weights.
        chunk, block: queries and bank rows at a time.

    Returns:
        (Q, C).
    """
    found = []
    for start in range(0, len(queries), chunk):
        top, index = _nearest(queries[start : start + chunk], bank, min(k, len(bank)), None, block)
        found.append(torch.einsum("qk,qkc->qc", (top / temperature).softmax(-1).to(shares), shares[index]))
    return torch.cat(found) if found else shares.new_zeros(0, shares.shape[1])


def topk_accuracy(scores: Tensor, labels: Tensor, topk: tuple[int, ...] = (1, 5)) -> dict[str, Tensor]:
    """Shares of rows (Q, C) whose label (Q) is among the first 1, 5, ... scores."""
    best = scores.topk(min(max(topk), scores.shape[-1]), -1).indices == labels[:, None]
    return {f"top{n}": exact(best[:, :n].any(-1)).mean() for n in topk}


class KNNAccuracy(Metric):
    """k-NN accuracy of a set against itself, each row voted on by the others; over all processes.

    ``compute`` returns ``top1`` and ``top5``; NaN with fewer than two rows. Over several processes each one calls
    ``update`` at least once, with (0, D) where it has no rows.
    """

    full_state_update = False
    embeddings: list[Tensor]
    labels: list[Tensor]

    def __init__(self, k: int = 20, temperature: float = 0.07) -> None:
        super().__init__()
        self.k, self.temperature = k, temperature
        self.add_state("embeddings", [], "cat")
        self.add_state("labels", [], "cat")

    def update(self, embeddings: Tensor, labels: Tensor) -> None:
        """Embeddings (B, D) and labels (B)."""
        self.embeddings.append(embeddings.detach().float())
        self.labels.append(labels)

    def compute(self) -> dict[str, Tensor]:
        if not len(self.labels):
            return {"top1": torch.tensor(torch.nan), "top5": torch.tensor(torch.nan)}
        embeddings, labels = dim_zero_cat(self.embeddings), dim_zero_cat(self.labels)
        if len(labels) < 2:
            return {"top1": torch.tensor(torch.nan), "top5": torch.tensor(torch.nan)}
        votes = knn_scores(
            embeddings, embeddings, labels, int(labels.max()) + 1, self.k, self.temperature, skip_self=True
        )
        assert isinstance(votes, Tensor)
        return topk_accuracy(votes, labels)
