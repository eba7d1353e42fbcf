"""Images with boxes and masks on their way to batches, against pycocotools' masks and brute force."""

import json
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO

from datamodules import COCODataModule, Position, WindowRule
from datamodules.detection_transforms import DetectionEvaluation, DetectionTraining
from datamodules.prepare import coco, demo_dense
from datamodules.sample_seed import SampleKey
from datamodules.samples import ShardError
from datamodules.shards import ShardSet
from metrics import DetectionAP
from tests.datamodules.published_layouts import coco_data, coco_tree, crowd
from tests.datamodules.test_shards import FakeTrainer

RNG = np.random.default_rng(7)
SIZES = [(int(w), int(h)) for w, h in RNG.integers(40, 110, (29, 2))] + [(70, 30), (31, 64), (32, 33)]
COUNTS = [int(n) for n in RNG.integers(0, 4, 29)] + [2, 3, 1]
KEPT = sum(count > 0 and min(size) >= 32 for size, count in zip(SIZES, COUNTS, strict=True))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The file of 32 images, of which some have no annotation, crowds, or a side below 32."""
    root = tmp_path_factory.mktemp("published")
    data = coco_data(SIZES, COUNTS)
    first = data["annotations"][0]
    number = first["image_id"]
    size = next((one["width"], one["height"]) for one in data["images"] if one["id"] == number)
    data["annotations"] += [
        crowd(5000, number, size),
        first | {"id": 5001, "area": 0.0},
        first | {"id": 5002, "bbox": [3.0, 4.0, 0.9, 9.5]},
        first | {"id": 5003, "bbox": [float(size[0]), 4.0, 8.0, 9.5]},
        first | {"id": 5004, "bbox": [-9.0, 4.0, 9.0, 9.5]},
        first | {"id": 5005, "bbox": [-9.0, -4.0, 200.0, 200.0]},
    ]
    return coco_tree(root, data)


@pytest.fixture(scope="module")
def reference(published):
    return COCO(str(published))


@pytest.fixture(scope="module")
def folder(published, tmp_path_factory):
    out = tmp_path_factory.mktemp("shards")
    for split in ("train2017", "val2017"):
        if split == "val2017":
            published.parents[1].joinpath("train2017").rename(published.parents[1] / split)
        coco(str(published.parents[1]), str(out), split, str(published), samples_per_shard=5)
    return out


def module(folder, **given):
    settings = {"resize": (160, 96), "batch_size": 4, "num_workers": 0, "seed": 3, "shuffle_window": 8} | given
    return COCODataModule(str(folder), **settings)


def raws(folder):
    source = ShardSet.find(folder, "val2017-*.tar", "val_shards")
    reader = source.reader()
    return [reader.read(i, ("jpg", "json")) for i in range(len(source))]


def nearest(mask, size):
    """Every target pixel takes the source pixel at its corner."""
    rows = np.arange(size[1]) * mask.shape[0] // size[1]
    columns = np.arange(size[0]) * mask.shape[1] // size[0]
    return mask[rows][:, columns]


def trained_on(row, size):
    """The rule in mmdetection's own words."""
    x, y, w, h = row["bbox"]
    inter_w = max(0, min(x + w, size[0]) - max(x, 0))
    inter_h = max(0, min(y + h, size[1]) - max(y, 0))
    return inter_w * inter_h != 0 and row["area"] > 0 and w >= 1 and h >= 1 and not row["iscrowd"]


# ---- samples --------------------------------------------------------------------------------------------------


