"""Albumentations pipelines out of YAML: seeded by the sample, and refused by name where they are wrong."""

import pickle
import random
import subprocess
import sys

import albumentations as A
import numpy as np
import pytest
import torch
import yaml

from datamodules import AlbumentationsImage, AlbumentationsViews, ImageNetDataModule, PipelineViews, Position
from datamodules.pipelines import SeededPipeline, build
from datamodules.prepare import write_split
from datamodules.sample_seed import SampleKey
from tests.datamodules.test_shards import make_samples
from tests.tiny_runs import ROOT, run

VIEWS = """
- count: 2
  size: 16
  pipeline:
    - {class_path: albumentations.RandomResizedCrop, init_args: {size: [16, 16], scale: [0.4, 1.0]}}
    - class_path: albumentations.OneOf
      init_args:
        p: 0.9
        transforms:
          - {class_path: albumentations.GaussNoise, init_args: {p: 1}}
          - class_path: albumentations.Compose
            init_args:
              transforms:
                - {class_path: albumentations.ColorJitter, init_args: {p: 1}}
                - {class_path: albumentations.CoarseDropout, init_args: {p: 1}}
    - class_path: albumentations.OneOrOther
      init_args: {first: {class_path: albumentations.HorizontalFlip}, second: {class_path: albumentations.Transpose}}
- {size: 9, pipeline: [{class_path: albumentations.RandomCrop, init_args: {height: 9, width: 9}}]}
"""
PROBE = yaml.safe_load(VIEWS)[0]["pipeline"]


