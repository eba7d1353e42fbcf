"""Shards from COCO's published folders and from drawn scenes: what they hold, and each fault by its name."""

import copy
import io
import json
import re
from itertools import chain

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as run_length
from pycocotools.coco import COCO

from datamodules.prepare import coco, demo_dense
from datamodules.samples import LARGEST, ShardError
from datamodules.shards import ShardSet
from tests.datamodules.published_layouts import clear, coco_data, coco_tree, crowd, samples_of

SIZES, COUNTS = [(60, 40), (41, 64), (50, 50), (33, 70), (64, 48)], [2, 1, 0, 3, 2]


# ---- COCO -----------------------------------------------------------------------------------------------------


@pytest.fixture
def data():
    """With crowds in both kinds of run lengths, an image without annotations, and annotations that nobody trains on."""
    data = coco_data(SIZES, COUNTS)
    ids = [one["id"] for one in data["images"]]
    odd = copy.deepcopy(data["annotations"][0])
    data["annotations"] += [
        crowd(5000, ids[0], SIZES[0]),
        crowd(5001, ids[4], SIZES[4], compressed=True),
        odd | {"id": 5002, "area": 0.0, "bbox": [3.0, 4.0, 0.0, 9.5]},
        odd | {"id": 5003, "bbox": [70.0, 4.0, 8.0, 9.5]},
    ]
    return data


def test_coco_says_what_pycocotools_reads(data, tmp_path):
    path = coco_tree(tmp_path / "coco", data)
    out = tmp_path / "out"
    coco(str(tmp_path / "coco"), str(out), "train2017", samples_per_shard=2)
    reference = COCO(str(path))
    labels = {category: label for label, category in enumerate(sorted(reference.getCatIds()))}
    samples = samples_of(out, "train2017")
    assert {json.loads(sample["json"])["id"] for sample in samples.values()} == set(reference.getImgIds())
    for sample in samples.values():
        said = json.loads(sample["json"])
        image = reference.loadImgs(said["id"])[0]
        assert {key: said[key] for key in image} == image
        assert sample["jpg"] == (tmp_path / "coco/train2017" / image["file_name"]).read_bytes()
        wanted = reference.loadAnns(reference.getAnnIds(said["id"]))
        assert [one["id"] for one in said["annotations"]] == [one["id"] for one in wanted]
        for one, row in zip(said["annotations"], wanted, strict=True):
            assert all(one[key] == row[key] for key in ("category_id", "bbox", "area", "iscrowd"))
            assert one["label"] == labels[row["category_id"]]
            np.testing.assert_array_equal(run_length.decode(one["rle"]), reference.annToMask(row))
    assert json.loads((out / "classes.json").read_text()) == ["car", "train", "dog"]
    assert json.loads((out / "categories.json").read_text()) == [
        {"id": 3, "name": "car"}, {"id": 7, "name": "train"}, {"id": 18, "name": "dog"}
    ]  # fmt: skip


def test_info_says_sizes_and_counts_by_shard(data, tmp_path):
    coco_tree(tmp_path / "coco", data)
    out = tmp_path / "out"
    coco(str(tmp_path / "coco"), str(out), "train2017", samples_per_shard=2)
    info = json.loads((out / "_info.json").read_text())["splits"]["train2017"]
    assert [len(part) for part in info["sizes"]] == [len(part) for part in info["annotated"]] == [2, 2, 1]
    sizes, counts = (list(chain.from_iterable(info[name])) for name in ("sizes", "annotated"))
    for said, size, count in zip(samples_of(out, "train2017").values(), sizes, counts, strict=True):
        assert Image.open(io.BytesIO(said["jpg"])).size == tuple(size)
        assert len(json.loads(said["json"])["annotations"]) == count
    assert sorted(counts) == [0, 1, 3, 3, 5]


def test_order_and_annotations_elsewhere(data, tmp_path):
    path = coco_tree(tmp_path / "coco", data)
    path.rename(tmp_path / "mine.json")
    with pytest.raises(ShardError, match=r"no file of annotations .*instances_train2017.json .*; give it by --annot"):
        coco(str(tmp_path / "coco"), str(tmp_path / "out"), "train2017")
    args = {"annotations": str(tmp_path / "mine.json"), "shuffle": False}
    coco(str(tmp_path / "coco"), str(tmp_path / "out"), "train2017", **args)
    keys = list(samples_of(tmp_path / "out", "train2017"))
    assert keys == [image["file_name"].removesuffix(".jpg") for image in data["images"]]