def test_training_samples_against_pycocotools(folder, reference):
    transform, labels = DetectionTraining((160, 96), flip=0.0), {3: 0, 7: 1, 18: 2}
    dropped = 0
    for number, raw in enumerate(raws(folder)):
        sample = transform(raw, SampleKey(0, 0, number), {})
        image = reference.loadImgs(sample["image_id"])[0]
        size = image["width"], image["height"]
        scale = min(160 / max(size), 96 / min(size))
        new = int(size[0] * scale + 0.5), int(size[1] * scale + 0.5)
        assert sample["image"].shape == (new[1], new[0], 3) and sample["valid"].tolist() == [new[1], new[0]]
        assert sample["original"].tolist() == [size[1], size[0]]
        rows = reference.loadAnns(reference.getAnnIds(image["id"]))
        wanted = [row for row in rows if trained_on(row, size)]
        dropped += len(rows) - len(wanted)
        assert sample["labels"].tolist() == [labels[row["category_id"]] for row in wanted]
        assert sample["boxes"].shape == (len(wanted), 4) and sample["boxes"].dtype == np.float32
        assert sample["masks"].shape == (len(wanted), new[1], new[0])
        for box, mask, row in zip(sample["boxes"], sample["masks"], wanted, strict=True):
            x, y, w, h = row["bbox"]
            corners = [
                x * new[0] / size[0],
                y * new[1] / size[1],
                (x + w) * new[0] / size[0],
                (y + h) * new[1] / size[1],
            ]
            np.testing.assert_allclose(box, np.clip(corners, 0, [*new, *new]), atol=1e-4)
            np.testing.assert_array_equal(mask, nearest(reference.annToMask(row), new))
    assert dropped == 5  # a crowd, area 0, below a pixel, right of the image, left of it; the one that sticks out stays


def test_a_flip_turns_all_of_it(folder):
    for number, raw in enumerate(raws(folder)[:8]):
        key = SampleKey(0, 0, number)
        plain, flipped = (DetectionTraining((160, 96), flip=p)(raw, key, {}) for p in (0.0, 1.0))
        width = plain["valid"][1]
        np.testing.assert_array_equal(flipped["image"], plain["image"][:, ::-1])
        np.testing.assert_array_equal(flipped["masks"], plain["masks"][:, :, ::-1])
        np.testing.assert_allclose(flipped["boxes"][:, [0, 2]], width - plain["boxes"][:, [2, 0]])
        np.testing.assert_array_equal(flipped["boxes"][:, [1, 3]], plain["boxes"][:, [1, 3]])
        np.testing.assert_array_equal(flipped["labels"], plain["labels"])


def test_flips_and_scales_are_drawn_evenly(folder):
    raw = raws(folder)[0]
    whole = DetectionTraining((400, 96), scales=(40, 60, 80), flip=0.0)
    shorter, flips = [], 0
    for number in range(300):
        sample = whole(raw, SampleKey(1, 0, number), {})
        shorter.append(int(sample["valid"].min()))
        drawn = DetectionTraining((400, 96), scales=(40, 60, 80))(raw, SampleKey(1, 0, number), {})
        flips += not np.array_equal(drawn["image"], sample["image"])
    assert {*shorter} == {40, 60, 80} and min(shorter.count(side) for side in (40, 60, 80)) > 75
    assert 120 < flips < 180


def test_half_of_the_images_go_by_way_of_a_window(folder):
    raw = raws(folder)[0]
    transform = DetectionTraining((160, 96), window=WindowRule((80, 90), (30, 60)), flip=0.0)
    plain = DetectionTraining((160, 96), flip=0.0)(raw, SampleKey(0, 0, 0), {})
    whole = 0
    for number in range(200):
        sample = transform(raw, SampleKey(0, 0, number), {})
        height, width = sample["valid"]
        assert min(height, width) <= 96 and max(height, width) <= 160
        assert sample["masks"].shape[1:] == (height, width) and len(sample["masks"]) == len(sample["boxes"])
        boxes = sample["boxes"]
        assert (boxes >= 0).all() and (boxes[:, [0, 2]] <= width).all() and (boxes[:, [1, 3]] <= height).all()
        assert (boxes[:, 2:] > boxes[:, :2]).all()
        whole += np.array_equal(sample["image"], plain["image"])
    assert 75 < whole < 125


def test_evaluation_has_the_whole_truth(folder, reference):
    transform, seen = DetectionEvaluation((160, 96)), set()
    metric = DetectionAP(3)
    for number, raw in enumerate(raws(folder)):
        sample = transform(raw, SampleKey(0, 0, number), {})
        plain = DetectionTraining((160, 96), flip=0.0)(raw, SampleKey(0, 0, number), {})
        np.testing.assert_array_equal(sample["image"], plain["image"])
        truth, rows = sample["truth"], reference.loadAnns(reference.getAnnIds(sample["image_id"]))
        boxes = np.array([row["bbox"] for row in rows]).reshape(-1, 4)
        np.testing.assert_allclose(truth["boxes"], np.c_[boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], rtol=1e-6)
        assert truth["crowd"].tolist() == [bool(row["iscrowd"]) for row in rows]
        np.testing.assert_allclose(truth["areas"], [row["area"] for row in rows])
        seen.add(sample["image_id"])
        found = {name: truth[name] for name in ("boxes", "labels", "masks")}
        metric.update([sample["image_id"]], [found | {"scores": torch.ones(len(rows))}], [truth])
    assert seen == set(reference.getImgIds())
    result = metric.compute()  # the truth finds itself, as far as equal boxes do not stand in each other's way
    assert result["segm_AP"] == 1 and result["bbox_AP"] > 0.99


