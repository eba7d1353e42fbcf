"""A data module of splits: any transform, with a Trainer or without, from Python or YAML."""

import json
import pickle
import sys
import textwrap

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

import cli
from datamodules import (
    EvaluationTransform,
    ImageNetDataModule,
    ImageNetSDataModule,
    MultiCropConfig,
    MultiCropTransform,
    Position,
    ShardDataModule,
    Split,
    Transform,
)
from datamodules.collation import collate
from datamodules.prepare import write_split
from datamodules.samples import ShardError
from datamodules.shards import ShardSet
from tests.datamodules.test_shards import FakeTrainer, damage, make_samples
from tests.tiny_runs import BACKBONES, CONFIGS

SMALL = MultiCropConfig(global_size=16, local_size=8, num_local=1)

BOXES = textwrap.dedent('''
    import json

    import numpy as np
    import torch

    from datamodules import Transform
    from datamodules.decoding import decode_image
    from datamodules.eval_transforms import ResizeCenterCrop


    class BoxTransform(Transform):
        """``image``, ``label`` and ``boxes``, a list of (n_i, 4) float32."""

        fields = ("png", "cls", "json")

        def __init__(self, size: int = 16) -> None:
            self.size, self.geometry = size, ResizeCenterCrop(size, size)

        def __call__(self, raw, key, rows):
            boxes = np.array(json.loads(raw.fields["json"])["boxes"], np.float32).reshape(-1, 4)
            return {"image": self.geometry.image(decode_image(raw)), "boxes": boxes, "label": raw.label()}

        def empty(self):
            image = torch.empty(0, 3, self.size, self.size, dtype=torch.uint8)
            return {"image": image, "boxes": [], "label": torch.empty(0, dtype=torch.int64)}
''')


