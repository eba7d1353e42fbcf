"""Shards from ADE20K's published folders: what they hold, and each fault by its name."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from datamodules import ADE20KDataModule
from datamodules.prepare import ade20k
from datamodules.samples import ShardError
from tests.datamodules.published_layouts import ade20k_tree, clear, object_info, samples_of, save_jpg, save_map


@pytest.fixture
def ade(tmp_path):
    return ade20k_tree(tmp_path / "ADEChallengeData2016")


def test_ade20k_keeps_the_bytes(ade, tmp_path):
    names = [f"thing {i}, object {i}" for i in range(150)]
    object_info(ade, names)
    out = tmp_path / "out"
    ade20k(str(ade), str(out), samples_per_shard=2)
    assert len(list(out.glob("training-*.tar"))) == 3 and len(list(out.glob("validation-*.tar"))) == 2
    for split, count in (("training", 5), ("validation", 3)):
        samples = samples_of(out, split)
        assert len(samples) == count
        for key, sample in samples.items():
            assert sample["jpg"] == (ade / "images" / split / f"{key}.jpg").read_bytes()
            assert sample["mask.png"] == (ade / "annotations" / split / f"{key}.png").read_bytes()
    assert json.loads((out / "classes.json").read_text()) == names
    assert list(samples_of(out, "validation")) == [f"ADE_val_{i + 1:08d}" for i in range(3)]
    assert list(samples_of(out, "training")) != sorted(samples_of(out, "training"))  # published by scene, so mixed


def test_ade20k_in_batches(ade, tmp_path):
    """What is read of the shards is what was published, 0 for none and k for class k - 1."""
    ade20k(str(ade), str(tmp_path / "out"), samples_per_shard=2)
    data = ADE20KDataModule(str(tmp_path / "out"), size=16, resize=(64, 16), batch_size=2, num_workers=0)
    assert sum(len(batch["key"]) for batch in data.train_dataloader()) == 4
    seen = []
    for batch in data.val_dataloader():
        for key, target in zip(batch["key"], batch["target"], strict=True):
            ids = np.asarray(Image.open(ade / "annotations/validation" / f"{key}.png")).astype(int)
            np.testing.assert_array_equal(target, np.where(ids == 0, 255, ids - 1))
            seen.append(key)
    assert seen == [f"ADE_val_{i + 1:08d}" for i in range(3)]


def test_ade20k_without_names_has_no_list_of_classes(ade, tmp_path):
    ade20k(str(ade), str(tmp_path / "out"), shuffle=False)
    assert not (tmp_path / "out" / "classes.json").exists()
    assert list(samples_of(tmp_path / "out", "training")) == [f"ADE_train_{i + 1:08d}" for i in range(5)]


def image(root, number=2):
    return root / "images/training" / f"ADE_train_{number:08d}.jpg"


def notes(root, number=2):
    return root / "annotations/training" / f"ADE_train_{number:08d}.png"


def change_map(root, kind):
    size = Image.open(notes(root)).size
    rng = np.random.default_rng(0)
    if kind == "16":
        Image.fromarray(rng.integers(0, 150, size[::-1], dtype=np.uint16)).save(notes(root))
    elif kind == "rgb":
        Image.fromarray(rng.integers(0, 150, (*size[::-1], 3), dtype=np.uint8)).save(notes(root))
    elif kind == "size":
        save_map(notes(root), (size[0] + 1, size[1]))
    elif kind == "beyond":
        save_map(notes(root), size, highest=151)
    elif kind == "cut":
        notes(root).write_bytes(notes(root).read_bytes()[:100])
    elif kind == "jpeg":
        save_jpg(notes(root).with_suffix(".jpg"), size)
        notes(root).with_suffix(".jpg").rename(notes(root))


SAMPLE_FAULTS = {
    "annotation missing": (lambda r: notes(r).unlink(), r"1 of 5 training images without an annotation: ADE_train_0+2"),
    "image missing": (lambda r: image(r).unlink(), r"1 of 5 training annotations without an image: ADE_train_0+2.png"),
    "size": (lambda r: change_map(r, "size"), r"annotation .*2.png is 32 x 26, its image .*2.jpg is 31 x 26"),
    "16 bits": (lambda r: change_map(r, "16"), r"annotation .*2.png has 16 bits; wanted ADEChallengeData2016's"),
    "rgb": (lambda r: change_map(r, "rgb"), r"annotation .*2.png is RGB, as in the full ADE20K release"),
    "beyond": (lambda r: change_map(r, "beyond"), r"annotation .*2.png holds 151; classes are 1 to 150, and 0 and 255"),
    "cut": (lambda r: change_map(r, "cut"), r"annotation .*2.png cannot be read"),
    "jpeg": (lambda r: change_map(r, "jpeg"), r"annotation .*2.png is no PNG"),
    "empty image": (lambda r: image(r).write_bytes(b""), r"2.jpg is empty, 0 bytes"),
    "damaged image": (lambda r: image(r).write_bytes(image(r).read_bytes()[:200]), r"2.jpg cannot be read as JPEG"),
    "no image": (lambda r: image(r).write_bytes(b"<html>not found</html>"), r"2.jpg is "),
}


@pytest.mark.parametrize("fault", SAMPLE_FAULTS)
def test_faults_of_ade20k(ade, tmp_path, fault, caplog):
    break_it, message = SAMPLE_FAULTS[fault]
    break_it(ade)
    with pytest.raises(ShardError, match=message):
        ade20k(str(ade), str(tmp_path / "strict"))
    ade20k(str(ade), str(tmp_path / "skip"), policy="skip")
    assert sorted(samples_of(tmp_path / "skip", "training")) == [f"ADE_train_{i:08d}" for i in (1, 3, 4, 5)]
    assert any("left out: 1 " in line and "ADE_train_00000002" in line for line in caplog.messages)


def move_full(root):
    shutil.move(root / "images", root / "ADE")
    (root / "images").mkdir()
    shutil.move(root / "ADE", root / "images" / "ADE")


FOLDER_FAULTS = {
    "above": (lambda r: r.parent, r"give --src .*ADEChallengeData2016$"),
    "below": (lambda r: r / "images", r"has no images/training.*; give --src .*ADEChallengeData2016, the folder above"),
    "nowhere": (lambda r: r / "x", r"no folder .*x; give --src the folder ADEChallengeData2016"),
    "full release": (lambda r: move_full(r) or r, r"has no images/training, no images/validation; it is the full ADE20K"),
    "no validation": (lambda r: shutil.rmtree(r / "images/validation") or r, r"has no images/validation; it has annota"),
    "empty": (lambda r: clear(r / "annotations/validation") or r, r"annotations/validation holds no .png file"),
    "names": (lambda r: (r / "objectInfo150.txt").write_text("wall\nfloor\n") and r, r"objectInfo150.txt is no table"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FOLDER_FAULTS)
def test_folders_that_are_not_ade20k(ade, tmp_path, fault):
    change, message = FOLDER_FAULTS[fault]
    with pytest.raises(ShardError, match=message):
        ade20k(str(change(ade)), str(tmp_path / "out"), policy="skip")
    assert not (tmp_path / "out").exists()


def test_two_files_of_one_name(ade, tmp_path):
    save_jpg(image(ade).with_suffix(".jpeg"), (30, 24))
    with pytest.raises(ShardError, match=r"two files of .* are called ADE_train_00000002"):
        ade20k(str(ade), str(tmp_path / "out"))
    with pytest.raises(ShardError, match=r"--policy='maybe'; allowed: strict, skip"):
        ade20k(str(ade), str(tmp_path / "out"), policy="maybe")
