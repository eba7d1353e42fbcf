"""k-NN votes in both streams: each is what the stream alone gives, and the published one is what is logged."""

import pytest
import torch

from backbones import TimmModel, VisionMamba, VisionTransformer
from lightning_modules import KNN
from tests.lightning_modules.test_over_processes import attach


def vim():
    return VisionMamba(img_size=16, patch_size=4, embed_dim=16, depth=2, d_state=4, headdim=8)


def vit():
    return VisionTransformer(img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2)


def vote(make, stream, sizes=(29, 21)):
    """Rows of a k-NN evaluation in uneven batches, and what it logged."""
    torch.manual_seed(0)
    module, logged = attach(KNN(make(), 3, [5, 1], stream=stream)).eval(), {}
    module.log = lambda name, value, **kwargs: logged.setdefault(name, value)
    generator = torch.Generator().manual_seed(1)
    labels = [torch.randint(3, (size,), generator=generator) for size in sizes]
    for loader, wanted in enumerate(labels):
        side = 32 if make is efficientnet else 16
        images = torch.randn(len(wanted), 3, side, side, generator=generator) + wanted[:, None, None, None] / 2
        for part in torch.arange(len(wanted)).split(8):
            module.validation_step({"image": images[part], "label": wanted[part]}, 0, loader)
    module.on_validation_epoch_end()
    return module.rows(), logged


def efficientnet():
    return TimmModel("test_efficientnet")


@pytest.mark.parametrize("make", [vim, vit])
def test_both_readings_are_those_of_each_alone(make):
    """Every family's embedding is of the residual stream, so the other one is the branch."""
    both, logged = vote(make, "both")
    assert [(row["k"], row["stream"], row["reading"]) for row in both] == [
        (5, "residual", "published"), (1, "residual", "published"), (5, "branch", "other"), (1, "branch", "other"),
    ]  # fmt: skip
    for stream, rows in (("published", both[:2]), ("branch", both[2:])):
        assert vote(make, stream)[0] == rows
    assert both[0]["top1"] != both[2]["top1"]
    assert logged == {
        "val/knn_top1": both[0]["top1"],
        "val/knn5_top1": both[0]["top1"],
        "val/knn1_top1": both[1]["top1"],
    }


def test_where_there_is_one_stream_it_votes_alone(caplog):
    rows, logged = vote(efficientnet, "both")
    assert rows == vote(efficientnet, "published")[0] and {row["reading"] for row in rows} == {"published"}
    assert caplog.text.count("the published one alone is scored") == 1 and logged["val/knn_top1"] == rows[0]["top1"]
