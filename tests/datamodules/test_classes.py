"""One list of classes for all splits, however they are written."""

import json

import pytest
import torch
from PIL import Image

from datamodules import ImageNetDataModule
from datamodules.classes import read_classes
from datamodules.prepare import imagefolder, index, write_split
from datamodules.samples import ShardError
from datamodules.shards import ShardSet
from datamodules.split_checks import check_classes, check_labels
from tests.datamodules.test_shards import FakeTrainer


def tree(root, classes, images=2):
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(images):
            Image.new("RGB", (4, 4), (i, 0, 0)).save(root / name / f"{i}.png")
    return str(root)


def labels(out, split):
    """class folder -> number."""
    shards = ShardSet.find(out, f"{split}-*.tar", "shards")
    reader = shards.reader()
    found = {}
    for i in range(len(shards)):
        raw = reader.read(i, ("cls", "json"))
        found[json.loads(raw.fields["json"])["filename"].split("/")[0]] = raw.label()
    return found


def test_a_validation_split_that_lacks_a_class_keeps_the_numbers(tmp_path, caplog):
    caplog.set_level("INFO")
    out = tmp_path / "out"
    imagefolder(tree(tmp_path / "train", "abcd"), str(out), "train")
    imagefolder(tree(tmp_path / "val", "bd"), str(out), "val")
    assert labels(out, "train") == {"a": 0, "b": 1, "c": 2, "d": 3} and labels(out, "val") == {"b": 1, "d": 3}
    assert json.loads((out / "classes.json").read_text()) == ["a", "b", "c", "d"]
    said = [record.getMessage() for record in caplog.records]
    assert "val: 2 of 4 classes have images, 2 to 2 each" in said
    assert "val: classes without an image here, which keep their numbers: 2 ('a', 'c')" in said
    (tmp_path / "val/c").mkdir()  # an empty folder is a class without images
    imagefolder(str(tmp_path / "val"), str(tmp_path / "other"), "val", classes=str(out / "classes.json"))
    assert labels(tmp_path / "other", "val") == {"b": 1, "d": 3}


def test_a_class_that_the_list_lacks_is_named(tmp_path):
    out = tmp_path / "out"
    imagefolder(tree(tmp_path / "train", ["ant", "bee"]), str(out), "train")
    with pytest.raises(ShardError, match=r"1 of 2 class folders .* 'Bee'; 'Bee' is spelt unlike 'bee'"):
        imagefolder(tree(tmp_path / "val", ["ant", "Bee"]), str(out), "val")
    assert not list(out.glob("val*"))
    (tmp_path / "names.txt").write_text("bee\nant\n")
    with pytest.raises(ShardError, match=r"--classes .* differ: 2 classes and 2, and number 0 is 'ant' in the one and"):
        imagefolder(str(tmp_path / "train"), str(out), "val", classes=str(tmp_path / "names.txt"))
    imagefolder(str(tmp_path / "train"), str(out), "train", classes=str(tmp_path / "names.txt"), overwrite=True)
    assert labels(out, "train") == {"bee": 0, "ant": 1}  # the only split, written again


def test_a_folder_of_splits_without_a_list_takes_no_guess(tmp_path):
    write_split(tmp_path / "out", "train", [{"__key__": "0", "cls": b"0"}], 10)
    with pytest.raises(ShardError, match=r"has the splits train, but no classes\.json .*--classes"):
        imagefolder(tree(tmp_path / "val", "ab"), str(tmp_path / "out"), "val")


LISTS = {
    "list.json": '["b", "a"]',
    "object.json": '{"classes": ["b", "a"]}',
    "numbers.json": '{"a": 1, "b": 0}',
    "lines.txt": "\ufeffb\r\na\r\n\r\n",
    "id2label.json": '{"0": "b", "1": "a"}',
    "config.json": '{"model_type": "vit", "id2label": {"1": "a", "0": "b"}}',
    "imagenet_class_index.json": '{"0": ["b", "tench"], "1": ["a", "goldfish"]}',
    "data.json": '{"names": ["b", "a"]}',
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_as_people_have_them(tmp_path, name):
    (tmp_path / name).write_text(LISTS[name], encoding="utf-8", newline="")
    assert read_classes(tmp_path / name) == ["b", "a"]


def test_synset_lists(tmp_path):
    (tmp_path / "synset_words.txt").write_text("n01443537 goldfish, Carassius auratus\nn01440764 tench\n")
    assert read_classes(tmp_path / "synset_words.txt") == ["n01443537", "n01440764"]
    assert len(read_classes("imagenet")) == 1000


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "a\nb\na\n", "names 'a' twice"),
        ("a.txt", "a\n\nb", "an empty name"),
        ("a.json", "[1, 2]", "no JSON list of names"),
        ("a.json", '{"a": 0, "b": 2}', "no JSON list of names"),
        ("a.json", "a", "is no JSON"),
        ("b.txt", None, "cannot be read"),
        ("a.txt", "# my classes\na\nb", r"'# my classes' would be a class; .*take comments out"),
        ("a.txt", "a\nb\n// c", "'// c' would be a class"),
        ("a.txt", "Class\na\nb", "'Class', looks like a header"),
        ("a.csv", "name,id\na,0", r"is \.csv; wanted a text"),
        ("a.yaml", "a: 0\nb: 1", r"is \.yaml; wanted a text"),
        ("a.json", '{"0": "a", "2": "b"}', "nor the other way round"),
    ],
)
def test_lists_that_are_none(tmp_path, name, text, words):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ShardError, match=words):
        read_classes(tmp_path / name)