def test_splits_share_categories(data, tmp_path):
    coco_tree(tmp_path / "coco", data)
    other = copy.deepcopy(data)
    other["categories"] = [one | {"id": one["id"] + 1} for one in data["categories"]]
    for one in other["annotations"]:
        one["category_id"] += 1
    coco_tree(tmp_path / "coco", other, "val2017")
    coco(str(tmp_path / "coco"), str(tmp_path / "out"), "train2017")
    with pytest.raises(ShardError, match=r"categories.json has other categories than the split 'val2017'"):
        coco(str(tmp_path / "coco"), str(tmp_path / "out"), "val2017")
    coco_tree(tmp_path / "coco", data, "val2017")
    coco(str(tmp_path / "coco"), str(tmp_path / "out"), "val2017")
    assert len(ShardSet.find(tmp_path / "out", "val2017-*.tar", "val_shards")) == 5


def at(data, index=0, **changes):
    data["annotations"][index] |= changes


def without(data, name, index, field):
    del data[name][index][field]


FILE_FAULTS = {
    "no list": (lambda d: d.pop("annotations"), r"has no list 'annotations' \(it has 'info', 'licenses', 'images', …\)"),
    "captions": (lambda d: without(d, "annotations", 1, "bbox"), r"annotations\[1\] has no 'bbox'; wanted id, image_id"),
    "no width": (lambda d: without(d, "images", 0, "width"), r"images\[0\] has no 'width'"),
    "kind": (lambda d: at(d, image_id="100"), r"annotations\[0\] has the image_id '100' of a wrong kind"),
    "image twice": (lambda d: d["images"].append(d["images"][0] | {"file_name": "x.jpg"}), r"two images have the id 100"),
    "file twice": (lambda d: d["images"].append(d["images"][0] | {"id": 1}), r"two images have the file_name '0+100.jpg'"),
    "annotation twice": (lambda d: at(d, id=1001), r"two annotations have the id 1001; each must be the only one"),
    "category twice": (lambda d: d["categories"][0].update(id=3), r"two categories have the id 3"),
    "name twice": (lambda d: d["categories"][0].update(name="car"), r"two categories have the name 'car'"),
    "no categories": (lambda d: d["categories"].clear(), r"'categories' is empty"),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["strict", "skip"])
@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_faults_of_cocos_file(data, tmp_path, fault, policy):
    break_it, message = FILE_FAULTS[fault]
    path = coco_tree(tmp_path / "coco", data)
    data = copy.deepcopy(data)
    break_it(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ShardError, match=message):
        coco(str(tmp_path / "coco"), str(tmp_path / "out"), "train2017", policy=policy)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "{", '{"images": [}', "[1]", "\xff"])
def test_what_is_no_json(data, tmp_path, text):
    path = coco_tree(tmp_path / "coco", data)
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ShardError, match=r"instances_train2017.json (is no JSON|has no list)"):
        coco(str(tmp_path / "coco"), str(tmp_path / "out"), "train2017")


FIRST = "000000000100.jpg"
IMAGE_FAULTS = {
    "category": (lambda d: at(d, category_id=4), r"annotation 1000 has the category 4, which is not among"),
    "bbox of three": (lambda d: at(d, bbox=[1, 2, 3]), r"annotation 1000 has the bbox \[1, 2, 3\]; wanted x, y, width"),
    "negative width": (lambda d: at(d, bbox=[1, 2, -3, 4]), r"annotation 1000 has the bbox \[1, 2, -3, 4\]"),
    "nan": (lambda d: at(d, bbox=[1, float("nan"), 3, 4]), r"annotation 1000 has the bbox"),
    "area": (lambda d: at(d, area=-1), r"annotation 1000 has the area -1"),
    "iscrowd": (lambda d: at(d, iscrowd=2), r"annotation 1000 has iscrowd 2; allowed: 0, 1"),
    "no polygon": (lambda d: at(d, segmentation=[]), r"annotation 1000 has a segmentation of no polygons"),
    "two points": (lambda d: at(d, segmentation=[[1, 2, 3, 4]]), r"annotation 1000 has a segmentation of no polygons"),
    "odd": (lambda d: at(d, segmentation=[[1, 2, 3, 4, 5, 6, 7]]), r"annotation 1000 has a segmentation of no polygons"),
    "text": (lambda d: at(d, segmentation=["abcdef"]), r"annotation 1000 has a segmentation of no polygons"),
    "rle size": (lambda d: at(d, segmentation={"size": [60, 40], "counts": [2400]}), r"size \[60, 40\], the image is \[40, 60\]"),
    "rle short": (lambda d: at(d, segmentation={"size": [40, 60], "counts": [9]}), r"annotation 1000 has a run length whose runs"),
    "rle text": (lambda d: at(d, segmentation={"size": [40, 60], "counts": "Qk"}), r"annotation 1000 has a run length whose runs"),
    "rle none": (lambda d: at(d, segmentation={"size": [40, 60]}), r"annotation 1000 has a run length whose runs"),
    "image size": (lambda d: d["images"][0].update(width=61), r"100.jpg is 60 x 40, its annotations say 61 x 40"),
}  # fmt: skip