def views():
    return [PipelineViews(**view) for view in yaml.safe_load(VIEWS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("shards")
    write_split(out, "train", make_samples(13), 4)
    return out


def module(folder, view="multicrop", workers=0, position=None, seed=3):
    data = ImageNetDataModule(
        str(folder), view=view, batch_size=2, num_workers=workers, probe_size=16, seed=seed, shuffle_window=5,
        multicrop_pipelines=views(), probe_pipeline=PROBE,
    )  # fmt: skip
    data.position = position or Position()
    return data


def by_key(batches, number=0):
    """Each sample's images."""
    found = {}
    for batch in batches:
        images = batch["crops"] if "crops" in batch else [batch["image"]]
        found |= {key: [view[i].numpy() for view in images] for i, key in enumerate(batch["key"])}
    return found


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(x, y) for k in a for x, y in zip(a[k], b[k], strict=True))


@pytest.mark.parametrize("view", ["multicrop", "probe"])
def test_views_depend_on_seed_epoch_and_sample_alone(view, folder):
    first = by_key(module(folder, view).train_dataloader())
    shapes = [(3, 16, 16)] * 2 + [(3, 9, 9)] if view == "multicrop" else [(3, 16, 16)]
    assert len(first) == 12 and all([image.shape for image in images] == shapes for images in first.values())
    random.seed(5)
    np.random.seed(5)
    for workers in (0, 1, 3):
        assert same(by_key(module(folder, view, workers).train_dataloader()), first)
    other_ranks = {}
    for rank in (0, 1):
        other_ranks |= by_key(module(folder, view, 0, Position(rank, 2)).train_dataloader())
    assert same(other_ranks, {key: first[key] for key in other_ranks})
    for changed in (module(folder, view, seed=4), module(folder, view, position=Position(epoch=1))):
        found = by_key(changed.train_dataloader())
        assert not any(np.array_equal(found[key][0], first[key][0]) for key in found.keys() & first.keys())
    if view == "multicrop":
        assert not any(np.array_equal(images[0], images[1]) for images in first.values())  # two views differ


@pytest.mark.parametrize("view", ["multicrop", "probe"])
def test_the_same_views_after_a_resume(view, folder):
    whole = list(module(folder, view, position=Position(epoch=2)).train_dataloader())
    resumed = module(folder, view, 2, Position(epoch=2, batches=2)).train_dataloader()
    resumed.load_state_dict({"epoch": 2, "parts": [[1, 2, 2]]})
    rest = list(resumed)
    assert [b["key"] for b in rest] == [b["key"] for b in whole[2:]]
    assert same(by_key(rest), by_key(whole[2:]))


def test_a_copy_in_a_spawned_worker_draws_alike():
    """The shared generator stays shared."""
    image = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    pipeline = SeededPipeline(PROBE, 16, "p")
    copied = pickle.loads(pickle.dumps(pipeline))
    out = np.empty((2, 3, 16, 16), np.uint8)
    for number in range(4):
        for one, planes in zip((pipeline, copied), out, strict=True):
            one(image, SampleKey(0, 0, number), planes)
        assert np.array_equal(*out)


def test_what_yaml_says_is_what_albumentations_does():
    image = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    steps = [
        {"class_path": "albumentations.Resize", "init_args": {"height": 12, "width": 12}},
        {"class_path": "albumentations.VerticalFlip", "init_args": {"p": 1}},
    ]
    out = np.empty((3, 12, 12), np.uint8)
    SeededPipeline(steps, 12, "p")(image, SampleKey(0, 0, 0), out)
    plain = A.Compose([A.Resize(12, 12), A.VerticalFlip(p=1)])
    assert np.array_equal(out, plain(image=image)["image"].transpose(2, 0, 1))
    SeededPipeline([A.Resize(12, 12), A.VerticalFlip(p=1)], 12, "p")(image, SampleKey(0, 0, 0), out)  # objects, too
    assert np.array_equal(out, plain(image=image)["image"].transpose(2, 0, 1))


def spec(name, **init_args):
    return {"class_path": f"albumentations.{name}", "init_args": init_args}


WRONG = {
    "another class": (spec("Nope"), r"p\.class_path='albumentations.Nope' is not found"),
    "no class": ({"init_args": {}}, r"p\.class_path='' is not found"),
    "no transform": ({"class_path": "json.JSONDecoder"}, "is no transform of albumentations' kind"),
    "another key": (spec("Resize") | {"args": 1}, "p has the key 'args'; allowed: class_path, init_args"),
    "a list": (spec("Resize") | {"init_args": [3]}, r"p\.init_args is \[3\]; wanted names and values"),
    "no mapping": (3, "p is 3; wanted class_path"),
    "a misspelt argument": (spec("Resize", heigth=3, width=3), r"p\.init_args has 'heigth', which Resize does not .*height"),
    "a missing argument": (spec("Resize", height=3), r"p: albumentations.Resize refuses its init_args: width: Field required"),
    "a bad value": (spec("HorizontalFlip", p=3), "refuses its init_args: p: Input should be less than or equal to 1"),
    "inside another": (
        spec("OneOf", transforms=[spec("ToGray"), spec("Resize", x=1)]),
        r"p\.init_args\.transforms\[1\]\.init_args has 'x'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_pipelines(what):
    given, words = WRONG[what]
    with pytest.raises(ValueError, match=words) as error:
        build(given, "p")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([spec("HorizontalFlip")], r"made \(2\d, 24, 3\) uint8"),
        ([spec("Resize", height=16, width=15)], r"made \(16, 15, 3\) uint8"),
        ([spec("Resize", height=16, width=16), spec("Normalize")], r"made \(16, 16, 3\) float32"),
        ([spec("Resize", height=16, width=16), spec("ToTensorV2")], r"made \(3, 16, 16\) torch.uint8"),
    ],
)
def test_another_outcome_than_declared_names_the_key(steps, words, folder):
    for view, transform in (
        ("multicrop", {"multicrop_pipelines": [views()[0], PipelineViews(16, steps)]}),
        ("probe", {"probe_pipeline": steps, "probe_size": 16}),
    ):
        data = ImageNetDataModule(
            str(folder), view=view, batch_size=2, num_workers=0, policy="skip", shuffle_window=1, **transform
        )
        key = {"multicrop": r"multicrop_pipelines\[1\]\.pipeline", "probe": "probe_pipeline"}[view]
        with pytest.raises(ValueError, match=rf"data\.init_args\.{key} {words}.* with size=16 it must make"):
            next(iter(data.train_dataloader()))


def test_wrong_views():
    with pytest.raises(ValueError, match="views is empty"):
        AlbumentationsViews([])
    with pytest.raises(ValueError, match=r"views\[0\]: count=0 and size=16 must be positive"):
        AlbumentationsViews([PipelineViews(16, PROBE, 0)])


def test_buffers_and_empty_batches():
    transform = AlbumentationsViews(views())
    assert [tuple(t.shape) for t in transform.allocate(0)["crops"]] == [(0, 3, 16, 16)] * 2 + [(0, 3, 9, 9)]
    assert AlbumentationsImage(16, PROBE).allocate(5)["image"].dtype == torch.uint8
    assert transform.empty()["label"].dtype == torch.int64


def test_importing_datamodules_leaves_albumentations_out():
    """It takes a second, and asks the network for a newer version unless it is told not to."""
    code = (
        "import os, sys, datamodules; assert 'albumentations' not in sys.modules; "
        "assert os.environ['NO_ALBUMENTATIONS_UPDATE'] == '1'; "
        "datamodules.ImageNetDataModule('x'); datamodules.ImageNetDataModule('x', view='probe'); "
        "assert 'albumentations' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_in_a_run(shards, tmp_path):
    """DINO on crops of albumentations, a probe on its images; from YAML, which the run's record keeps as it was."""
    text = {"data": {"init_args": {"multicrop_pipelines": yaml.safe_load(VIEWS), "probe_pipeline": PROBE}}}
    text["data"]["init_args"]["multicrop_pipelines"][1]["pipeline"][0]["init_args"] = {"height": 8, "width": 8}
    text["data"]["init_args"]["multicrop_pipelines"][1]["size"] = 8
    (tmp_path / "albumentations.yaml").write_text(yaml.safe_dump(text))
    for task in ("dino", "linear_probe"):
        folder = run("fit", task, shards, tmp_path, "vim", "-c", str(tmp_path / "albumentations.yaml"))
        kept = yaml.safe_load((folder / "config.yaml").read_text())["data"]["init_args"]
        assert kept["probe_pipeline"] == PROBE
    with pytest.raises(SystemExit):
        run("fit", "linear_probe", shards, tmp_path, "vim", "--data.init_args.probe_pipeline", "[{class_path: x.y}]")