def test_splits_as_classes_and_images_beside_classes(tmp_path):
    src = tmp_path / "data"
    tree(src / "train", "ab"), tree(src / "val", "a")
    with pytest.raises(ShardError, match=r"train, val, are splits and no classes; take one of them"):
        imagefolder(str(src), str(tmp_path / "out"), "train")
    Image.new("RGB", (4, 4)).save(src / "train" / "loose.PNG")
    with pytest.raises(
        ShardError, match=r"have no class \(1: loose\.PNG\); move them into one, or .*--unlabelled true"
    ):
        imagefolder(str(src / "train"), str(tmp_path / "out"), "train")


def test_numbers_as_names_by_a_list(tmp_path):
    (tmp_path / "n.txt").write_text("\n".join(map(str, range(12))))
    src = tree(tmp_path / "src", map(str, range(12)), 1)
    imagefolder(src, str(tmp_path / "out"), "train", classes=str(tmp_path / "n.txt"))
    assert labels(tmp_path / "out", "train") == {str(i): i for i in range(12)}


def test_names_that_differ_in_case_alone_are_said(tmp_path, caplog):
    imagefolder(tree(tmp_path / "src", ["cat", "Cat"]), str(tmp_path / "out"), "train")
    assert "'Cat' and 'cat' are two classes, though their names are alike" in caplog.text


def shards(folder, split, values, classes=None):
    samples = [
        {"__key__": str(i), "png": b"x"} | ({} if v is None else {"cls": str(v).encode()}) for i, v in enumerate(values)
    ]
    write_split(folder, split, samples, 100, False, classes)
    return ShardSet.find(folder, f"{split}-*.tar", "train_shards")


def test_what_a_model_needs_is_known_before_it_starts(tmp_path):
    check_labels(shards(tmp_path / "a", "x", [0, 2, 1]), "train_shards", 3, True)
    one = shards(tmp_path / "b", "x", [1, 2, 3])
    with pytest.raises(ValueError, match=r"labels run from 1 to 3, model.init_args.num_classes is 3.* counted from 1"):
        check_labels(one, "train_shards", 3, True)
    check_labels(one, "train_shards", None, True)
    with pytest.raises(ValueError, match=r"labels run from -1 to 0"):
        check_labels(shards(tmp_path / "c", "x", [-1, 0]), "train_shards", 3, True)
    some = shards(tmp_path / "d", "x", [None, 0, None])
    with pytest.raises(ValueError, match=r"train_shards .*x-000000\.tar\): 2 of the 3 samples have no class"):
        check_labels(some, "train_shards", 3, True)
    check_labels(some, "train_shards", 3, False)
    with pytest.raises(ValueError, match=r"none of the 2 samples has a class .*prepare imagefolder"):
        check_labels(shards(tmp_path / "e", "x", [None, None]), "train_shards", 3, False)


def test_a_class_that_the_model_lacks_stops_at_its_batch(tmp_path):
    """Where nothing was known before, as of shards from elsewhere."""
    data = ImageNetDataModule(str(tmp_path), batch_size=4, num_workers=0)
    data.trainer = FakeTrainer(0, 1)
    data.trainer.lightning_module.label_count = 3
    batch = {"label": torch.tensor([0, 2, 3]), "key": ["a", "b", "c"], "shard": ["s", "s", "t"]}
    with pytest.raises(ValueError, match=r"sample 'c' in shard t: labels run from 0 to 3, .*num_classes is 3"):
        data.on_before_batch_transfer(batch, 0)
    data.trainer.lightning_module.label_count = 4
    assert data.on_before_batch_transfer(batch, 0) is batch
    assert data.on_before_batch_transfer([1], 0) == [1]


def test_foreign_shards_are_looked_into(tmp_path):
    """timm's own _info.json says nothing of classes: the first shard does. Without one, all are counted."""
    shards(tmp_path, "x", [4, 5])
    info = json.loads((tmp_path / "_info.json").read_text())
    del info["splits"]["x"]["labels"]
    (tmp_path / "_info.json").write_text(json.dumps(info))
    assert ShardSet.find(tmp_path, "x-*.tar", "s").labels == (2, 2, 4, 5, 0, None, 0)
    (tmp_path / "_info.json").unlink()
    for _ in range(2):  # counted, then kept
        assert ShardSet.find(tmp_path, "x-*.tar", "s").labels == (2, 2, 4, 5, 0, None, 0)