@pytest.fixture(scope="module")
def my_data(tmp_path_factory):
    """A user's module beside the packages."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_boxes.py").write_text(BOXES)
    sys.path.insert(0, str(folder))
    import my_boxes

    yield my_boxes
    sys.path.remove(str(folder))


def boxes_of(number):
    """0, 1 or 2 of them."""
    return [[number, i, number + 5, i + 5] for i in range(number % 3)]


def boxed(count):
    for number, sample in enumerate(make_samples(count, masks=True)):
        yield sample | {"json": json.dumps({"boxes": boxes_of(number)}).encode()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("boxes")
    write_split(out, "train", boxed(11), 4)
    write_split(out, "val", boxed(5), 3)
    return out


def module(folder, my_data, workers=0, **kwargs):
    train, val = Split("train-*.tar", my_data.BoxTransform()), Split("val-*.tar", my_data.BoxTransform())
    return ShardDataModule(str(folder), train, val, batch_size=4, num_workers=workers, seed=0, **kwargs)


@pytest.mark.parametrize("workers", [0, 2])
def test_ragged_arrays_stay_lists(folder, my_data, workers):
    data = module(folder, my_data, workers)
    batches = [*data.train_dataloader(), *data.val_dataloader()]
    assert [len(b["key"]) for b in batches] == [4, 4, 4, 1]  # the last has one shape only, and a list all the same
    for batch in batches:
        assert isinstance(batch["boxes"], list) and batch["image"].shape == (len(batch["key"]), 3, 16, 16)
        for key, boxes in zip(batch["key"], batch["boxes"], strict=True):
            assert boxes.dtype == torch.float32 and boxes.shape == (int(key) % 3, 4)
            assert boxes.tolist() == boxes_of(int(key))
        ready = data.on_after_batch_transfer(batch, 0)
        assert ready["image"].dtype == torch.float32 and ready["boxes"] == batch["boxes"]


def test_empty_batches_have_shapes_and_dtypes(folder, my_data):
    """Of a rank that has fewer samples than batches: evaluation of 5 samples one by one on 4 ranks."""
    data = module(folder, my_data)
    data.position = Position(rank=0, world_size=4)
    whole, empty = list(data.val_dataloader())
    assert len(whole["key"]) == 1 and empty["key"] == empty["shard"] == empty["boxes"] == []
    assert whole.keys() == empty.keys()
    for name in ("image", "label"):
        assert empty[name].shape == (0, *whole[name].shape[1:]) and empty[name].dtype == whole[name].dtype
    assert data.on_after_batch_transfer(empty, 0)["image"].shape == (0, 3, 16, 16)


PRESETS = {
    "multicrop": lambda f: ImageNetDataModule(f, view="multicrop", multicrop=SMALL, **TINY),
    "probe": lambda f: ImageNetDataModule(f, view="probe", probe_size=16, **TINY),
    "knn": lambda f: ImageNetDataModule(f, view="knn", probe_size=16, **TINY),
    "imagenet_s": lambda f: ImageNetSDataModule(f, batch_size=4, num_workers=0, resize=16, crop=16),
}
TINY = {"batch_size": 4, "num_workers": 0, "resize": 16, "crop": 16, "seed": 1}


@pytest.mark.parametrize("preset", PRESETS)
def test_no_trainer(folder, preset):
    """What everybody does first in a notebook."""
    data = PRESETS[preset](str(folder))
    data.prepare_data()
    loaders = []
    if preset != "imagenet_s":
        data.setup("fit")
        loaders.append(data.train_dataloader())
    for stage in ("validate", "test", "predict"):
        data.setup(stage)
        found = {"validate": data.val_dataloader, "test": data.test_dataloader, "predict": data.predict_dataloader}[
            stage
        ]()
        assert isinstance(found, list) == (preset == "knn" and stage != "predict")
        loaders += found if isinstance(found, list) else [found]
    for loader in loaders:
        batch = next(iter(loader))
        assert len(batch["key"]) == 4
        ready = data.on_after_batch_transfer(batch, 0)
        images = ready["crops"] if "crops" in ready else [ready["image"]]
        assert all(image.dtype == torch.float32 for image in images)
        assert ready["label"].dtype == torch.int64
    assert len(data.shard_files) == len(set(data.shard_files)) == (2 if preset == "imagenet_s" else 5)
    assert "train-*.tar" in str(data) or preset == "imagenet_s"


def test_nothing_to_train_on(folder):
    with pytest.raises(ValueError, match=r"data\.init_args\.train is not set"):
        PRESETS["imagenet_s"](str(folder)).train_dataloader()
    assert ShardDataModule(str(folder)).val_dataloader() == []


def test_each_iteration_by_itself_is_the_next_epoch(folder):
    data = PRESETS["probe"](str(folder))
    loader = data.train_dataloader()
    first, second = ([key for batch in loader for key in batch["key"]] for _ in range(2))
    data.trainer = FakeTrainer(0, 1)
    for epoch, found in enumerate((first, second)):
        data.trainer.current_epoch = epoch
        assert [key for batch in data.train_dataloader() for key in batch["key"]] == found
    assert first != second


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_of_ones_own_keeps_a_loaders_state(folder, workers):
    data = PRESETS["probe"](str(folder))
    data.position = Position(epoch=2)
    loader = data.train_dataloader()
    batches = list(loader)
    end = loader.state_dict()
    following = [b["key"] for b in loader]
    data.position = Position(epoch=2)
    loader = data.train_dataloader()
    next(iter(loader))
    state = loader.state_dict()
    assert (state["epoch"], state["parts"]) == (2, [[1, 4, 1]])
    assert (end["epoch"], end["parts"]) == (2, [[1, 4, len(batches)]])
    again = PRESETS["probe"](str(folder))
    again.num_workers = workers
    loader = again.train_dataloader()
    loader.load_state_dict(state)
    assert [b["key"] for b in loader] == [b["key"] for b in batches[1:]]
    assert loader.state_dict() == end
    assert [b["key"] for b in loader] == following  # the epoch after it is whole
    loader = again.train_dataloader()
    loader.load_state_dict(end)
    assert [b["key"] for b in loader] == following
    with pytest.raises(ValueError, match="rank=2 must lie in"):
        Position(rank=2, world_size=2)


def test_a_loader_handed_to_a_trainer_by_itself(folder, tmp_path):
    """Without its data module: a checkpoint inside an epoch is taken up there."""

    class Keys(LightningModule):
        def __init__(self):
            super().__init__()
            self.keys, self.layer = [], torch.nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            self.keys.append(batch["key"])
            return self.layer(torch.ones(1)).sum()

        def on_train_batch_end(self, *_):
            if self.global_step == 3:  # the second epoch's first batch is done
                self.trainer.save_checkpoint(tmp_path / "inside.ckpt")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def fitted(ckpt_path=None):
        module, data = Keys(), PRESETS["probe"](str(folder))
        Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=3,
            enable_model_summary=False,
        ).fit(module, data.train_dataloader(), ckpt_path=ckpt_path)  # fmt: skip
        return module.keys

    whole = fitted()
    assert len(whole) == 6 and fitted(tmp_path / "inside.ckpt") == whole[3:]


class Counted(EvaluationTransform):
    """Knows what it finished."""

    def __init__(self):
        super().__init__(16, 16)
        self.finished = 0

    def finish(self, batch, normalize):
        self.finished += 1
        return super().finish(batch, normalize) | {"finished": True}


def test_a_splits_own_transform_finishes_its_batches(folder):
    transforms = [Counted(), Counted(), Counted()]
    train, *val = (Split(f"{name}-*.tar", t) for name, t in zip(("train", "val", "train"), transforms, strict=True))
    data = ShardDataModule(str(folder), train, dict(zip(("held_out", "bank"), val, strict=True)), **SMALL_STEPS)
    assert [len(loader) for loader in data.val_dataloader()] == [2, 3]
    for number, loader in enumerate([data.train_dataloader(), *data.val_dataloader()]):
        assert all(data.on_after_batch_transfer(batch, 0)["finished"] for batch in loader)
        assert [t.finished for t in transforms] == [[2, 0, 0], [2, 2, 0], [2, 2, 3]][number]
    by_hand = data.on_after_batch_transfer({"image": torch.zeros(1, 3, 4, 4, dtype=torch.uint8), "skipped": ["x"]}, 0)
    assert by_hand["image"].is_floating_point() and data.skipped == 1


SMALL_STEPS = {"batch_size": 4, "num_workers": 0, "seed": 0}


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_batch_of_unreadable_samples(tmp_path, split):
    """Evaluation goes on, also under a transform that is meant for training; training has nothing to learn from it."""
    write_split(tmp_path, "x", make_samples(8), 100)
    damage(tmp_path, "x-000000.tar", lambda name, data: data[:30] if name.endswith("png") and name < "00004" else data)
    of = Split("x-*.tar", MultiCropTransform(SMALL))
    data = ShardDataModule(str(tmp_path), **{split: of}, policy="skip", shuffle_window=1, **SMALL_STEPS)
    if split == "train":
        with pytest.raises(ShardError, match="all 4 samples of a batch are unreadable"):
            list(data.train_dataloader())
        return
    empty, whole = data.val_dataloader()
    assert len(empty["skipped"]) == 4 and len(whole["key"]) == 4
    assert [tuple(c.shape) for c in empty["crops"]] == [(0, 3, 16, 16)] * 2 + [(0, 3, 8, 8)]
    assert empty["label"].shape == (0,) and empty["label"].dtype == torch.int64 and empty.keys() == whole.keys()


def test_a_view_that_there_is_not():
    with pytest.raises(ValueError, match=r"view='bogus'; allowed: multicrop, probe, features, knn"):
        ImageNetDataModule("somewhere", view="bogus")


def test_collation():
    declared = {"n": torch.empty(0, dtype=torch.int32), "x": torch.empty(0, dtype=torch.float64), "names": []}
    samples = [{"n": i, "x": i / 2, "names": f"s{i}", "y": 0.5, "m": np.float32(i), "a": np.ones((2, i + 1))[::-1]} for i in range(2)]  # fmt: skip
    batch = collate(samples, declared, "Mine")
    assert batch["n"].dtype == torch.int32 and batch["x"].dtype == torch.float64 and batch["y"].dtype == torch.float32
    assert batch["m"].tolist() == [0.0, 1.0] and batch["names"] == ["s0", "s1"]
    assert [tuple(a.shape) for a in batch["a"]] == [(2, 1), (2, 2)]
    only = {"n": declared["n"]}
    assert "partly" not in collate([{"n": 1, "partly": 2}, {"n": 1}], only, "Mine")
    with pytest.raises(ValueError, match=r"Mine: 1 of 2 samples of a batch have no 'boxes', which empty\(\) declares"):
        collate([{"n": 1, "boxes": np.zeros((0, 4))}, {"n": 1}], only | {"boxes": []}, "Mine")
    with pytest.raises(ValueError, match=r"Mine: a sample's 'n' is 'x', but empty\(\) declares torch.int32"):
        collate([{"n": 1}, {"n": "x"}], only, "Mine")
    for wrong in (np.zeros((3, 4), np.float32), np.zeros((2, 4))):
        with pytest.raises(ValueError, match=r"Mine: a sample's 'boxes' is .*declares \(2, 4\) torch.float32"):
            collate([{"boxes": wrong}], {"boxes": torch.empty(0, 2, 4)}, "Mine")


class Noise(Transform):
    """An array drawn from the sample's key."""

    def __call__(self, raw, key, rows):
        return {"noise": key.generator().random(3, np.float32), "number": key.number}

    def empty(self):
        return {"noise": torch.empty(0, 3), "number": torch.empty(0, dtype=torch.int64)}


