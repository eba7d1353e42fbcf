"""Robustness sets: which class an image stands for, where the naive way gives another number."""

import json
from importlib.resources import files

import numpy as np
import pytest
from PIL import Image
from timm.data import ImageNetInfo

from datamodules import Position, RobustnessDataModule, RobustnessSet, prepare
from datamodules.labels import folder_labels, subset_classes, validation_labels
from datamodules.samples import ShardError


def synsets_of(subset):
    """The 200 folder names that timm publishes beside the places among the thousand."""
    return files("timm.data").joinpath("_info", f"{subset}_synsets.txt").read_text().split()


def tree(root, folders, per_folder=1, start=1):
    """CLASS/ILSVRC2012_val_XXXXXXXX.png, each of one grey level, its number."""
    number = start
    for folder in folders:
        (root / folder).mkdir(parents=True)
        for _ in range(per_folder):
            Image.new("RGB", (16, 16), (number, number, number)).save(
                root / folder / f"ILSVRC2012_val_{number:08d}.png"
            )
            number += 1
    return root


def batches(root, sets, rank=0, world=1, batch_size=4, workers=0):
    data = RobustnessDataModule(str(root), sets, batch_size=batch_size, num_workers=workers, resize=16, crop=16)
    data.position = Position(rank, world)
    data.prepare_data()
    return data, [list(loader) for loader in data.val_dataloader()]


def answers(loader):
    """grey level -> right answers."""
    found = {}
    for batch in loader:
        for image, right in zip(batch["image"], batch["answers"], strict=True):
            found[int(image[0, 0, 0])] = [a for a in right.tolist() if a >= 0]
    return found


def test_numbers_of_v2_are_classes_and_not_their_order_as_text(tmp_path):
    names = [str(i) for i in range(12)]
    tree(tmp_path / "v2", names)
    _, (loader,) = batches(tmp_path, {"v2": RobustnessSet("v2")})
    assert answers(loader) == {i + 1: [i] for i in range(12)}
    naive = {name: place for place, name in enumerate(sorted(names))}  # what ImageFolder would say
    assert naive["2"] == 4 and naive["10"] == 2
    with pytest.raises(ShardError, match="'10' would be class 2; pass --numbering folder"):
        prepare.imagefolder(str(tmp_path / "v2"), str(tmp_path / "out"), "test")


def test_an_older_v2_and_sketch_have_wordnet_ids(tmp_path):
    order = ImageNetInfo("imagenet-1k").label_names()
    tree(tmp_path / "sketch", [order[7], order[500], order[999]])
    _, (loader,) = batches(tmp_path, {"sketch": RobustnessSet("sketch")})
    assert answers(loader) == {1 + i: [c] for i, c in enumerate(sorted((7, 500, 999), key=lambda c: order[c]))}


@pytest.mark.parametrize("subset", ["imagenet_a", "imagenet_r"])
def test_a_and_r_have_200_of_the_1000_classes(subset, tmp_path):
    classes = subset_classes(subset)
    names = synsets_of(subset)
    order = ImageNetInfo("imagenet-1k").label_names()
    assert len(set(classes)) == 200 and [order[c] for c in classes] == names
    some = sorted(names)[:3]
    tree(tmp_path / "set", some)
    data, (loader,) = batches(tmp_path, {"set": RobustnessSet("set", classes=subset)})
    found = answers(loader)
    assert found == {i + 1: [order.index(name)] for i, name in enumerate(some)}
    assert found != {1: [0], 2: [1], 3: [2]}  # numbering the folders there are
    assert data.classes == {"set": classes}


def test_real_has_46837_images_with_an_answer():
    labels = validation_labels("imagenet_real")
    assert len(labels) == 50_000 and sum(bool(right) for right in labels) == 46_837


def test_real_answers_come_by_the_number_in_the_name(tmp_path):
    order = ImageNetInfo("imagenet-1k").label_names()
    tree(tmp_path / "val", [order[3], order[1]], per_folder=2)
    (tmp_path / "real.json").write_text(json.dumps([[3], [3, 5, 6], [], [2]]))
    _, (loader,) = batches(tmp_path, {"real": RobustnessSet("val", labels=str(tmp_path / "real.json"))})
    assert loader[0]["answers"].shape == (4, 3)
    order_of_folders = sorted([order[3], order[1]])
    first = 1 if order_of_folders[0] == order[3] else 3
    assert answers(loader) == {1: [3], 2: [3, 5, 6], 3: [], 4: [2]} and int(loader[0]["image"][0, 0, 0, 0]) == first


