"""Shards from trees and from drawing, read back by the DataModules and by webdataset itself."""

import io
import json
import os

import numpy as np
import pytest
import torch
import webdataset as wds
from PIL import Image
from sklearn.model_selection import cross_val_score
from sklearn.neighbors import KNeighborsClassifier

from datamodules import ImageNetDataModule, ImageNetSDataModule
from datamodules.demo import CLASSES, draw_scene
from datamodules.prepare import demo, imagefolder, imagenet_s, write_split
from datamodules.samples import ShardError
from metrics import binary_auc, position_map
from tests.datamodules.test_shards import FakeTrainer


def save(path, size=(30, 24), seed=0, kind=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path, kind)


@pytest.fixture
def tree(tmp_path):
    """Three classes of 4, 3 and 5 images, with dots in names and odd endings."""
    names = iter(["a.JPEG", "b.v2.jpg", "c.png", "d.webp"] * 3)
    for wnid, count in (("n03", 4), ("n01", 3), ("n02", 5)):
        for i in range(count):
            save(tmp_path / "tree" / wnid / f"{wnid}_{i}{next(names)}", seed=i)
    return tmp_path / "tree"


def test_imagefolder(tree, tmp_path):
    out = tmp_path / "out"
    imagefolder(str(tree), str(out), "val", samples_per_shard=5)
    info = json.loads((out / "_info.json").read_text())["splits"]["val"]
    assert info["num_samples"] == 12 and info["shard_lengths"] == [5, 5, 2]
    labels = {}
    files = [str(out / f) for f in info["filenames"]]
    for sample in wds.WebDataset(files, shardshuffle=False):  # another reader sees the same samples
        image = next(v for k, v in sample.items() if k in ("jpg", "png", "webp"))
        original = tree / json.loads(sample["json"])["filename"]
        assert image == original.read_bytes()  # the bytes, not a new encoding
        labels[original.parent.name] = int(sample["cls"])
    assert labels == {"n01": 0, "n02": 1, "n03": 2}
    data = ImageNetDataModule(str(out), val_shards="val-*.tar", batch_size=4, num_workers=0, resize=16, crop=16)
    data.trainer = FakeTrainer(0, 1)
    keys = [key for batch in data.val_dataloader() for key in batch["key"]]
    assert len(set(keys)) == 12 and not any("." in key for key in keys)


def test_a_split_is_not_overwritten_by_accident(tree, tmp_path):
    out = tmp_path / "out"
    imagefolder(str(tree), str(out), "val", samples_per_shard=2)
    with pytest.raises(ShardError, match=r"already holds the split 'val'.*--overwrite"):
        imagefolder(str(tree), str(out), "val")
    imagefolder(str(tree), str(out), "train")  # another split joins
    imagefolder(str(tree), str(out), "val", samples_per_shard=100, overwrite=True)
    info = json.loads((out / "_info.json").read_text())["splits"]
    assert set(info) == {"val", "train"} and info["val"]["shard_lengths"] == [12]
    assert sorted(p.name for p in out.glob("*.tar")) == ["train-000000.tar", "val-000000.tar"]


def test_nothing_half_written_stays(tmp_path):
    def samples():
        yield {"__key__": "0", "cls": b"1"}
        yield {"__key__": "1", "cls": b"1"}
        yield {"__key__": "2", "cls": b"1"}
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError):
        write_split(tmp_path, "val", samples(), 2)
    assert [p.name for p in tmp_path.iterdir()] == ["val-000000.tar"]  # whole; the second left nothing


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("empty class", "class folder .*n09 is empty"),
        ("text", "notes.txt is no"),
        ("flat", "no class folders"),
        ("gone", "no folder"),
    ],
)
def test_wrong_trees(tree, tmp_path, fault, words):
    if fault == "empty class":
        (tree / "n09").mkdir()
    elif fault == "text":
        (tree / "n01" / "notes.txt").write_text("x")
    elif fault == "flat":
        tree = tmp_path / "flat"
        save(tree / "a.png")
    else:
        tree = tmp_path / "gone"
    with pytest.raises(ShardError, match=words):
        imagefolder(str(tree), str(tmp_path / "out"), "val")


