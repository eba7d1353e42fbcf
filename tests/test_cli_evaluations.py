"""Evaluations through the command line, from shards to results."""

import json

import numpy as np
import pytest
import torch

from datamodules import prepare
from lightning_modules import LinearProbe, Supervised
from tests.tiny_runs import BACKBONES, LARGE, read_results, run


@pytest.mark.parametrize("source", ["initialised", "pretrained"])
def test_linear_probe(source, shards, pretrained, tmp_path):
    extra = (
        ["--model.init_args.backbone_weights", str(pretrained / "checkpoints/last.ckpt")]
        if source == "pretrained"
        else []
    )
    folder = run("fit", "linear_probe", shards, tmp_path, "vim", *extra)
    rows = read_results(folder)["rows"]
    assert [r["head"] for r in rows] == ["n1_cls_lr1_wd0", "n2_cls+mean_lr1_wd0.0001", "n1_max_lr0.1_wd0"]
    for row in rows:
        assert 0 <= row["top1_last"] <= row["top1_best"] <= row["top5_best"] <= 1 and row["best_epoch"] in (
            0,
            1,
        )
    path = folder / "checkpoints/last.ckpt"
    torch.load(path, weights_only=True)
    module = LinearProbe.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    assert len(module.history) == 2
    if source == "pretrained":  # frozen: what was loaded is what was kept
        teacher = torch.load(pretrained / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for name, value in module.backbone.state_dict().items():
            assert torch.equal(value, teacher[f"teacher.backbone.{name}"])


def test_every_task_starts_from_the_same_backbone(shards, tmp_path):
    """What an evaluation calls untrained is what pretraining with the same seed starts from."""
    still = [f"--model.init_args.{key}=0" for key in ("lr", "min_lr", "weight_decay", "weight_decay_end")]
    pretrain = run("fit", "dino", shards, tmp_path, "vim", *still)
    probe = run("fit", "linear_probe", shards, tmp_path)
    before, untrained = (
        torch.load(f / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for f in (pretrain, probe)
    )
    for name, value in untrained.items():
        if name.startswith("backbone."):
            assert torch.equal(value, before[f"student.{name}"]), name


def test_knn(shards, tmp_path):
    folder = run("validate", "knn", shards, tmp_path)
    rows = read_results(folder)["rows"]
    assert [r["k"] for r in rows] == [5, 1] and rows[0]["bank"] == 24 and rows[0]["queries"] == 20


def test_each_way_and_both_readings(shards, tmp_path):
    """As the configuration names them, in tables with the same columns in every row."""
    ways = ["grid", "area", "mask", "pooled"]
    flags = [f"--model.init_args.compare=[{','.join(ways)}]", "--model.init_args.stream=both"]
    table = read_results(run("validate", "binary_auc", shards, tmp_path, "vim", *flags))
    rows, each = table["rows"], len(table["rows"]) // 4
    assert [row["compare"] for row in rows] == [way for way in ways for _ in range(each)]
    assert [row["map"] for row in rows[:each]] == [row["map"] for row in rows[-each:]]
    assert table["headline"]["val/auc_of_mean_normalized"] in [
        pytest.approx(row["auc_of_mean_normalized"]) for row in rows[:each] if row["kind"] == "similarity"
    ]
    table = read_results(run("validate", "knn", shards, tmp_path, "vim", "--model.init_args.stream=both"))
    assert [(r["k"], r["stream"]) for r in table["rows"]] == [
        (5, "residual"), (1, "residual"), (5, "branch"), (1, "branch"),
    ]  # fmt: skip
    assert table["headline"]["val/knn_top1"] == pytest.approx(table["rows"][0]["top1"])


@pytest.mark.parametrize("backbone", BACKBONES)
def test_binary_auc(backbone, shards, tmp_path):
    folder = run("validate", "binary_auc", shards, tmp_path, backbone, *(LARGE if backbone == "timm" else []))
    rows = read_results(folder)["rows"]
    names = [r["map"] for r in rows]
    depth = len({n.split("/")[0] for n in names if "/" in n})
    assert (
        names[-2:] == ["shuffled", "position"]
        and f"block{depth - 1}/similarity" in names
        and "block0/head0/mixing" in names
    )
    assert ("block0/register1/similarity" in names) == (backbone == "mambar")
    for row in rows:
        assert 0 <= row["auc"] <= 1 and row["images"] + row["skipped"] == 20
        assert row["auc_of_mean_normalized"] == pytest.approx(max(row["auc"], 1 - row["auc"]))


@pytest.mark.parametrize("backbone", ["mambar", "timm"])
def test_token_statistics(backbone, shards, tmp_path):
    folder = run("validate", "token_statistics", shards, tmp_path, backbone, *(LARGE if backbone == "timm" else []))
    rows = read_results(folder)["rows"]
    depth, heads = (2, 4) if backbone == "mambar" else (6, 2)
    norms = [(row["block"], row["reading"]) for row in rows if row["head"] is None]
    assert norms == [(block, reading) for block in range(depth) for reading in ("published", "other")]
    mixing = [(row["block"], row["head"]) for row in rows if row["head"] is not None]
    assert mixing == [(block, head) for block in range(depth) for head in range(heads)]
    for row in rows:
        assert row["background_share"] is None or 0 < row["background_share"] < 1
        assert row["distance"] is None or 0 < row["distance_of_diagonal"] < 1


@pytest.mark.parametrize("backbone", ["vim", "mambar", "vit", "linear_vit", "vim_mamba1"])
def test_ranks(backbone, shards, tmp_path):
    """Y = MX, and the bounds of algebra, on every block of every mixer: the decay's blocks have rank exactly 1."""
    folder = run("validate", "ranks", shards, tmp_path, backbone)
    rows = read_results(folder)["rows"]
    arrays = np.load(folder / "results.npz")
    scan = backbone not in ("vit", "linear_vit")
    directions = ["forward", "backward", "both"] if scan else ["attention"]
    assert [(r["block"], r["direction"]) for r in rows] == [(b, d) for b in range(2) for d in directions]
    inner = {"vit": None, "linear_vit": 8}.get(backbone, 4)
    for row in rows:
        assert row["residual_max"] < 1e-10 and row["bound_holds"] and row["inner_size"] == inner
        assert row["matrices"] == 20 * {"vit": 2, "linear_vit": 2, "vim_mamba1": 24}.get(backbone, 4)
        assert 1 <= row["effective_rank_mean"] <= row["rank_max"] <= row["rank_bound"]
        assert row["block_rank_max"] <= row["block_rank_bound"] == min(6, inner or 6)
        one_decay = backbone in ("vim", "mambar") and row["direction"] != "both"
        assert row["decay_block_rank_max"] == (1 if one_decay else None)
        name = f"block{row['block']}/{row['direction']}"
        matrix, spectrum = arrays[f"matrix/{name}"], arrays[f"spectrum/{name}"]
        assert matrix.shape[-2:] == (row["tokens"],) * 2 and spectrum[0] == pytest.approx(1)
        assert (np.diff(spectrum) <= 1e-12).all()


def test_ranks_refuse_models_that_do_not_come_apart(shards, tmp_path):
    with pytest.raises(SystemExit):
        run("validate", "ranks", shards, tmp_path, "timm")


def test_test_command(shards, tmp_path):
    assert read_results(run("test", "binary_auc", shards, tmp_path))["rows"]


def test_predict(shards, tmp_path):
    folder = run("predict", "binary_auc", shards, tmp_path)
    files = sorted((folder / "predictions").glob("*.npz"))
    parts = [np.load(f) for f in files]
    assert sum(len(p["key"]) for p in parts) == 20 == len({k for p in parts for k in p["key"]})
    for part in parts:
        n = len(part["key"])
        maps = [name for name in part if name.startswith("maps/")]
        assert part["embedding"].shape == (n, 16) and len(maps) == 2 * (2 + 4)
        assert all(part[name].shape == (n, 4, 4) for name in maps)


def test_skipped_samples_are_counted(shards, tmp_path):
    from tests.datamodules.test_shards import retar

    broken = tmp_path / "broken"
    broken.mkdir()
    for path in shards.glob("*"):
        (broken / path.name).write_bytes(path.read_bytes())
    name = "validation-000000.tar"
    retar(shards / name, broken / name, lambda member, data: data[:30] if member == "00000003.png" else data)
    with pytest.raises(SystemExit):
        run("validate", "knn", broken, tmp_path)
    folder = run("validate", "knn", broken, tmp_path, "vim", "--data.init_args.policy", "skip")
    assert read_results(folder)["rows"][0]["queries"] == 19
    records = [json.loads(p.read_text()) for p in folder.glob("run*.json")]
    assert 1 in [r.get("skipped_samples") for r in records]


def test_wrong_number_of_classes(shards, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("fit", "linear_probe", shards, tmp_path, "vim", "--model.init_args.num_classes", "5")
    assert "num_classes" in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_trained_probe_on_robustness_sets(shards, tmp_path):
    """Probe and backbone come from the probe's checkpoint; the sets from folders, A's answer among its classes."""
    probe = run("fit", "linear_probe", shards, tmp_path) / "checkpoints/last.ckpt"
    prepare.demo_robustness(str(tmp_path / "sets"), per_class=2)
    names = f"{tmp_path}/sets/classes.txt"
    sets = (
        f"{{v2: {{path: v2-a}}, a: {{path: a, classes: [0, 3, 5, 8], synsets: {names}}}, "
        f"real: {{path: real, labels: {tmp_path}/sets/real.json, synsets: {names}}}}}"
    )
    (tmp_path / "sets.yaml").write_text(f"data: {{init_args: {{sets: {sets}}}}}")
    extra = ["--data.init_args.root", str(tmp_path / "sets"), "-c", str(tmp_path / "sets.yaml")]
    folder = run("validate", "robustness", shards, tmp_path, "vim", *extra, "--model.init_args.probe", str(probe))
    table = read_results(folder)
    assert [(r["set"], r["images"], r["classes"]) for r in table["rows"]] == [
        ("v2", 20, "all"), ("a", 8, 4), ("real", 16, "all"),
    ]  # fmt: skip
    assert all(0 <= r["top1"] <= 1 and r["head"].startswith("n") for r in table["rows"])
    assert table["weights"] == f"{probe} (lightning)" and table["complete"]


def test_supervised_training_feeds_evaluations(shards, tmp_path):
    folder = run("fit", "supervised", shards, tmp_path)
    path = folder / "checkpoints/last.ckpt"
    trained = torch.load(path, weights_only=True)["state_dict"]
    knn = run("validate", "knn", shards, tmp_path, "vim", "--model.init_args.backbone_weights", str(path))
    assert read_results(knn)["weights"] == f"{path} (lightning)"
    module = Supervised.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    assert all(torch.equal(v, trained[f"backbone.{k}"]) for k, v in module.backbone.state_dict().items())


def test_pictures_are_kept_with_their_maps(shards, tmp_path):
    folder = run("validate", "binary_auc", shards, tmp_path, "mambar", "--model.init_args.pictures", "11")
    kept = np.load(folder / "results.npz")
    assert kept["images"].shape == (11, 16, 16, 3) and kept["masks"].shape == (11, 16, 16)
    assert kept["patches"].shape == (11, 16, 4, 4) and len(set(kept["keys"].tolist())) == 11
    predicted = run("predict", "binary_auc", shards, tmp_path, "mambar") / "predictions"
    parts = [np.load(f) for f in sorted(predicted.glob("*.npz"))]
    names = [name.removeprefix("maps/") for name in parts[0] if name.startswith("maps/")]
    assert kept["map_names"].tolist() == [*names, "shuffled", "position"] and kept["maps/shuffled"].shape == (11, 4, 4)
    for name in names:
        maps = np.concatenate([p[f"maps/{name}"] for p in parts])[:11]
        np.testing.assert_allclose(kept[f"maps/{name}"], maps, atol=1e-5)
    with np.load(run("validate", "ranks", shards, tmp_path, "mambar") / "results.npz") as ranks:
        assert not any(name in ranks for name in ("images", "masks"))


@pytest.mark.parametrize("task", ["linear_probe", "supervised"])
def test_a_trained_classifier_says_what_it_sees(task, shards, tmp_path):
    """In the names of the data that it learned from; the share that is right is its validation's top-1."""
    folder = run("fit", task, shards, tmp_path)
    table = read_results(folder)
    best = max(row["top1_last"] for row in table["rows"]) if task == "linear_probe" else table["rows"][-1]["top1"]
    (tmp_path / "out").mkdir()
    out = run("predict", task, shards, tmp_path / "out", "vim", "--ckpt_path", str(folder / "checkpoints/last.ckpt"))
    files = [np.load(path) for path in sorted((out / "predictions").glob("*.npz"))]
    found = {key: np.concatenate([file[key] for file in files]) for key in files[0].files}
    assert (found["predicted"] == found["logits"].argmax(1)).all() and len(found["key"]) == 20
    assert (found["predicted"] == found["label"]).mean() == pytest.approx(best)
    assert (found["predicted_name"][found["predicted"] == found["label"]]
            == found["class_name"][found["predicted"] == found["label"]]).all()  # fmt: skip
    assert {*found["predicted_name"]} <= {*table["classes"]}
    if task == "linear_probe":  # trained on weights: its checkpoint holds them
        weights = ["--model.init_args.backbone_weights", str(folder / "checkpoints/last.ckpt")]
        (tmp_path / "of").mkdir()
        run("fit", task, shards, tmp_path / "of", "vim", *weights)
        for command in ("predict", "validate"):
            again = run(command, task, shards, tmp_path / "of", "vim", "--ckpt_path", "last")
        assert read_results(again)["weights"].startswith(str(folder / "checkpoints/last.ckpt"))
    (tmp_path / "bare").mkdir()
    bare = run("predict", task, shards, tmp_path / "bare")  # nothing was learned: embeddings alone
    assert "predicted" not in np.load(next((bare / "predictions").glob("*.npz"))).files


def test_a_run_cut_short_does_not_replace_complete_results(shards, tmp_path):
    folder = run("fit", "linear_probe", shards, tmp_path)
    whole = (folder / "results.json").read_text()
    table = json.loads(whole)
    assert table["complete"] and not list(folder.glob("results.partial*")) and table["rows"][0]["images"] == 20
    assert table["counts"]["backbone_passes_per_training_image"] == 1 and table["counts"]["heads"] == 3
    for cut in (["--trainer.limit_val_batches", "1"], ["--trainer.max_epochs", "4", "--trainer.max_steps", "3"]):
        run("fit", "linear_probe", shards, tmp_path, "vim", *cut)
        assert (folder / "results.json").read_text() == whole
        assert json.loads((folder / "results.partial.json").read_text())["complete"] is False
    run("fit", "linear_probe", shards, tmp_path)
    assert not list(folder.glob("results.partial*"))


FEATURES = ("--data.init_args.view", "features")


def test_features_encoded_once_for_all_epochs(shards, tmp_path):
    """Without augmentation: what a probe learns from them is validated alike from the images."""
    (tmp_path / "images").mkdir()
    folder = run("fit", "linear_probe", shards, tmp_path, "vim", *FEATURES)
    table = read_results(folder)
    trained = table["counts"]["training_images"]
    assert trained == 2 * 24 and table["counts"]["backbone_passes_per_training_image"] == (24 + 20) / trained
    path = folder / "checkpoints/last.ckpt"
    again = run("validate", "linear_probe", shards, tmp_path / "images", "vim", "--ckpt_path", str(path))
    for row, other in zip(table["rows"], read_results(again)["rows"], strict=True):
        assert row["images"] == other["images"] == 20
        assert (row["top1_last"], row["top5_last"]) == pytest.approx((other["top1_last"], other["top5_last"]), abs=1e-9)


def test_features_of_a_model_that_encodes_none(shards, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("fit", "dino", shards, tmp_path, "vim", *FEATURES)
    assert "error: data.init_args.view=features: DINO reads multicrop" in capsys.readouterr().err


SWIN = """
model:
  init_args:
    backbone:
      class_path: backbones.TimmModel
      init_args: {name: swin_tiny_patch4_window7_224, img_size: 64, pretrained: false, drop_path: 0.0}
"""


def test_a_pyramid_of_timm(shards, tmp_path):
    """Stages of unequal widths under one head, and of unequal grids under one AUC."""
    (tmp_path / "swin.yaml").write_text(SWIN)
    size = [f"--data.init_args.{key}=64" for key in ("resize", "crop")]
    overlay = ["-c", str(tmp_path / "swin.yaml"), *size]
    heads = "[{n_last_blocks: 2, pooling: cls+max, lr: 0.1}, {n_last_blocks: 1, pooling: mean, lr: 0.1}]"
    probe = ["--data.init_args.probe_size=64", f"--model.init_args.heads={heads}", "--trainer.max_epochs=1"]
    table = read_results(run("fit", "linear_probe", shards, tmp_path, "vit", *overlay, *probe))
    assert [row["parameters"] for row in table["rows"]] == [10 * (2 * (384 + 768) + 1), 10 * 769]
    folder = run("validate", "binary_auc", shards, tmp_path, "vit", *overlay, "--model.init_args.pictures=2")
    rows = read_results(folder)["rows"]
    assert [row["map"] for row in rows] == [f"block{i}/similarity" for i in range(4)] + ["shuffled", "position"]
    assert all(row["images"] + row["skipped"] == 20 for row in rows)
    with np.load(folder / "results.npz") as kept:
        assert [kept[f"maps/block{i}/similarity"].shape[1:] for i in range(4)] == [(16, 16), (8, 8), (4, 4), (2, 2)]
        assert kept["maps/shuffled"].shape == (2, 2, 2)
    with pytest.raises(SystemExit):
        run("validate", "binary_auc", shards, tmp_path, "vit", *overlay, "--model.init_args.maps=[mixing]")


@pytest.mark.parametrize(("name", "same", "other"), [("vim", "branch", "residual"), ("vit", "residual", "branch")])
def test_what_is_published_is_one_of_the_streams(name, same, other, shards, tmp_path):
    """Vim's branch, ViT's residual stream: the same scores; the other stream gives others. k-NN and probe follow."""

    def scores(task, verb, stream):
        folder = tmp_path / f"{task}-{stream}"
        folder.mkdir()
        rows = read_results(run(verb, task, shards, folder, name, f"--model.init_args.stream={stream}"))["rows"]
        key = {"binary_auc": "auc", "linear_probe": "top1_last", "knn": "top1"}[task]
        return [row[key] for row in rows if row.get("kind", "similarity") == "similarity"]

    auc = {stream: scores("binary_auc", "validate", stream) for stream in ("published", same, other)}
    assert auc["published"] == auc[same] != auc[other]
    assert scores("linear_probe", "fit", "published") == scores("linear_probe", "fit", same)
    assert scores("knn", "validate", "published") == scores("knn", "validate", "residual")
