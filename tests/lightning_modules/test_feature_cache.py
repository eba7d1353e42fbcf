"""Features held in memory: order, resuming, what cannot be."""

import pytest
import torch
from lightning.pytorch import Trainer

from backbones import VisionTransformer
from datamodules import ImageNetDataModule, Position
from lightning_modules import KNN, HeadSpec, LinearProbe
from lightning_modules.feature_cache import EncodedSplit, FeatureLoader, ShuffledFeatureLoader
from tests.processes import run_ranks


def split(count, start=0):
    batches = [
        {"image": torch.tensor([[float(i)]]), "label": torch.tensor([i]), "key": [f"k{i}"], "shard": ["s.tar"]}
        for i in range(start, start + count)
    ]
    return EncodedSplit.of(iter([*batches, {"image": torch.empty(0, 1), "key": []}]), lambda b: b["image"] * 2)


def loader(count=11, batch=3, seed=5, rank=0, world=1, at=(0, 0)):
    return ShuffledFeatureLoader(split(count), batch, seed, Position(rank, world, epoch=at[0], batches=at[1]))


def keys(batches):
    return [key for batch in batches for key in batch["key"]]


def test_every_sample_once_in_order():
    data = FeatureLoader(split(7), 3)
    batches = list(data)
    assert len(data) == len(batches) == 3 and keys(batches) == [f"k{i}" for i in range(7)]
    for batch in batches:
        assert batch["features"][:, 0].tolist() == [2.0 * i for i in batch["label"].tolist()]
        assert batch["key"] == [f"k{i}" for i in batch["label"].tolist()]
        assert len(batch["shard"]) == len(batch["key"]) and batch["skipped"] == []


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_features_of_any_shape(shape):
    batches = [{"label": torch.tensor([i]), "key": [f"k{i}"], "shard": ["s.tar"]} for i in range(4)]
    found = EncodedSplit.of(
        iter(batches), lambda batch: batch["label"].float().view(1, *[1] * len(shape)).expand(1, *shape)
    )
    for batch in FeatureLoader(found, 3):
        assert batch["features"].shape == (len(batch["key"]), *shape)
        assert (batch["features"].reshape(len(batch["key"]), -1) == batch["label"][:, None]).all()


def test_another_module_makes_its_own_features(shards):
    """A data module goes from one to the next, and to one that makes none."""
    data = ImageNetDataModule(
        str(shards), val_shards="validation-*.tar", view="features", batch_size=8, num_workers=0, resize=16, crop=16
    )
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        probe = LinearProbe(
            VisionTransformer(img_size=16, patch_size=4, embed_dim=16, depth=1, num_heads=2),
            [HeadSpec(1), HeadSpec(block=0, pooling="head1+mean", stream="branch")],
            num_classes=10,
        )
        trainer(max_epochs=1).fit(probe, data)
        batch = next(iter(data.val_dataloader()))
        images = next(iter(data.predict_dataloader()))
        assert batch["key"] == images["key"] and "image" not in batch
        alone = probe.encode(data.on_after_batch_transfer(images, 0)["image"])
        torch.testing.assert_close(batch["features"], alone)
        found.append(batch["features"])
    assert not torch.allclose(*found)
    with pytest.raises(ValueError, match=r"data\.init_args\.view=features: KNN reads knn"):
        trainer().validate(KNN(probe.backbone, num_classes=10), data, verbose=False)
    data.trainer = None
    with pytest.raises(ValueError, match="such as LinearProbe; there is none"):
        data.train_dataloader()


def trainer(**kwargs):
    return Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **kwargs,
    )  # fmt: skip


def test_a_new_order_each_epoch():
    orders = [keys(loader(at=(epoch, 0))) for epoch in range(3)]
    assert all(len(set(order)) == 9 for order in orders) and len({tuple(order) for order in orders}) == 3
    assert orders[1] == keys(loader(at=(1, 0))) != keys(loader(at=(1, 0), seed=6))


def test_taken_up_inside_an_epoch():
    whole = list(loader(at=(2, 0)))
    first = loader(at=(2, 1))
    iter(first)
    state = first.state_dict()
    second = loader(at=(2, 1))
    second.load_state_dict(state)
    rest = list(second)
    assert len(second) == 3 and keys(rest) == keys(whole[1:])
    other = loader(at=(3, 0))  # the epoch after it is whole
    other.load_state_dict(state)
    assert keys(other) == keys(loader(at=(3, 0)))
    with pytest.raises(ValueError, match=r"from inside an epoch on 1 processes, this run has 2; each holds its own"):
        loader(world=2).load_state_dict(state)
    loader(world=2).load_state_dict(state | {"batches": 3})


def test_too_few():
    with pytest.raises(ValueError, match="a device's part of it, 12, is more than the 11 training samples of a device"):
        loader(batch=12)
    with pytest.raises(ValueError, match="this process has no sample"):
        split(0)


def uneven(rank):
    own = ShuffledFeatureLoader(split(*((11, 0), (8, 11))[rank]), 2, 0, Position(rank, 2))
    return len(own), keys(own)


def test_ranks_have_equally_many_batches_of_their_own_samples():
    (length, first), (other, second) = run_ranks(uneven, 2)
    assert length == other == 4 and len(first) == len(second) == 8 and len({*first, *second}) == 16
