"""slurm/table.sbatch asks the planner; without SLURM, whose variables are set here (tests/test_slurm.py has a real one)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Runs the script as a task of a job array in a folder whose .venv only plans."""
    programs = {"bin/scontrol": "", ".venv/bin/python": f'exec {sys.executable} "$@" --dry-run\n'}
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    variables = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "t",
    }  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")} | variables

    def run(task, *arguments):
        number = {} if task is None else {"SLURM_ARRAY_TASK_ID": str(task)}
        return subprocess.run(
            ["bash", "slurm/table.sbatch", *arguments], cwd=tmp_path, env=environment | number,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    return run


def test_a_task_is_a_run_of_the_target(sbatch):
    models = "MODELS=vit_demo_random vim_demo_random"  # which nothing is pretrained for
    done = sbatch(1, "ranks", "DATA=demo", models, "RUNS=x", "ARGS=--trainer.devices 2")
    assert done.returncode == 0, done.stderr
    *_, run, command, _, _ = done.stdout.splitlines()
    assert run == "# 1: x/vim_demo_random-ranks, after data/demo" and "vit_demo_random-ranks" not in done.stdout
    assert command.startswith("OMP_NUM_THREADS=1 srun --kill-on-bad-exit=1") and "logs/t-7_1-rank%t.log" in command
    assert "-c configs/cluster/slurm.yaml --trainer.num_nodes 1 --trainer.devices 8" in command
    assert command.endswith("--trainer.devices 2")  # the user's flags come last


def test_a_task_that_is_none(sbatch):
    done = sbatch(3, "ranks", "DATA=demo")
    assert done.returncode == 1 and done.stderr == "error: task 3, but ranks has 3 runs: --array=0-2\n"
    done = sbatch(None, "ranks")
    assert done.returncode != 0 and "this script is a job array" in done.stderr
