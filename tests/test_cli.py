"""Tiny runs through the command line, from shards to results, and what they leave behind."""

import csv
import importlib.metadata
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import cli
from backbones import VisionMamba, weights
from datamodules import prepare
from lightning_modules import DINO, KNN, BinaryAUCEvaluation, LinearProbe

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"

TINY = """
data:
  init_args:
    root: {root}
    num_workers: 0
    batch_size: 8
    resize: 16
    crop: 16
trainer:
  accelerator: cpu
  max_epochs: 2
  log_every_n_steps: 1
"""
BACKBONES = {
    "vim": "VisionMamba, init_args: {img_size: 16, patch_size: 4, embed_dim: 16, depth: 2, d_state: 4, headdim: 8}",
    "mambar": "MambaReg, init_args: {img_size: 16, patch_size: 4, embed_dim: 16, depth: 2, d_state: 4, headdim: 8, num_registers: 2}",
    "vit": "VisionTransformer, init_args: {img_size: 16, patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}",
    "linear_vit": "LinearVisionTransformer, init_args: {img_size: 16, patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}",
    "timm": "TimmModel, init_args: {name: test_vit, img_size: 32}",
}
MAMBA1 = "SupervisedVim, init_args: {img_size: 16, patch_size: 4, embed_dim: 16, depth: 2, d_state: 4}"
EXTRA = {
    "dino": """
data: {init_args: {multicrop: {global_size: 16, local_size: 8, num_local: 2}}}
model: {init_args: {out_dim: 16, hidden_dim: 8, bottleneck_dim: 4, warmup_epochs: 0, warmup_teacher_temp_epochs: 0, knn_k: 5}}
""",
    "linear_probe": """
data: {init_args: {probe_size: 16}}
model:
  init_args:
    num_classes: 10
    heads:
      - {n_last_blocks: 1, pooling: cls, lr: 1.0}
      - {n_last_blocks: 2, pooling: cls+mean, lr: 1.0, weight_decay: 1e-4}
      - {n_last_blocks: 1, pooling: max, lr: 0.1}
""",
    "knn": "model: {init_args: {num_classes: 10, k: [5, 1]}}",
    "binary_auc": "model: {init_args: {blocks: all}}",
    "ranks": "model: {init_args: {chunk: 6}}",
}
# its patches are 16 pixels
LARGE = ["--data.init_args.resize", "32", "--data.init_args.crop", "32"]
LARGE_CROPS = ["--data.init_args.multicrop.global_size", "32", "--data.init_args.multicrop.local_size", "16"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    prepare.demo(str(out), train=24, validation=20, samples_per_shard=9)
    return out


def run(command, task, shards, out, backbone="vim", *extra):
    tiny = out / f"{task}-{backbone}.yaml"
    tiny.write_text(TINY.format(root=shards))
    (out / f"{task}-extra.yaml").write_text(EXTRA[task])
    (out / f"{backbone}.yaml").write_text(
        f"model: {{init_args: {{backbone: {{class_path: backbones.{(BACKBONES | {'vim_mamba1': MAMBA1})[backbone]}}}}}}}"
    )
    data = "demo_s" if task == "binary_auc" else "demo"
    files = [
        CONFIGS / "base.yaml",
        CONFIGS / f"task/{task}.yaml",
        CONFIGS / f"data/{data}.yaml",
        out / f"{backbone}.yaml",
        tiny,
        out / f"{task}-extra.yaml",
    ]
    args = [a for f in files for a in ("-c", str(f))]
    cli.main(
        [
            command,
            *args,
            "--trainer.logger.init_args.save_dir",
            str(out),
            "--trainer.logger.init_args.name",
            f"{task}-{backbone}",
            *extra,
        ]
    )
    return out / f"{task}-{backbone}"


@pytest.fixture(scope="module")
def pretrained(shards, tmp_path_factory):
    return run("fit", "dino", shards, tmp_path_factory.mktemp("runs"))


def test_pretraining_leaves_a_record(pretrained, shards):
    record = json.loads((pretrained / "run.json").read_text())
    assert record["world_size"] == 1 and record["global_batch_size"] == 8 and record["seconds"] > 0
    assert [Path(s).name for s in record["shards"]] == sorted(p.name for p in shards.glob("*.tar"))
    assert record["versions"]["torch"] == importlib.metadata.version("torch")
    config = yaml.safe_load((pretrained / "config.yaml").read_text())
    assert config["model"]["init_args"]["out_dim"] == 16
    maps = np.load(pretrained / "feature_maps.npz")
    assert (
        maps["images"].shape == (8, 16, 16, 3)
        and maps["maps"].shape == (8, 4, 4)
        and maps["masks"].shape == (8, 16, 16)
    )


def test_checkpoint_reloads_without_yaml_and_without_code(pretrained, tmp_path):
    path = pretrained / "checkpoints/last.ckpt"
    content = torch.load(path, weights_only=True, map_location="cpu")
    module = DINO.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    assert isinstance(module.backbone, VisionMamba) and module.hparams.out_dim == 16
    for name, value in module.state_dict().items():
        assert torch.equal(value, content["state_dict"][name])
    weights.export(module.backbone, tmp_path / "teacher.pth")
    other = VisionMamba(img_size=16, patch_size=4, embed_dim=16, depth=2, d_state=4, headdim=8)
    weights.load(other, tmp_path / "teacher.pth")
    for name, value in other.state_dict().items():
        assert torch.equal(value, module.backbone.state_dict()[name])
    assert weights.load(other, path) == "lightning"
    assert torch.equal(other.cls_token, module.teacher.backbone.cls_token)
    weights.load(other, path, key="student")
    assert torch.equal(other.cls_token, module.student.backbone.cls_token)


def test_checkpoint_holds_what_a_resume_needs(pretrained, shards):
    content = torch.load(pretrained / "checkpoints/last.ckpt", weights_only=True, map_location="cpu")
    assert content["global_step"] == 6 and content["state_dict"]["loss.center"].any()
    before = {k: v.clone() for k, v in content["state_dict"].items()}
    folder = run(
        "fit",
        "dino",
        shards,
        pretrained.parent,
        "vim",
        "--ckpt_path",
        str(pretrained / "checkpoints/last.ckpt"),
        "--trainer.max_epochs",
        "3",
    )
    after = torch.load(folder / "checkpoints/last.ckpt", weights_only=True, map_location="cpu")
    assert after["global_step"] == 9
    assert not torch.equal(after["state_dict"]["loss.center"], before["loss.center"])
    assert (folder / "config-2.yaml").is_file()  # another max_epochs: kept beside the first, nothing overwritten


@pytest.mark.parametrize("backbone", [b for b in BACKBONES if b != "vim"])
def test_dino_on_every_family(backbone, shards, tmp_path):
    extra = [*LARGE, *LARGE_CROPS] if backbone == "timm" else []
    folder = run("fit", "dino", shards, tmp_path, backbone, "--trainer.max_epochs", "1", *extra)
    assert (folder / "checkpoints/last.ckpt").is_file()


def read_results(folder):
    table = json.loads((folder / "results.json").read_text())
    with open(folder / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert [r.keys() for r in rows] == [{k: 0 for k in r}.keys() for r in table["rows"]]
    for a, b in zip(rows, table["rows"], strict=True):
        assert a == {k: "" if v is None else str(v) for k, v in b.items()}
    return table


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


@pytest.mark.parametrize("backbone", BACKBONES)
def test_binary_auc(backbone, shards, tmp_path):
    folder = run("validate", "binary_auc", shards, tmp_path, backbone, *(LARGE if backbone == "timm" else []))
    rows = read_results(folder)["rows"]
    names = [r["map"] for r in rows]
    depth = len({n.split("/")[0] for n in names if n != "shuffled"})
    assert names[-1] == "shuffled" and f"block{depth - 1}/similarity" in names and "block0/head0/mixing" in names
    assert ("block0/register1/similarity" in names) == (backbone == "mambar")
    for row in rows:
        assert 0 <= row["auc"] <= 1 and row["images"] + row["skipped"] == 20
        assert row["auc_of_mean_normalized"] == pytest.approx(max(row["auc"], 1 - row["auc"]))


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
        assert part["embedding"].shape == (n, 16) and part["maps"].shape == (n, len(part["map_names"]), 4, 4)


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


def test_python_use_without_the_command_line():
    """The classes work without YAML, and say no to what they do not know."""
    backbone = VisionMamba(img_size=16, patch_size=4, embed_dim=16, depth=2, d_state=4, headdim=8)
    assert KNN(backbone).headline_metric == "val/knn_top1"
    with pytest.raises(ValueError, match="maps="):
        BinaryAUCEvaluation(backbone, maps=["saliency"])
    with pytest.raises(ValueError, match="block=7"):
        BinaryAUCEvaluation(backbone, blocks=[7])
    with pytest.raises(ValueError, match="'median' is not one of"):
        from lightning_modules import HeadSpec

        LinearProbe(backbone, [HeadSpec(1, "median")])


def test_two_processes_train_and_validate(shards, tmp_path):
    """Plain ddp over gloo to the end, with uneven validation batches, and no hang."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    (tmp_path / "tiny.yaml").write_text(TINY.format(root=shards))
    (tmp_path / "extra.yaml").write_text(EXTRA["dino"])
    (tmp_path / "vim.yaml").write_text(
        f"model: {{init_args: {{backbone: {{class_path: backbones.{BACKBONES['vim']}}}}}}}"
    )
    files = [
        CONFIGS / "base.yaml",
        CONFIGS / "task/dino.yaml",
        CONFIGS / "data/demo.yaml",
        *(tmp_path / f"{n}.yaml" for n in ("vim", "tiny", "extra")),
    ]
    command = [
        sys.executable, "-m", "cli", "fit", *[a for f in files for a in ("-c", str(f))], "--trainer.devices", "2",
        "--trainer.strategy", "ddp", "--data.init_args.batch_size", "6", "--trainer.max_epochs", "1",
        "--trainer.logger.init_args.save_dir", str(tmp_path),
    ]  # fmt: skip
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    content = torch.load(tmp_path / "default/checkpoints/last.ckpt", weights_only=True)
    assert content["global_step"] == 4
    record = json.loads((tmp_path / "default/run.json").read_text())
    assert record["world_size"] == 2


def test_tensorboard(pretrained):
    """A TensorBoard on the run's logs, asked over HTTP for scalars, pictures and hyper-parameters."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        str(Path(sys.executable).parent / "tensorboard"),
        "--logdir",
        str(pretrained),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--load_fast",
        "false",
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(path, body=None):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/data/plugin/{path}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    try:
        deadline, tags = time.time() + 90, {}
        while time.time() < deadline and not tags:
            try:
                tags = ask("scalars/tags")
            except OSError:
                time.sleep(0.5)
            time.sleep(0.2)
        names = {tag for run in tags.values() for tag in run}
        wanted = {
            "train/loss_step", "train/teacher_entropy", "train/kl", "train/feature_std", "schedule/lr",
            "schedule/weight_decay", "schedule/momentum", "schedule/teacher_temp", "val/knn_top1",
        }  # fmt: skip
        assert wanted <= names, wanted - names
        pictures = ask("images/tags")
        (run_name,) = [r for r, found in pictures.items() if "maps/cls_similarity" in found]
        entries = ask(f"images/images?run={run_name}&tag=maps%2Fcls_similarity&sample=0")
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/data/plugin/images/individualImage?{entries[0]['query']}"
        ) as blob:
            assert Image.open(io.BytesIO(blob.read())).size == (4 * 16, 8 * 16)
        experiment = ask("hparams/experiment", b"{}")
        hparams = {h["name"] for h in experiment["hparamInfos"]}
        assert {"out_dim", "lr", "momentum"} <= {re.sub(".*/", "", h) for h in hparams}
        metrics = {m["name"]["tag"] for m in experiment["metricInfos"]}
        assert "val/knn_top1" in metrics
    finally:
        server.terminate()
        server.wait(20)