def test_a_samples_own_generator(folder):
    """The same draws in any worker and on any rank, others for another sample, epoch and seed."""

    def drawn(workers, epoch=0, seed=0, world=1):
        found = {}
        for rank in range(world):
            data = ShardDataModule(
                str(folder), Split("train-*.tar", Noise()), batch_size=world, num_workers=workers, seed=seed
            )
            data.position = Position(rank, world, epoch=epoch)
            for batch in data.train_dataloader():
                found |= zip(batch["key"], map(tuple, batch["noise"].tolist()), strict=True)
        return found

    first = drawn(0)
    assert first == drawn(2) and len(set(first.values())) == 11
    assert all(first[key] == noise for key, noise in drawn(0, world=3).items())
    assert not set(first.values()) & {*drawn(0, epoch=1).values(), *drawn(0, seed=1).values()}


def test_a_member_that_is_never_read_is_refused(folder):
    transform = Noise()
    transform.fields = ("png", "txt")
    with pytest.raises(
        ValueError, match=r"Noise\.fields has 'txt', which ShardSet does not read; allowed: mask.png, jpg"
    ):
        ShardDataModule(str(folder), Split("train-*.tar", transform), **SMALL_STEPS).train_dataloader()


def test_sources_given_in_python(folder, my_data):
    shards = ShardSet.find(folder, "val-*.tar", "val")
    data = ShardDataModule(val=Split(shards, my_data.BoxTransform()), **SMALL_STEPS)
    assert sum(len(batch["key"]) for batch in data.val_dataloader()) == 5 and data.source("val") is shards
    with pytest.raises(ShardError, match=r"matches data.init_args.val.other.shards='none-\*.tar'"):
        ShardDataModule(str(folder), val={"other": Split("none-*.tar", my_data.BoxTransform())}).prepare_data()