# ---- batches --------------------------------------------------------------------------------------------------


def ragged_equal(one, other):
    """Whether two batches are the same to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(ragged_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(ragged_equal(one[name], other[name]) for name in one)
    return one == other


def test_batches_are_padded_right_and_bottom(folder):
    data = module(folder)
    transform = data.splits["train"].transform
    for batch in data.train_dataloader():
        sides = batch["valid"].amax(0)
        assert list(batch["image"].shape) == [4, 3, *(-(-int(side) // 32) * 32 for side in sides)]
        ready = data.on_after_batch_transfer(batch, 0)
        assert ready["image"].dtype == torch.float32
        for i, (height, width) in enumerate(batch["valid"].tolist()):
            assert not ready["image"][i, :, height:].any() and not ready["image"][i, :, :, width:].any()
            shown = batch["image"][i, :, :height, :width]
            wanted = (shown / 255 - torch.tensor(data.mean)[:, None, None]) / torch.tensor(data.std)[:, None, None]
            torch.testing.assert_close(ready["image"][i, :, :height, :width], wanted, rtol=1e-4, atol=1e-5)
            masks = batch["masks"][i]
            assert masks.dtype == torch.uint8 and masks.shape == (len(batch["boxes"][i]), *batch["image"].shape[2:])
            assert not masks[:, height:].any() and not masks[:, :, width:].any()
            assert batch["labels"][i].dtype == torch.int64 and len(batch["labels"][i]) == len(masks)
            assert batch["boxes"][i].dtype == torch.float32
    empty = transform.empty()
    assert empty.keys() == {name for name in batch if name not in ("key", "shard", "skipped", "split")}
    assert empty["image"].shape == (0, 3, 32, 32)


def test_what_is_trained_on_is_known_before(folder):
    """Images without annotation, and small ones, are out of the plan: each batch is full, and each step is counted."""
    data = module(folder)
    loader, seen = data.train_dataloader(), []
    assert len(loader) == KEPT // 4 and KEPT < 32
    for batch in loader:
        assert len(batch["key"]) == 4 and not batch["skipped"]
        assert (batch["original"].amin(1) >= 32).all()
        seen += batch["image_id"].tolist()
    assert len(seen) == len(set(seen)) == KEPT // 4 * 4
    bare = {100 + 7 * i for i, count in enumerate(COUNTS) if not count}
    assert bare and not bare & set(seen)
    upright = [(batch["original"][:, 1] < batch["original"][:, 0]).tolist() for batch in loader]
    assert sum(len(set(batch)) > 1 for batch in upright) <= 1 and {sum(batch) for batch in upright} >= {0, 4}


@pytest.mark.parametrize("world", [1, 2, 3, 33])
def test_evaluation_sees_every_image_once(folder, world):
    """On 33 ranks one is without."""
    seen = []
    for rank in range(world):
        data = module(folder, batch_size=5 * world)
        data.position = Position(rank, world)
        for batch in data.val_dataloader():
            seen += batch["image_id"].tolist()
            ready = data.on_after_batch_transfer(batch, 0)
            assert len(ready["image"]) == len(ready["truth"]) == len(ready["valid"]) == len(ready["key"])
            assert ready["image"].dtype == torch.float32 and ready["image"].shape[1] == 3
    assert sorted(seen) == [100 + 7 * i for i in range(32)]


def test_any_number_of_workers_and_ranks_make_the_same_samples(folder):
    def batches(workers, rank=0, world=1):
        data = module(folder, num_workers=workers, window=WindowRule((80, 90), (30, 60)))
        data.position = Position(rank, world)
        return list(data.train_dataloader())

    alone = batches(0)
    assert ragged_equal(alone, batches(2))
    by_image = {
        n: boxes for batch in alone for n, boxes in zip(batch["image_id"].tolist(), batch["boxes"], strict=True)
    }
    shared = 0
    for rank in range(2):
        for batch in batches(0, rank, 2):
            for number, boxes in zip(batch["image_id"].tolist(), batch["boxes"], strict=True):
                if number in by_image:
                    shared += 1
                    assert torch.equal(boxes, by_image[number])
    assert shared > 10


@pytest.mark.parametrize("after", [1, 3])
def test_an_epoch_goes_on_where_it_was_cut_off(folder, after):
    whole = module(folder).train_dataloader()
    epochs = [list(whole), list(whole)]
    begun = module(folder).train_dataloader()
    list(begun)
    reader = iter(begun)
    for _ in range(after):
        next(reader)
    state = json.loads(json.dumps(begun.state_dict()))
    resumed = module(folder).train_dataloader()
    resumed.load_state_dict(state)
    assert ragged_equal(list(resumed), epochs[1][after:])


def test_an_epoch_goes_on_on_other_ranks(folder):
    data = module(folder)
    loader = data.train_dataloader()
    reader = iter(loader)
    seen = next(reader)["image_id"].tolist() + next(reader)["image_id"].tolist()
    for rank in range(2):
        data = module(folder)
        data.position = Position(rank, 2)
        resumed = data.train_dataloader()
        resumed.load_state_dict(loader.state_dict())
        rest = list(resumed)
        assert len(rest) == KEPT // 4 - 2
        seen += [number for batch in rest for number in batch["image_id"].tolist()]
    assert len(seen) == len(set(seen)) == KEPT // 4 * 4


def test_shards_that_are_fetched(folder, tmp_path):
    """What the plan needs comes from the index beside them."""
    remote = module(f"pipe:cat {folder}/{{name}}", cache_dir=str(tmp_path))
    for one, other in zip(module(folder).train_dataloader(), remote.train_dataloader(), strict=True):
        assert one["key"] == other["key"] and ragged_equal(one["boxes"], other["boxes"])


def edited(folder, tmp_path, change):
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / "_info.json"
    info = json.loads(path.read_text())
    change(info["splits"]["train2017"])
    path.write_text(json.dumps(info))
    return tmp_path / "copy"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda split: split.pop("sizes"), r"does not say of .*train2017-000000.tar how large its images are"),
        (
            lambda split: split["annotated"][1].pop(),
            r"has 5 sizes and 4 counts .*train2017-000001.tar, which holds 5 sam",
        ),
        (
            lambda split: split.update(annotated=[[0] * 5] * 6 + [[0, 0]]),
            r"train_shards='train2017-\*.tar': none of the 32",
        ),
    ],
)
def test_shards_that_do_not_say_what_the_plan_needs(folder, tmp_path, change, message):
    with pytest.raises(ShardError, match=message):
        module(edited(folder, tmp_path, change)).train_dataloader()


def test_a_folder_of_images_has_no_objects(published):
    with pytest.raises(ShardError, match=r"train_shards='val2017' is a folder of images, of whose objects nothing"):
        module(published.parents[1], train_shards="val2017").train_dataloader()


@pytest.mark.parametrize(("count", "fits"), [(2, False), (3, True), (80, True)])
def test_a_model_has_the_datas_classes(folder, count, fits):
    data = module(folder)
    data.trainer = FakeTrainer(0, 1)
    data.trainer.lightning_module.label_count = count
    with (
        nullcontext() if fits else pytest.raises(ValueError, match=r"name 3 classes, model.init_args.num_classes is 2")
    ):
        data.setup("fit")


def test_the_embedded_scenes_in_batches(tmp_path):
    """Boxes lie close around the masks, whatever was done to both."""
    demo_dense(str(tmp_path), train=40, validation=7, samples_per_shard=16)
    data = COCODataModule(
        str(tmp_path / "detection"), "training-*.tar", "validation-*.tar", (128, 96), batch_size=8, num_workers=0
    )
    shapes, count = set(), 0
    for batch in data.train_dataloader():
        shapes.add(tuple(batch["image"].shape[2:]))
        for boxes, masks in zip(batch["boxes"], batch["masks"], strict=True):
            for box, mask in zip(boxes, masks, strict=True):
                y, x = np.nonzero(mask.numpy())
                np.testing.assert_allclose(box, [x.min(), y.min(), x.max() + 1, y.max() + 1], atol=1.4)
                count += 1
    assert count > 60 and shapes >= {(96, 128), (128, 96)}
    assert len(data.class_names) == 10 and sum(len(b["key"]) for b in data.val_dataloader()) == 7
