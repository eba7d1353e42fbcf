"""Tiny runs through the command line, from shards to results, and what they leave behind."""

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
from common import native
from lightning_modules import DINO, KNN, BinaryAUCEvaluation, LinearProbe
from tests.tiny_runs import BACKBONES, CONFIGS, EXTRA, LARGE, LARGE_CROPS, ROOT, TINY, run


def test_pretraining_leaves_a_record(pretrained, shards):
    record = json.loads((pretrained / "run.json").read_text())
    assert record["world_size"] == 1 and record["global_batch_size"] == 8 and record["seconds"] > 0
    assert [Path(s).name for s in record["shards"]] == sorted(
        p.name for p in shards.glob("*.tar") if not p.name.startswith("test")
    )
    assert record["versions"]["torch"] == importlib.metadata.version("torch")
    assert record["compiled"] == (["bidirectional.c", "views.c"] if native.compiler() else [])
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


def test_python_use_without_the_command_line():
    """The classes work without YAML, and say no to what they do not know."""
    backbone = VisionMamba(img_size=16, patch_size=4, embed_dim=16, depth=2, d_state=4, headdim=8)
    assert KNN(backbone).headline == "val/knn_top1"
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
            "train/loss", "train/teacher_entropy", "train/kl", "train/feature_std", "schedule/lr",
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


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (
            ["--help"],
            0,
            ["task/NAME.yaml", "linear_probe", "vim_small", "imagenet_s", "slurm", "dinomamba fit -c base.yaml"],
        ),
        (["--version"], 0, ["dinomamba ", importlib.metadata.version("dinomamba")]),
        ([], 2, ["usage: dinomamba COMMAND"]),
        (["fti"], 2, ["error: 'fti' is no command; did you mean 'fit'?"]),
        (["train"], 2, ["error: 'train' is no command; allowed: fit, validate, test, predict"]),
    ],
)
def test_what_needs_no_torch_imports_none(args, code, said):
    """So it answers at once."""
    script = f"import sys, cli\ntry:\n    cli.main({args!r})\nfinally:\n    assert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == code, done.stderr
    for words in said:
        assert words in done.stdout + done.stderr


def test_configs_are_found_from_any_folder(tmp_path, monkeypatch, capsys):
    """The working folder's first, then the program's; a file that is nowhere is named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task").mkdir()
    (tmp_path / "task/mine.yaml").write_text("model: {init_args: {lr: 0.125}}")
    names = ["base.yaml", "task/dino.yaml", "configs/data/imagenet.yaml", "backbone/vim_tiny.yaml", "task/mine.yaml"]
    with pytest.raises(SystemExit):
        cli.main(["fit", *(a for n in names for a in ("-c", n)), "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    assert (
        config["model"]["init_args"]["lr"] == 0.125
        and config["model"]["init_args"]["backbone"]["init_args"]["embed_dim"] == 256
    )
    (tmp_path / "task/dino.yaml").write_text("model: {init_args: {lr: 0.5}}")
    with pytest.raises(SystemExit):
        cli.main(["fit", "-c", "base.yaml", "-c", "task/dino.yaml", "--print_config"])
    assert "name the task first (-c task/dino.yaml)" in capsys.readouterr().err  # ours, which names no class
    with pytest.raises(SystemExit):
        cli.main(["fit", "-c", "task/dion.yaml"])
    assert "task/dion.yaml" in capsys.readouterr().err.splitlines()[-1]


def test_threads_spin_briefly():
    """Set before torch, and only where nobody said otherwise."""
    script = (
        "import os, sys, cli\ncli.share_the_processors()\nassert 'torch' not in sys.modules\n"
        "print(os.environ.get('OMP_WAIT_POLICY'), os.environ.get('GOMP_SPINCOUNT'))"
    )
    for said, wanted in (
        ({}, "None 10000"), ({"OMP_WAIT_POLICY": "active"}, "active None"), ({"GOMP_SPINCOUNT": "7"}, "None 7"),
    ):  # fmt: skip
        env = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} | said
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=env, check=True
        )
        assert done.stdout.strip() == wanted