@pytest.mark.parametrize("fault", IMAGE_FAULTS)
def test_faults_of_cocos_images(data, tmp_path, fault, caplog):
    break_it, message = IMAGE_FAULTS[fault]
    path = coco_tree(tmp_path / "coco", data)
    data = copy.deepcopy(data)
    break_it(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ShardError, match=rf"{FIRST}.*{message}|{message}"):
        coco(str(tmp_path / "coco"), str(tmp_path / "strict"), "train2017")
    coco(str(tmp_path / "coco"), str(tmp_path / "skip"), "train2017", policy="skip")
    assert len(samples_of(tmp_path / "skip", "train2017")) == 4
    assert any(re.search(f"wrong annotations, left out: 1 .*{FIRST}", line) for line in caplog.messages)


def test_missing_and_unlisted_files(data, tmp_path, caplog):
    coco_tree(tmp_path / "coco", data)
    (tmp_path / "coco/train2017" / FIRST).rename(tmp_path / "coco/train2017/other.jpg")
    with pytest.raises(ShardError, match=rf"1 of 5 images of .*json are missing from .*train2017: {FIRST}"):
        coco(str(tmp_path / "coco"), str(tmp_path / "out"), "train2017")
    coco(str(tmp_path / "coco"), str(tmp_path / "out"), "train2017", policy="skip")
    text = "\n".join(caplog.messages)
    assert f"images that are missing, left out: 1 ('{FIRST}')" in text
    assert "files that instances_train2017.json does not list, left out: 1 ('other.jpg')" in text
    assert "images without annotations, kept, but not trained on: 1 " in text


def test_annotations_of_images_that_are_not_there(data, tmp_path, caplog):
    data["annotations"][0]["image_id"] = 5
    coco_tree(tmp_path / "coco", data)
    with pytest.raises(ShardError, match=r"annotation 1000 is of image 5, which is not among its images"):
        coco(str(tmp_path / "coco"), str(tmp_path / "out"), "train2017")
    coco(str(tmp_path / "coco"), str(tmp_path / "out"), "train2017", policy="skip")
    assert len(samples_of(tmp_path / "out", "train2017")) == 5
    assert any("annotations of images that are not listed, left out: 1 ('1000')" in line for line in caplog.messages)


def test_folders_that_are_not_coco(data, tmp_path):
    root = tmp_path / "top" / "coco"
    coco_tree(root, data)
    for src, message in (
        (tmp_path / "x", r"no folder .*x; give --src the folder that holds train2017 and annotations"),
        (tmp_path / "top", r"there is .*coco/train2017: give --src .*coco"),
        (root / "train2017", r"give --src .*coco, the folder above"),
        (root / "annotations", r"no folder .*train2017; .* has no folder"),
    ):
        with pytest.raises(ShardError, match=message):
            coco(str(src), str(tmp_path / "out"), "train2017")
    with pytest.raises(ValueError, match="lies inside the images' folder"):
        coco(str(root), str(root / "train2017" / "shards"), "train2017")
    clear(root / "train2017")
    with pytest.raises(ShardError, match="train2017 holds no image"):
        coco(str(root), str(tmp_path / "out"), "train2017")


def test_an_image_with_more_than_readers_take(data, tmp_path, monkeypatch):
    coco_tree(tmp_path / "coco", data)
    monkeypatch.setitem(LARGEST, "json", 300)
    with pytest.raises(ShardError, match=r"its 5 annotations take \d+ bytes, at most 300 are read"):
        coco(str(tmp_path / "coco"), str(tmp_path / "out"), "train2017", shuffle=False)


# ---- embedded scenes ------------------------------------------------------------------------------------------


def test_demo_scenes_agree(tmp_path):
    """The same scenes for both tasks: boxes and masks against label maps."""
    demo_dense(str(tmp_path), train=12, validation=3)
    maps, found = samples_of(tmp_path / "segmentation", "training"), samples_of(tmp_path / "detection", "training")
    shapes = set()
    for key, sample in found.items():
        said = json.loads(sample["json"])
        height, width = said["height"], said["width"]
        shapes.add((height, width))
        window = slice((96 - height) // 2, (96 + height) // 2), slice((96 - width) // 2, (96 + width) // 2)
        whole = np.asarray(Image.open(io.BytesIO(maps[key]["png"])))
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(sample["png"]))), whole[window])
        drawn = np.zeros((height, width), np.uint8)
        for one in said["annotations"]:
            mask = run_length.decode(one["rle"])
            drawn += mask * np.uint8(one["label"] + 1)
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            box = [columns[0], rows[0], columns[-1] - columns[0] + 1, rows[-1] - rows[0] + 1]
            assert one["bbox"] == box and one["area"] == mask.sum() and one["iscrowd"] == (mask.sum() < 100)
        np.testing.assert_array_equal(drawn, np.asarray(Image.open(io.BytesIO(maps[key]["mask.png"])))[window])
    assert shapes == {(96, 96), (72, 96), (96, 72)}
