"""Images without classes, from a plain folder to predictions; and what needs classes says so before the first step."""

import json
import re
import warnings

import numpy as np
import pytest
from PIL import Image

from datamodules.prepare import imagefolder
from tests.tiny_runs import CONFIGS, run

RNG = np.random.default_rng(0)
UNLABELLED = ["-c", str(CONFIGS / "data/unlabelled.yaml")]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """18, two of them in a folder below."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "trip").mkdir()
    for i in range(18):
        image = Image.fromarray(RNG.integers(0, 256, (20, 24, 3), dtype=np.uint8))
        image.save(folder / ("trip" if i < 2 else ".") / f"IMG {i}.JPG")
    return folder


@pytest.fixture(scope="module")
def unlabelled(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("unlabelled")
    imagefolder(str(photos), str(out), "train", samples_per_shard=7, unlabelled=True)
    return out


def root(folder):
    return [*UNLABELLED, "--data.root", str(folder), "--data.num_workers", "0", "--trainer.max_epochs", "1"]


def predictions(folder):
    files = [np.load(path) for path in sorted((folder / "predictions").glob("*.npz"))]
    return {name: np.concatenate([file[name] for file in files]) for name in files[0].files}


def test_photos_as_readme_has_it(unlabelled, tmp_path):
    """Without a warning that no user can act upon."""
    extra = [
        "-c", str(CONFIGS / "task/dino_demo.yaml"), "-c", str(CONFIGS / "data/photos.yaml"), *root(unlabelled)[2:],
        "--data.val_shards", "null", "--data.batch_size", "8", "--data.multicrop.local_size", "32",
        "--model.out_dim", "32", "--data.crop", "32",
    ]  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run("fit", "dino", unlabelled, tmp_path, "vit", *extra)
        run("predict", "dino", unlabelled, tmp_path, "vit", *extra)
    assert not [one for one in said if re.search("Couldn't infer the batch|Total length of", str(one.message))]


@pytest.mark.parametrize("kind", ["shards", "a folder"])
def test_pretraining_and_prediction(kind, unlabelled, photos, tmp_path):
    where = root(unlabelled) if kind == "shards" else [*root(photos), "--data.train_shards", "."]
    folder = run("fit", "dino", unlabelled, tmp_path, "vit", *where)
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["last.ckpt"]  # nothing that a best could be told by
    run("predict", "dino", unlabelled, tmp_path, "vit", *where)
    found = predictions(folder)
    assert len(set(found["key"].tolist())) == 18 and set(found["label"].tolist()) == {-1}
    assert found["embedding"].shape[0] == 18 and "class_name" not in found


def test_a_labelled_validation_split_beside_it(unlabelled, shards, tmp_path):
    """k-NN is scored where classes are; predictions name them."""
    extra = [*root(unlabelled), "--data.val_shards", f"{shards}/validation-*.tar"]
    folder = run("fit", "dino", unlabelled, tmp_path, "vit", *extra)
    assert (folder / "checkpoints/best.ckpt").exists()
    run("predict", "dino", unlabelled, tmp_path, "vit", *extra)
    names, found = json.loads((shards / "classes.json").read_text()), predictions(folder)
    assert found["class_name"].tolist() == [names[i] for i in found["label"]]


def test_no_validation_shards(unlabelled, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("fit", "dino", unlabelled, tmp_path, "vit")
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "val_shards='validation-*.tar' (its tars: train-000000.tar" in last and "val_shards=null" in last


def test_unlabelled_validation_shows_maps_and_scores_nothing(unlabelled, tmp_path, capsys):
    extra = [*root(unlabelled), "--data.val_shards", "train-000001.tar"]
    folder = run("fit", "dino", unlabelled, tmp_path, "vit", *extra)
    assert (folder / "feature_maps.npz").exists() and not (folder / "checkpoints/best.ckpt").exists()


@pytest.mark.parametrize("task", ["linear_probe", "knn", "supervised"])
def test_what_needs_classes_says_so_at_the_start(task, unlabelled, tmp_path, capsys):
    command = "validate" if task == "knn" else "fit"
    with pytest.raises(SystemExit):
        run(command, task, unlabelled, tmp_path, "vit", *root(unlabelled), "--data.val_shards", "train-*.tar")
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "train-000000.tar" in last and "none of the 18 samples has a class (.cls)" in last and "dino.yaml" in last
    assert not (tmp_path / f"{task}-vit" / "checkpoints").exists()


@pytest.mark.parametrize("task", ["linear_probe", "supervised"])
def test_too_few_classes_are_known_at_the_start(task, shards, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("fit", task, shards, tmp_path, "vit", "--model.num_classes", "9")
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "labels run from 0 to 9, model.init_args.num_classes is 9, which allows 0 to 8" in last
    assert not (tmp_path / f"{task}-vit" / "checkpoints").exists()


def test_only_what_a_command_reads_must_be_there(shards, tmp_path):
    """Validation does not ask for the training set."""
    for path in shards.glob("validation-*.tar"):
        (tmp_path / path.name).symlink_to(path)
    extra = ["--data.train_shards", "train-*.tar", "--data.root", str(tmp_path)]
    assert run("validate", "dino", shards, tmp_path, "vit", *extra).is_dir()
