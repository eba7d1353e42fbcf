"""Which shards a pattern means where a folder holds several splits, and what splits may be called."""

import json
from glob import escape

import pytest

from datamodules.prepare import index, write_split
from datamodules.samples import ShardError
from datamodules.shards import ShardSet


def samples(count):
    return [{"__key__": str(i), "png": b"x", "cls": b"0"} for i in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """train has two shards, train-noisy, train2 and val one each."""
    out = tmp_path_factory.mktemp("splits[1]")
    write_split(out, "train", samples(4), 2)
    for split, count in (("train-noisy", 3), ("train2", 5), ("val", 6)):
        write_split(out, split, samples(count), 100)
    return out


REFUSED = {
    "train-*.tar": r"train \(2\), train-noisy \(1\); .*'train-{000000\.\.000001}\.tar' for train alone, or "
    r"'{train-{000000\.\.000001}\.tar,train-noisy-000000\.tar}' for all",
    "train*.tar": r"train \(2\), train-noisy \(1\), train2 \(1\)",
    "{train,val}*.tar": r"train \(2\), train-noisy \(1\), train2 \(1\), val \(1\)",
    "*-000000.tar": r"train \(1\), train-noisy \(1\)",
    "../{folder}/train-*.tar": r"train \(2\), train-noisy \(1\)",
    "{path}/train-*.tar": r"train \(2\), train-noisy \(1\)",
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_a_pattern_that_mixes_splits_is_refused(folder, pattern):
    pattern_here = pattern.replace("{folder}", escape(folder.name)).replace("{path}", escape(str(folder)))
    with pytest.raises(ShardError, match=f"takes shards of several splits, .*: {REFUSED[pattern]}"):
        ShardSet.find(folder, pattern_here, "train_shards")


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("train-[0-9]*.tar", 4), ("train-00000{0,1}.tar", 4), ("train-{000000..000001}.tar", 4), ("train-noisy-*.tar", 3),
        ("{train,train-noisy}-*.tar", 7), ("{train-{000000..000001}.tar,train-noisy-000000.tar}", 7), ("train2-*.tar", 5),
        ("{train2,val}-*.tar", 11), ("{val-*,train2-*}.tar", 11), ("v*.tar", 6), ("{v*,train2*}.tar", 11),
    ],
)  # fmt: skip
def test_a_pattern_that_names_its_splits_is_taken(folder, pattern, count, caplog):
    assert len(ShardSet.find(folder, pattern, "train_shards")) == count and not caplog.text


def test_all_tars_are_taken_with_a_word(folder, caplog):
    for pattern in ("*.tar", "**/*.tar"):
        caplog.clear()
        assert len(ShardSet.find(folder, pattern, "train_shards")) == 18
        assert (
            "takes the shards of several splits together: train (2), train-noisy (1), train2 (1), val (1)"
            in caplog.text
        )


def test_a_split_of_them_all_is_one(tmp_path):
    """Shards may belong to several; and those that nobody lists have no say."""
    write_split(tmp_path, "train", samples(4), 2), write_split(tmp_path, "val", samples(3), 2)
    with pytest.raises(ShardError, match=r"--pattern='\[tv\]\*\.tar' takes shards of several splits"):
        index(str(tmp_path), "trainval", "[tv]*.tar")
    index(str(tmp_path), "trainval", "{train,val}-*.tar")
    assert len(ShardSet.find(tmp_path, "[tv]*.tar", "s")) == 7 and len(ShardSet.find(tmp_path, "train-*.tar", "s")) == 4
    (tmp_path / "train-000002.tar").write_bytes((tmp_path / "train-000000.tar").read_bytes())
    assert len(ShardSet.find(tmp_path, "train-*.tar", "s")) == 6


@pytest.mark.parametrize(
    "name",
    ["", "tr[a]in", "train/x", "../train", "train*", "a?", "{a,b}", ".train", "-train", "a b", "a\nb", "a\\b", "~a"],
)
def test_names_that_shards_cannot_have(tmp_path, name):
    out = tmp_path / "out"
    with pytest.raises(ShardError, match=r"is no name for a split: .*letters, digits, _, - and \."):
        write_split(out, name, samples(1), 10)
    assert not out.exists()
    write_split(out, "train", samples(1), 10)
    with pytest.raises(ShardError, match="is no name for a split"):
        index(str(out), name, "train-*.tar")
    assert list(json.loads((out / "_info.json").read_text())["splits"]) == ["train"]


@pytest.mark.parametrize("name", ["train", "val_2.0", "Trainieren\u00fc", "2017", "_x", "a-b"])
def test_names_that_shards_can_have(tmp_path, name):
    write_split(tmp_path, name, samples(3), 2)
    assert len(ShardSet.find(tmp_path, f"{name}-*.tar", "s")) == 3
