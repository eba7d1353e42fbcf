"""A user's file that takes a package's place is named."""

import os
import subprocess
import sys

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
        assert f"{tmp_path / 'metrics.py'} takes the place of dinomamba's package 'metrics': rename it" in line


def test_somebody_elses(tmp_path):
    (tmp_path / "timm.py").write_text("x = 1")
    line = last_line(tmp_path, "cli", "fit", "-c", "base.yaml")
    assert line.startswith("error: ") and f"{tmp_path / 'timm.py'} takes the place of the package 'timm'" in line


def test_a_folder_without_python_is_no_package(tmp_path):
    for name in ("metrics", "callbacks", "configs", "common"):
        (tmp_path / name).mkdir()
    line = last_line(tmp_path, "cli", "fit", "-c", "base.yaml")
    assert line == "error: the following arguments are required: fit.data, fit.model"