def test_shards_give_what_the_tree_gives(tmp_path):
    tree(tmp_path / "v2", [str(i) for i in range(12)], per_folder=2)
    prepare.imagefolder(str(tmp_path / "v2"), str(tmp_path / "shards"), "v2", samples_per_shard=5, numbering="folder")
    labels = tmp_path / "real.json"
    labels.write_text(json.dumps([[i, 0] for i in range(24)]))
    sets = {
        "tree": RobustnessSet("v2"),
        "shards": RobustnessSet("shards/v2-*.tar"),
        "real": RobustnessSet("shards/v2-*.tar", labels=str(labels)),
    }
    _, (from_tree, from_shards, real) = batches(tmp_path, sets)
    assert answers(from_tree) == answers(from_shards) and len(answers(from_tree)) == 24
    assert answers(real) == {i + 1: [i, 0] for i in range(24)}


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (3, 0), (5, 0)])
def test_each_image_once_over_ranks_and_workers(world, workers, tmp_path):
    tree(tmp_path / "v2", ["0", "1"], per_folder=4)
    seen = []
    lengths = set()
    for rank in range(world):
        _, (loader,) = batches(tmp_path, {"v2": RobustnessSet("v2")}, rank, world, 2 * world, workers)
        seen += [int(image[0, 0, 0]) for batch in loader for image in batch["image"]]
        lengths.add(len(loader))
        assert all(batch["answers"].shape[1:] == (1,) for batch in loader)
    assert sorted(seen) == list(range(1, 9)) and len(lengths) == 1


def test_wrong_input(tmp_path):
    tree(tmp_path / "val", ["a", "b"])
    with pytest.raises(ShardError, match="2 of 2 class folders are neither numbers nor in the list 'imagenet'"):
        batches(tmp_path, {"x": RobustnessSet("val")})
    with pytest.raises(ShardError, match=r"data.init_args.sets.x: no folder .*none; unpack the set there"):
        batches(tmp_path, {"x": RobustnessSet("none")})
    with pytest.raises(ValueError, match="classes='imagenet_c'; allowed are all, imagenet_a"):
        RobustnessDataModule(str(tmp_path), {"x": RobustnessSet("val", classes="imagenet_c")})
    with pytest.raises(ValueError, match=r"data.init_args.sets is empty"):
        RobustnessDataModule(str(tmp_path), {})
    (tmp_path / "names.txt").write_text("a\nb")
    (tmp_path / "few.json").write_text("[[0]]")
    with pytest.raises(ShardError, match="is image 2; there are labels for 1"):
        batches(
            tmp_path,
            {"x": RobustnessSet("val", labels=str(tmp_path / "few.json"), synsets=str(tmp_path / "names.txt"))},
        )
    (tmp_path / "wrong.json").write_text('{"a": 1}')
    with pytest.raises(ShardError, match=r"wrong.json is no JSON list of label lists"):
        validation_labels(str(tmp_path / "wrong.json"))
    (tmp_path / "val/a/readme.md").write_text("x")
    with pytest.raises(ShardError, match=r"readme.md is no .jpg"):
        batches(tmp_path, {"x": RobustnessSet("val", synsets=str(tmp_path / "names.txt"))})
    assert folder_labels(["01", "2"]) == {"01": 1, "2": 2}


def test_the_embedded_sets(tmp_path):
    prepare.demo_robustness(str(tmp_path / "sets"), per_class=5)
    names = (tmp_path / "sets/classes.txt").read_text().split()
    assert len(names) == 10
    assert sorted(p.name for p in (tmp_path / "sets/a").iterdir()) == sorted(names[c] for c in (0, 3, 5, 8))
    lists = json.loads((tmp_path / "sets/real.json").read_text())
    assert len(lists) == 50 and {len(right) for right in lists} == {0, 1, 2}
    one = np.asarray(Image.open(next((tmp_path / "sets/sketch").rglob("*.png"))))
    assert one.shape == (96, 96, 3) and one.max() == 255
    with pytest.raises(ShardError, match="already there"):
        prepare.demo_robustness(str(tmp_path / "sets"))