def test_lists_of_splits_are_compared(tmp_path):
    one, same = (shards(tmp_path / "a", split, [0, 1], ["x", "y"]) for split in ("train", "val"))
    other = shards(tmp_path / "b", "val", [0, 1], ["y", "x"])
    check_classes({"train_shards": one, "val_shards": same})
    with pytest.raises(
        ValueError, match=r"train_shards and data\.init_args\.val_shards differ: .* 'x' in the one and 'y'"
    ):
        check_classes({"train_shards": one, "val_shards": other})
    with pytest.raises(ShardError, match=r"has class 2; the list of classes ends at 1"):
        shards(tmp_path / "c", "train", [2], ["x", "y"])
    (tmp_path / "b/classes.json").write_text('["x"]')
    other = ShardSet.find(tmp_path / "b", "val-*.tar", "s")
    with pytest.raises(ValueError, match=r"the highest class is 1, classes\.json beside the shards names 1"):
        check_classes({"val_shards": other})


def test_index_keeps_a_list(tmp_path):
    shards(tmp_path, "x", [0, 1])
    (tmp_path / "names.txt").write_text("x\ny\n")
    index(str(tmp_path), "x", "x-*.tar", overwrite=True, classes=str(tmp_path / "names.txt"))
    assert ShardSet.find(tmp_path, "x-*.tar", "s").classes == ["x", "y"]


def test_more_classes_than_the_data_name_are_said(tmp_path, caplog):
    shards(tmp_path, "train", [0, 1], ["cat", "dog"])
    data = ImageNetDataModule(str(tmp_path), val_shards=None, batch_size=2, num_workers=0)
    data.trainer = FakeTrainer(0, 1)
    for count in (2, 1000):
        data.trainer.lightning_module.label_count = count
        data.setup("fit")
        assert ("num_classes is 1000; the data name 2 classes" in caplog.text) == (count == 1000)


LAYOUTS = {
    "COCO": (["train2017", "val2017"], "are splits and no classes; take one of them by --src"),
    "STL-10": (["train", "test", "unlabeled"], "are splits"),
    "words and years": (["dev", "Eval_2019", "test-images", "trainset"], "are splits"),
    "one split": (["validation"], "are splits"),
    "masks": (
        ["images", "masks"],
        "masks would become classes; masks are read by python -m datamodules.prepare imagenet_s",
    ),
    "VOC": (["Annotations", "JPEGImages", "SegmentationClass"], r"Annotations, SegmentationClass would become classes"),
    "boxes, by split": (["images", "labels", "train"], "labels would become classes"),
    "a table of labels": (["images"], "are no classes; pass --unlabelled true"),
}


@pytest.mark.parametrize("what", LAYOUTS)
def test_folders_that_are_no_classes(tmp_path, what):
    """A list that names them says that they are."""
    names, words = LAYOUTS[what]
    src, out = tree(tmp_path / "src", names, 1), str(tmp_path / "out")
    with pytest.raises(ShardError, match=words):
        imagefolder(src, out, "train")
    assert not (tmp_path / "out").exists()
    (tmp_path / "names.json").write_text(json.dumps(names))
    imagefolder(src, out, "train", classes=str(tmp_path / "names.json"))
    assert labels(tmp_path / "out", "train") == {name: number for number, name in enumerate(names)}


def test_a_split_s_name_among_classes_is_said(tmp_path, caplog):
    """COCO and CIFAR-100 have a class train."""
    names = ["bus", "train", "testing ground", "valve", "2017"]
    imagefolder(tree(tmp_path / "src", names), str(tmp_path / "out"), "train")
    assert "called like a split, or like what belongs to images, taken for classes: 1 ('train')" in caplog.text


def test_masks_that_are_read_as_images_are_said(tmp_path, caplog):
    src = tree(tmp_path / "src", ["images", "masks"], 1)
    imagefolder(src, str(tmp_path / "out"), "train", unlabelled=True)
    assert "images in folders of masks or the like, taken for images: 1 ('masks/0.png')" in caplog.text


def test_classes_that_are_no_numbers_are_known_before_the_first_step(tmp_path):
    def of(folder, values):
        samples = [{"__key__": str(i), "png": b"x", "cls": value} for i, value in enumerate(values)]
        write_split(tmp_path / folder, "x", samples, 100)
        (tmp_path / folder / "_info.json").unlink()
        return ShardSet.find(tmp_path / folder, "x-*.tar", "s")

    for number, value in enumerate([b"cat", b"0.0", b"1_0", "\u0663".encode(), b"", b"\0\0\0\0"]):
        source = of(f"s{number}", [b"1", value])
        assert source.labels == (2, 2, 1, 1, 1, repr(value), 0)
        with pytest.raises(ValueError, match=r"the class \(\.cls\) of 1 of the 2 samples is no number, .*imagefolder"):
            check_labels(source, "train_shards", 10, True)
        check_labels(source, "train_shards", 10, False)
        with pytest.raises(
            ShardError, match=r"sample '1' in shard .*: \.cls holds b.*write the shards anew with numbers"
        ):
            source.reader().read(1, ("cls",)).label()
    check_labels(of("good", [b"1", b" +2\n"]), "train_shards", 3, True)
    with pytest.raises(ValueError, match="of 2 of the 2 samples is no number"):
        check_labels(of("bad", [b"cat", b"dog"]), "train_shards", None, False)
