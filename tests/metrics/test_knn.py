"""The weighted vote against a plain loop and scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from metrics import KNNAccuracy, knn_scores, topk_accuracy
from tests.processes import run_ranks


def data(n=60, q=25, d=8, classes=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(q, d, generator=g), torch.randn(n, d, generator=g),
        torch.randint(0, classes, (n,), generator=g), torch.randint(0, classes, (q,), generator=g),
    )  # fmt: skip


@pytest.mark.parametrize("k", [1, 7, 60, 1000])
@pytest.mark.parametrize("block", [1, 7, 59, 65536])
def test_vote(k, block):
    queries, bank, labels, _ = data()
    ours = knn_scores(queries, bank, labels, 4, k, temperature=0.07, chunk=9, block=block)
    q, b = (x.double() / x.double().norm(dim=1, keepdim=True) for x in (queries, bank))
    expected = torch.zeros(len(q), 4, dtype=torch.float64)
    for i in range(len(q)):
        similarity = b @ q[i]
        for j in similarity.argsort(descending=True)[:k]:
            expected[i, labels[j]] += torch.exp(similarity[j] / 0.07)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)


def test_one_neighbour_is_sklearns():
    queries, bank, labels, answers = data()
    votes = knn_scores(queries, bank, labels, 4, [1, 5])
    theirs = KNeighborsClassifier(1, metric="cosine").fit(bank.numpy(), labels.numpy())
    assert np.array_equal(votes[0].argmax(1).numpy(), theirs.predict(queries.numpy()))
    accuracy = topk_accuracy(votes[0], answers)
    assert accuracy["top1"].item() == pytest.approx(theirs.score(queries.numpy(), answers.numpy()))


def test_leave_one_out():
    _, bank, labels, _ = data()
    metric = KNNAccuracy(k=5)
    for rows in torch.arange(60).split(13):
        metric.update(bank[rows], labels[rows])
    hits = 0
    for i in range(60):
        others = torch.arange(60) != i
        hits += int(knn_scores(bank[i : i + 1], bank[others], labels[others], 4, 5).argmax() == labels[i])
    assert metric.compute()["top1"].item() == pytest.approx(hits / 60)
    assert KNNAccuracy().compute()["top1"].isnan()


@pytest.mark.parametrize(("chunk", "block"), [(7, 11), (60, 1), (13, 60)])
def test_leave_one_out_in_pieces(chunk, block):
    _, bank, labels, _ = data()
    whole = knn_scores(bank, bank, labels, 4, 5, skip_self=True)
    pieces = knn_scores(bank, bank, labels, 4, 5, skip_self=True, chunk=chunk, block=block)
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-5)  # a cosine moves by its rounding, divided by 0.07


def test_errors():
    queries, bank, labels, _ = data()
    with pytest.raises(ValueError, match="k=0"):
        knn_scores(queries, bank, labels, 4, 0)
    with pytest.raises(ValueError, match="bank is empty"):
        knn_scores(queries, bank[:0], labels[:0], 4, 3)


def _rank(rank):
    _, bank, labels, _ = data()
    metric = KNNAccuracy(k=5)
    part = slice(0, 60) if rank == 0 else slice(60, 60)
    metric.update(bank[part], labels[part])
    return metric.compute()["top1"].item()


def test_a_rank_without_rows():
    _, bank, labels, _ = data()
    alone = KNNAccuracy(k=5)
    alone.update(bank, labels)
    assert run_ranks(_rank, 2) == [pytest.approx(alone.compute()["top1"].item())] * 2
