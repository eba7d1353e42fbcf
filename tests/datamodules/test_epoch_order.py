"""An epoch that was cut off goes on only where its batches are still the same."""

import pytest

from datamodules import ImageNetDataModule
from datamodules.position import Position

SMALL = {"num_workers": 0, "batch_size": 8, "resize": 16, "crop": 16, "probe_size": 16, "view": "probe"}


def loader(shards, position=None, **changed):
    data = ImageNetDataModule(
        str(shards),
        **SMALL | {"train_shards": "train-*.tar", "val_shards": "validation-*.tar", "seed": 0} | changed,
    )
    data.position = position or Position()
    return data.train_dataloader()


@pytest.mark.parametrize(
    ("changed", "position", "named"),
    [
        ({"batch_size": 4}, None, "data.init_args.batch_size was 8 and is 4"),
        ({"seed": 1}, None, "seed_everything"),
        ({"shuffle_window": 5}, None, "data.init_args.shuffle_window was 2048 and is 5"),
        ({"train_shards": "validation-*.tar"}, None, "the number of training samples was 24 and is 20"),
        ({}, Position(accumulate=2), "trainer.accumulate_grad_batches was 1 and is 2"),
    ],
)
def test_inside_an_epoch(shards, changed, position, named):
    first = loader(shards)
    batches = iter(first)
    keys = next(batches)["key"]
    state = first.state_dict()
    with pytest.raises(ValueError, match="lies inside an epoch") as error:
        loader(shards, position, **changed).load_state_dict(state)
    assert named in str(error.value)
    again = loader(shards)
    again.load_state_dict(state)
    rest = [key for batch in again for key in batch["key"]]
    assert len(rest) == 16 and not set(rest) & set(keys)


def test_at_the_end_of_one_everything_may_change(shards):
    first = loader(shards)
    assert len(list(first)) == 3
    again = loader(shards, batch_size=4, seed=1)
    again.load_state_dict(first.state_dict())
    assert len(list(again)) == 6 and again.dataset.epoch == 1
