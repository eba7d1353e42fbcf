"""A user's file that takes a package's place is named."""

import os
import subprocess
import sys

import pytest
import torch

import configs

ROOT = configs.ROOT.parent


def last_line(folder, *command):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment, text=True, capture_output=True, timeout=120
    )
    assert done.returncode, done.stdout
    return done.stderr.strip().splitlines()[-1]


def test_one_of_ours(tmp_path):
    (tmp_path / "metrics.py").write_text("x = 1")
    for command in (("cli", "fit", "-c", "base.yaml"), ("datamodules.prepare", "demo", "--out", "x")):
        line = last_line(tmp_path, *command)
        assert f"{tmp_path / 'metrics.py'} takes the place of dinomamba's own 'metrics': rename it" in line


@pytest.mark.parametrize("name", ["cli", "common", "lightning_cli", "datamodules"])
def test_under_its_own_name_it_starts_anywhere(name, tmp_path):
    """`python -m` puts the working folder first, and so may PYTHONPATH for the console's command."""
    (tmp_path / f"{name}.py").write_text("x = 1")
    for command in (("fit",), ("prepare", "demo")):
        line = last_line(tmp_path, "dinomamba", *command)
        assert (
            line.startswith("error: ") and f"{tmp_path / name}.py takes the place of dinomamba's own '{name}'" in line
        )


def test_nobody_reads_on(tmp_path):
    torch.save({"teacher": {f"backbone.{i}": torch.zeros(1) for i in range(20_000)}}, tmp_path / "w.pth")
    for command in ("dinomamba --help", "dinomamba weights inspect w.pth"):
        done = subprocess.run(
            f"{sys.executable} -m {command} | head -n 1", shell=True, cwd=tmp_path, text=True, capture_output=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120,
        )  # fmt: skip
        assert done.stdout and not done.stderr


def test_programs_beside_it(tmp_path):
    (tmp_path / "w.pth").write_text("no weights")
    for command, said in (
        (("weights", "inspect", "w.pth"), "w.pth cannot be read as weights"),
        (("prepare", "demo", "--train", "1e3"), "train=1000.0; allowed: int"),
        (("prepare", "imagefolder", "--src", ".", "--out", "x", "--split", "a", "--bits", "12"), "bits=12; allowed: 8, 16, 32"),
        (("experiments", "table1", "--jobs", "0", "--dry-run"), "--jobs 0; allowed: 1 and more"),
        (("experiments", "table1", "--imagenet", "none", "--dry-run"), "--imagenet none: there is no such folder"),
        (("experiments", "table1", "--checkpoint", "x.ckpt", "--dry-run"), "--checkpoint x.ckpt: there is no such file"),
    ):  # fmt: skip
        line = last_line(tmp_path, "dinomamba", *command)
        assert line.startswith("error: ") and said in line, line


def test_somebody_elses(tmp_path):
    (tmp_path / "timm.py").write_text("x = 1")
    line = last_line(tmp_path, "cli", "fit", "-c", "base.yaml")
    assert line.startswith("error: ") and f"{tmp_path / 'timm.py'} takes the place of the package 'timm'" in line


def test_a_folder_without_python_is_no_package(tmp_path):
    for name in ("metrics", "callbacks", "configs", "common"):
        (tmp_path / name).mkdir()
    line = last_line(tmp_path, "cli", "fit", "-c", "base.yaml")
    assert line == "error: the following arguments are required: fit.data, fit.model"