@pytest.mark.parametrize("make", [lambda: MultiCropTransform(SMALL), lambda: EvaluationTransform(16, 16)])
def test_transforms_go_to_spawned_workers(folder, make):
    """Used or not, a copy makes what the original makes."""
    transform = make()
    data = ShardDataModule(str(folder), val=Split("val-*.tar", transform), **SMALL_STEPS)
    first = list(data.val_dataloader())
    data.splits["val"].transform = pickle.loads(pickle.dumps(transform))
    for a, b in zip(first, data.val_dataloader(), strict=True):
        images = "crops" if "crops" in a else "image"
        assert all(torch.equal(x, y) for x, y in zip(a[images], b[images], strict=True))


def test_yaml_alone(folder, my_data, tmp_path, capsys):
    """A user's transform with ragged targets through a fit and a prediction; none of our files knows of it."""
    (tmp_path / "data.yaml").write_text(f"""
data:
  class_path: datamodules.ShardDataModule
  init_args:
    root: {folder}
    train: {{shards: "train-*.tar", transform: {{class_path: my_boxes.BoxTransform, init_args: {{size: 16}}}}}}
    val: {{shards: "val-*.tar", transform: {{class_path: my_boxes.BoxTransform}}}}
    batch_size: 4
    num_workers: 0
model:
  class_path: lightning_modules.LinearProbe
  init_args:
    num_classes: 4
    heads: [{{n_last_blocks: 1}}]
    backbone: {{class_path: backbones.{BACKBONES["vit"]}}}
trainer: {{accelerator: cpu, max_epochs: 1, logger: {{init_args: {{save_dir: {tmp_path}, name: run}}}}}}
""")
    args = ["-c", str(CONFIGS / "base.yaml"), "-c", str(tmp_path / "data.yaml")]
    cli.main(["fit", *args])
    rows = json.loads((tmp_path / "run/results.json").read_text())["rows"]
    assert rows[0]["images"] == 5
    cli.main(["predict", *args])
    files = [np.load(path) for path in (tmp_path / "run/predictions").glob("*.npz")]
    assert sorted(key for file in files for key in file["key"]) == [f"{i:05d}" for i in range(5)]
    with pytest.raises(SystemExit):
        cli.main(["fit", *args, "--data.init_args.train.shards", "none-*.tar"])
    assert "data.init_args.train.shards='none-*.tar'" in capsys.readouterr().err.strip().splitlines()[-1]
