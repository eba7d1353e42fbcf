"""Tars as users have them: joined, repeated, packed, in folders, behind links; nothing of them is lost unsaid."""

import bz2
import gzip
import io
import json
import logging
import lzma
import tarfile

import numpy as np
import pytest
from PIL import Image

from datamodules import ImageNetDataModule, prepare
from datamodules.samples import Labels, ShardError
from datamodules.shard_index import index_shard
from datamodules.shards import ShardSet
from datamodules.split_checks import check_images


def png(value=0):
    file = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


def tar(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as out:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
    return path


def samples(keys, label=0):
    """Their images have the label's colour."""
    return [m for key in keys for m in ((f"{key}.png", png(label)), (f"{key}.cls", str(label).encode()))]


def read(folder, pattern="*.tar", **kwargs):
    """Key, label, and the image's colour of each sample."""
    data = ImageNetDataModule(
        str(folder), val_shards=pattern, batch_size=4, num_workers=0, resize=16, crop=16, **kwargs
    )
    return [
        (key, label, int(image[0, 0, 0]))
        for b in data.val_dataloader()
        for key, label, image in zip(b["key"], b["label"].tolist(), b["image"], strict=True)
    ]


def said(caplog):
    return "\n".join(record.getMessage() for record in caplog.records)


def test_joined_tars_are_read_whole(tmp_path, caplog):
    """With the same names in both, too."""
    first, second = tar(tmp_path / "a", samples("xy", 1)), tar(tmp_path / "b", samples("xz", 2))
    (tmp_path / "val.tar").write_bytes(first.read_bytes() + second.read_bytes())
    assert read(tmp_path) == [("x", 1, 1), ("y", 1, 1), ("x", 2, 2), ("z", 2, 2)]
    assert "joined tars, of which other readers see the first alone: 1 ('val.tar: val.tar')" in said(caplog)


def test_a_name_that_stands_twice(tmp_path, caplog):
    tar(tmp_path / "val.tar", samples("xy", 1) + samples("xz", 2))
    assert read(tmp_path) == [("x", 1, 1), ("y", 1, 1), ("x", 2, 2), ("z", 2, 2)]
    assert "samples that share their key with another in the shard: 2 ('val.tar: x', 'val.tar: x')" in said(caplog)
    tar(tmp_path / "val.tar", [("x.jpg", b"1"), ("x.JPG", b"2"), ("x.cls", b"3")])
    with pytest.raises(ShardError, match=r"val\.tar: 1 keys stand several times .*'x': cls\+jpg, jpg.*key of its own"):
        read(tmp_path)


def test_members_that_do_not_follow_each_other_stay_together(tmp_path):
    pairs = samples("xyz", 3)
    tar(tmp_path / "val.tar", pairs[::2] + pairs[1::2])
    assert read(tmp_path) == [(key, 3, 3) for key in "xyz"]


def test_keys_of_two_shards(tmp_path, caplog):
    tar(tmp_path / "v-0.tar", samples("ab", 0)), tar(tmp_path / "v-1.tar", samples("bc", 1))
    assert len(read(tmp_path)) == 4
    assert "samples with the key of one in an earlier shard: 1 ('v-1.tar: b')" in said(caplog)
    caplog.clear()
    read(tmp_path)
    assert not said(caplog)  # counted once


def test_what_is_left_out_is_named_and_counted(tmp_path, caplog):
    members = [
        ("a.png", png()), ("a.cls", b"1"), ("a.depth.png", png()), ("a.json", b"{}"), ("._a.png", b"x"),
        ("__MACOSX/b.jpg", b"x"), *[(f"{i}.tif", b"x") for i in range(5)], ("c.png", png()), ("d.cls", b"1"),
        ("e.jpg", png()), ("e.png", png()), ("e.cls", b"0"),
    ]  # fmt: skip
    tar(tmp_path / "val.tar", members)
    caplog.set_level(logging.WARNING)
    assert [key for key, *_ in read(tmp_path, policy="skip")] == ["a", "e"]
    for line in (
        "members whose endings say nothing here, left out: 5 ('val.tar: 0.tif', 'val.tar: 1.tif', 'val.tar: 2.tif', …)",
        "hidden or system files, left out: 2 ('val.tar: ._a.png', 'val.tar: __MACOSX/b.jpg')",
        "members that are neither image nor mask of their sample, left out: 1 ('val.tar: a.depth')",
        "samples without an image: 1 ('val.tar: d')",
        "samples without a class, where others of the shard have one: 1 ('val.tar: c')",
        "samples with several images, of which the first of jpg, jpeg, png, webp is read: 1 ('val.tar: e')",
    ):
        assert line in said(caplog), line


PACKED = {"gz": (gzip.compress, "gzip"), "bz2": (bz2.compress, "bzip2"), "xz": (lzma.compress, "xz")}


@pytest.mark.parametrize("kind", PACKED)
def test_compressed_shards_are_called_so(tmp_path, kind):
    pack, name = PACKED[kind]
    data = pack(tar(tmp_path / "x", samples("ab")).read_bytes())
    (tmp_path / f"val-0.tar.{kind}").write_bytes(data)
    with pytest.raises(ShardError, match=rf"holds compressed tars: val-0\.tar\.{kind}\); decompress"):
        read(tmp_path, "val-*.tar")
    with pytest.raises(ShardError, match=rf"are compressed \(1: val-0\.tar\.{kind}\).*decompress"):
        read(tmp_path, "val-*.tar*")
    (tmp_path / "val-0.tar").write_bytes(data)
    with pytest.raises(ShardError, match=rf"val-0\.tar is compressed by {name}"):
        read(tmp_path, "val-*.tar")


NO_TARS = {
    "a zip": (b"PK\3\4" + bytes(600), "is a zip file"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a pointer of Git LFS"),
    "a web page": (b"\n<!DOCTYPE html><html>" + b" " * 600, "is a web page"),
    "nothing": (b"", r"no whole tar \(empty file\)"),
    "noise": (b"\1" * 2000, "no whole tar"),
}


@pytest.mark.parametrize("what", NO_TARS)
def test_what_is_no_tar_is_called_by_its_name(tmp_path, what):
    data, words = NO_TARS[what]
    (tmp_path / "val.tar").write_bytes(data)
    with pytest.raises(ShardError, match=rf"val\.tar {'is ' if 'no whole' in words else ''}{words}"):
        read(tmp_path)


def test_damage_inside_is_no_end(tmp_path, caplog):
    """tarfile takes a header that it cannot read for the end, and a cut between two members for one as well."""
    path = tar(tmp_path / "val.tar", samples("abc"))
    with tarfile.open(path) as whole:
        offset = whole.getmembers()[2].offset
    data = path.read_bytes()
    path.write_bytes(data[:offset] + b"\xff" * 512 + data[offset + 512 :])
    with pytest.raises(ShardError, match=rf"no whole tar \(from byte {offset} of \d+ on it is damaged"):
        read(tmp_path)
    path.write_bytes(data[:offset])
    assert len(read(tmp_path)) == 1 and "tars without an end mark, maybe cut off" in said(caplog)


def test_links_to_nowhere_and_folders(tmp_path):
    (tmp_path / "val.tar").symlink_to(tmp_path / "gone")
    with pytest.raises(ShardError, match=r"val\.tar is a link to nowhere"):
        read(tmp_path)
    (tmp_path / "val.tar").unlink()
    (tmp_path / "val.tar").mkdir()
    with pytest.raises(ShardError, match=r"val\.tar is a folder"):
        read(tmp_path)


def test_shards_in_folders(tmp_path):
    """Of the same name, one behind a link, and a link back."""
    tar(tmp_path / "real/a/0.tar", samples("x", 1)), tar(tmp_path / "root/b/0.tar", samples("y", 2))
    (tmp_path / "root/a").symlink_to(tmp_path / "real/a")
    (tmp_path / "real/a/loop").symlink_to(tmp_path / "root")
    root = tmp_path / "root"
    with pytest.raises(
        ShardError, match=r"val_shards='\*\.tar' \(folders below it hold 2 that do: a/0\.tar, b/0\.tar\); set .*\*\*/"
    ):
        read(root)
    both = [("x", 1, 1), ("y", 2, 2)]
    assert read(root, "**/*.tar") == read(root, "*/*.tar") == read(root, "{a,b}/0.tar") == both
    assert sorted(json.loads((root / ".shard_counts.json").read_text())) == ["a/0.tar", "b/0.tar"]
    prepare.index(str(root), "val", "**/*.tar")
    info = json.loads((root / "_info.json").read_text())["splits"]["val"]
    assert info["filenames"] == ["a/0.tar", "b/0.tar"] and info["shard_lengths"] == [1, 1]
    assert info["labels"] == {"samples": 2, "labelled": 2, "lowest": 1, "highest": 2}
    assert read(root, "**/*.tar") == both and read(root, "b/*.tar") == both[1:]
    (tmp_path / "real/a/0.tar").unlink()
    with pytest.raises(
        ShardError, match=r"missing from .*, the first: a/0\.tar; .*b/0\.tar has its name: correct _info"
    ):
        read(root, "**/*.tar")


@pytest.mark.parametrize("pattern", ["val/*.tar", "../{root}/val/{{0..0}}.tar", "{path}/val/0.tar", "**/*.tar"])
def test_an_index_in_a_split_s_own_folder(tmp_path, pattern):
    tar(tmp_path / "val/0.tar", samples("xy"))
    prepare.index(str(tmp_path / "val"), "val", "*.tar")
    (tmp_path / "val/classes.json").write_text('["a"]')
    found = ShardSet.find(tmp_path, pattern.format(root=tmp_path.name, path=tmp_path), "val_shards")
    assert found.lengths.tolist() == [2] and found.labels == Labels(2, 2, 0, 0) and found.classes == ["a"]
    assert not (tmp_path / ".shard_counts.json").exists()


def test_a_mac_s_shadow_of_a_shard_is_none(tmp_path):
    tar(tmp_path / "val-0.tar", samples("x"))
    (tmp_path / "._val-0.tar").write_bytes(b"Mac OS X")
    assert [key for key, *_ in read(tmp_path)] == ["x"]


def test_only_images(tmp_path):
    (tmp_path / "a.JPG").write_bytes(png())
    with pytest.raises(ShardError, match=r"holds no tar, but images: a\.JPG\); write shards .*--unlabelled true"):
        read(tmp_path)


def test_a_dotted_key_of_its_own_stays(tmp_path):
    path = tar(tmp_path / "val.tar", samples(["x", "x.1"]))
    assert [sample.key for sample in index_shard(path)] == ["x", "x.1"]


def members_of(kinds, count=4):
    return [(f"{i:03d}.{kind}", b"0" if kind.endswith("cls") else png(i)) for i in range(count) for kind in kinds]


SEVERAL = {
    "two": ["rgb.png", "depth.png"],
    "with a side file": ["rgb.png", "depth.png", "json"],
    "with a class": ["rgb.png", "depth.png", "cls"],
    "image and label": ["image.png", "label.cls"],
}


@pytest.mark.parametrize("what", SEVERAL)
def test_several_images_a_sample_are_refused(tmp_path, what):
    tar(tmp_path / "val.tar", members_of(SEVERAL[what]))
    names = " and ".join(sorted({kind.partition(".")[0] for kind in SEVERAL[what] if "." in kind}))
    words = (
        rf"val\.tar: 4 samples have several members .* image, {names.replace(' and ', ', ')} .*the image as 000\.png"
    )
    with pytest.raises(ShardError, match=words):
        read(tmp_path)
    extra = members_of(["other.png"], 1) + members_of(["rgb.png"], 6)[4:]
    tar(tmp_path / "val.tar", members_of(SEVERAL[what]) + extra)  # not all alike
    with pytest.raises(ShardError, match="samples have several members"):
        read(tmp_path)


OWN = {
    "frames": [f"clip{i}.{frame:03d}" for i in range(3) for frame in range(3)],
    "names": ["john.smith", "john.doe", "jane.roe", "jane.poe", "jane.moe", "x.y"],
    "one stem": ["photo.left", "photo.right"],
}


@pytest.mark.parametrize("what", OWN)
def test_dotted_names_are_samples_of_their_own(tmp_path, what):
    if what == "names":
        OWN[what] += [f"a{i}.{i}{word}" for i in range(9) for word in ("b", "c")]
    path = tar(tmp_path / "val.tar", [(f"{key}.png", png()) for key in OWN[what]])
    assert [sample.key for sample in index_shard(path)] == OWN[what]
    labelled = tar(tmp_path / "labelled.tar", samples([f"{i}.{side}" for i in range(3) for side in ("left", "right")]))
    assert len(index_shard(labelled)) == 6


def test_members_beside_images_are_no_samples(tmp_path, caplog):
    """With classes or without; where a few have one, it is an image of its own."""
    tar(tmp_path / "val.tar", members_of(["png", "seg.png"]))
    assert len(ShardSet.find(tmp_path, "val.tar", "s")) == 4
    assert "members that are neither image nor mask of their sample, left out: 4 ('val.tar: 000.seg'" in said(caplog)
    path = tar(tmp_path / "few.tar", [*members_of(["png"]), ("000.edited.png", png())])
    assert len(index_shard(path)) == 5


NOTHING = {
    "tars": (
        [("n01440764.tar", b"x"), ("n01443537.tar", b"x")],
        r"hold no sample: val\.tar holds 2 members, 2 of \.tar .*ILSVRC",
    ),
    "bmp": (
        [("0.bmp", b"x"), ("0.cls", b"0")],
        r"hold 1 samples, none of which has an image: .*1 of \.bmp, 1 of \.cls",
    ),
    "nothing": ([], "hold no sample: they are empty"),
}


@pytest.mark.parametrize("what", NOTHING)
def test_shards_without_images_say_what_they_hold(tmp_path, what):
    members, words = NOTHING[what]
    tar(tmp_path / "val.tar", members)
    for _ in range(2):  # scanned, then remembered
        with pytest.raises(ShardError, match=words):
            ShardSet.find(tmp_path, "val.tar", "val_shards")
    tar(tmp_path / "val-1.tar", samples("ab"))
    assert len(ShardSet.find(tmp_path, "val*.tar", "val_shards")) == 2 + (what == "bmp")


def test_some_samples_without_an_image_are_known_before_the_first_step(tmp_path):
    tar(tmp_path / "val.tar", [*samples("ab"), ("c.cls", b"0")])
    source = ShardSet.find(tmp_path, "val.tar", "val_shards")
    with pytest.raises(ValueError, match=r"val\.tar\): 1 of 3 samples without an image .*policy=skip"):
        check_images(source, "val_shards", True)
    check_images(source, "val_shards", False)


def test_a_class_that_is_no_number_is_none_where_none_is_needed(tmp_path):
    tar(tmp_path / "train.tar", [("a.png", png()), ("a.cls", b"cat"), ("b.png", png()), ("b.cls", b"3")])
    data = ImageNetDataModule(str(tmp_path), "train.tar", None, batch_size=2, num_workers=0, resize=16, crop=16)
    (batch,) = data.predict_dataloader()
    assert batch["label"].tolist() == [-1, 3]