def mask_png(path, ids):
    path.parent.mkdir(parents=True, exist_ok=True)
    rgb = np.stack([ids % 256, ids // 256, np.zeros_like(ids)], -1).astype(np.uint8)
    Image.fromarray(rgb).save(path)


@pytest.fixture
def imagenet_s_tree(tmp_path):
    """Masks of one image stand in another class folder than the image, as in the published set."""
    root, ids = tmp_path / "ImageNetS3", {}
    for i, (folder, mask_folder) in enumerate((("n01", "n01"), ("n01", "n02"), ("n02", "n02"))):
        name = f"ILSVRC2012_val_{i}"
        save(root / "validation" / folder / f"{name}.JPEG", (40, 40), i)
        ids[name] = np.kron(np.array([[0, 1000], [i + 300, 0]]), np.ones((20, 20), int))
        mask_png(root / "validation-segmentation" / mask_folder / f"{name}.png", ids[name])
    return root, ids


def test_imagenet_s(imagenet_s_tree, tmp_path):
    root, ids = imagenet_s_tree
    imagenet_s(str(root), str(tmp_path / "out"))
    data = ImageNetSDataModule(str(tmp_path / "out"), "validation-*.tar", 2, 0, resize=40, crop=40)
    data.trainer = FakeTrainer(0, 1)
    found = {key: mask for b in data.val_dataloader() for key, mask in zip(b["key"], b["mask"], strict=True)}
    assert len(found) == 3
    for key, mask in found.items():
        assert np.array_equal(mask.numpy(), ids[key.split("_", 1)[1]])


@pytest.mark.parametrize("fault", ["missing", "size", "twice"])
def test_imagenet_s_faults(imagenet_s_tree, tmp_path, fault):
    root, _ = imagenet_s_tree
    masks = root / "validation-segmentation"
    if fault == "missing":
        os.remove(masks / "n02" / "ILSVRC2012_val_1.png")
        words = "ILSVRC2012_val_1.JPEG has no mask"
    elif fault == "size":
        mask_png(masks / "n02" / "ILSVRC2012_val_1.png", np.zeros((4, 4), int))
        words = r"ILSVRC2012_val_1.png is \(4, 4\), its image .* is \(40, 40\)"
    else:
        mask_png(masks / "n01" / "ILSVRC2012_val_1.png", np.zeros((40, 40), int))
        words = "two masks are called ILSVRC2012_val_1.png"
    with pytest.raises(ShardError, match=words):
        imagenet_s(str(root), str(tmp_path / "out"))
    assert not list((tmp_path / "out").glob("*.tar"))


def test_demo_is_reproducible_by_any_number_of_processes(tmp_path):
    for name, workers in (("a", 0), ("b", 2)):
        demo(str(tmp_path / name), train=20, validation=10, samples_per_shard=7, workers=workers)
    with pytest.raises(ShardError, match="--workers -1; allowed: 0 and more"):
        demo(str(tmp_path / "c"), workers=-1)
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_scenes_tell_the_class_by_their_objects_alone():
    """Area, place and background are alike in every class, and the place says nothing; the hue does not suffice."""
    scenes = [[draw_scene(label, 5, 10 * i + label) for i in range(60)] for label in range(len(CLASSES))]
    area = np.array([np.mean([(s.mask > 0).mean() for s in group]) for group in scenes])
    back = np.array([np.mean([s.image[s.mask == 0].mean(0) for s in group], 0) for group in scenes])
    assert np.ptp(area) < 0.08 and np.ptp(back, 0).max() < 2
    everyone = [s for group in scenes for s in group]
    for s in everyone[::7]:
        assert set(np.unique(s.mask)) == {0, s.label + 1} and 0.02 < (s.mask > 0).mean() < 0.8
    masks = torch.from_numpy(np.stack([s.mask for s in everyone])).long()
    middle = position_map((24, 24)).float().expand(len(masks), 1, -1, -1)
    assert binary_auc(middle, masks).nanmean() < 0.65
    mean = np.stack(
        [s.image[s.mask > 0].mean(0) for s in everyone]
    )  # of the objects: their hue, and how light they are
    labels = np.array([s.label for s in everyone])
    assert 0.3 < cross_val_score(KNeighborsClassifier(10), mean, labels, cv=5).mean() < 0.85


def test_png_of_a_scene_is_lossless(tmp_path):
    demo(str(tmp_path), train=10, validation=10)
    first = next(iter(wds.WebDataset(str(tmp_path / "train-000000.tar"), shardshuffle=False)))
    scene = draw_scene(0, 1, 0)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(first["png"]))), scene.image)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(first["mask.png"]))), scene.mask)


def test_shards_do_not_lie_among_the_images(tmp_path):
    (tmp_path / "img/a").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "img/a/1.png")
    for out in ("img", "img/o", "img/a/../b"):
        with pytest.raises(ValueError, match=r"--out .* lies inside the images' folder .*img: give a folder beside it"):
            imagefolder(str(tmp_path / "img"), str(tmp_path / out), "train")
    with pytest.raises(ValueError, match=r"1\.png is a file and no folder"):
        imagefolder(str(tmp_path / "img/a/1.png"), str(tmp_path / "o"), "train")
    imagefolder(str(tmp_path / "img"), str(tmp_path / "img-shards"), "train")
