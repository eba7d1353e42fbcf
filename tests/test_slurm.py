"""The scripts on a real SLURM of two nodes, brought up on this host: part of ``make test-slow``."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from callbacks.checkpoint_files import fault
from tests.processes import free_port
from tests.test_resume import command, history, many, same, state, wait_for_step  # noqa: F401
from tests.tiny_runs import CONFIGS, ROOT

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(shutil.which("sbatch") is None, reason="needs Debian's slurm-wlm and munge"),
]
WORKERS = ("--data.init_args.num_workers", "1")
NODES = ["--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--time=10"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # the runs log their keys by tests.key_log
    for _ in range(3):  # three ports in a row may not be free
        env["PORT"] = str(free_port())
        up = subprocess.run(
            ["make", "slurm-local", f"SLURM_DIR={folder}"], cwd=ROOT, env=env, capture_output=True, text=True
        )
        if up.returncode == 0:
            break
    assert up.returncode == 0, up.stdout + up.stderr
    pids = [int(p.read_text()) for p in folder.glob("*.pid")]
    assert len(pids) == 4
    yield env | {"SLURM_CONF": str(folder / "slurm.conf"), "LOGS": str(folder / "logs")}
    subprocess.run(["make", "slurm-local-down", f"SLURM_DIR={folder}"], cwd=ROOT, env=env, check=True)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def submit(cluster, out, script, *arguments, options=()):
    run = subprocess.run(
        ["sbatch", "--parsable", f"--output={out}/job.out", *NODES, *options, f"slurm/{script}", *arguments],
        cwd=ROOT, env=cluster, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def show(cluster, job):
    """A job's fields, in scontrol's words."""
    text = subprocess.run(["scontrol", "show", "job", job], env=cluster, capture_output=True, text=True).stdout
    return dict(re.findall(r"(\w+)=(\S*)", text))


def wait(cluster, job, timeout=240):
    deadline = time.time() + timeout
    while time.time() < deadline:
        if (fields := show(cluster, job))["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
            return fields
        time.sleep(0.5)
    raise AssertionError(show(cluster, job))


def logs(cluster, job):
    """What each rank wrote, by rank."""
    found = sorted(Path(cluster["LOGS"]).glob(f"*-{job}-rank*.log"))
    return [path.read_text() for path in found]


def fit(shards, out):
    """``fit …`` as test_resume runs it; train.sbatch adds --ckpt_path itself."""
    arguments = command(shards, out)
    arguments = arguments[arguments.index("fit") :]
    at = arguments.index("--ckpt_path")
    return arguments[:at] + arguments[at + 2 :]


@pytest.mark.timeout(900)
def test_signalled_requeued_and_resumed_on_two_nodes(cluster, many, tmp_path):  # noqa: F811
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    job = submit(cluster, tmp_path / "whole", "train.sbatch", *fit(many, tmp_path / "whole"), options=["--nodes=2"])
    fields = wait(cluster, job)
    ranks = logs(cluster, job)
    assert fields["JobState"] == "COMPLETED" and fields["Restarts"] == "0", "\n".join(ranks)
    assert len(ranks) == 2 and "Starting with 2 processes" in ranks[0] and "GLOBAL_RANK: 1, MEMBER: 2/2" in ranks[1]
    assert "global batch 8 over 2 processes x 1 accumulated batches; effective learning rate 1.5625e-05" in ranks[0]

    # with workers, which SLURM signals too
    arguments = [*fit(many, tmp_path / "cut"), *WORKERS]
    job = submit(cluster, tmp_path / "cut", "train.sbatch", *arguments, options=["--nodes=2"])
    wait_for_a_checkpoint(tmp_path / "cut")
    # what --signal=USR1@… sends before the time limit
    subprocess.run(["scancel", "--signal=USR1", job], env=cluster, check=True)
    fields = wait(cluster, job)
    ranks = logs(cluster, job)
    assert fields["JobState"] == "COMPLETED" and fields["Restarts"] == "1", "\n".join(ranks)
    for text in ranks:  # each rank goes on in its own log
        assert f"error: SLURM starts job {job} again; --ckpt_path auto goes on from the last checkpoint" in text
    assert len(ranks) == 2 and "resuming from" in ranks[0].split("SLURM starts job")[1]
    assert same(state(tmp_path / "cut"), state(tmp_path / "whole"))
    assert history(tmp_path / "cut") == history(tmp_path / "whole")


def wait_for_a_checkpoint(out):
    deadline = time.time() + 120
    while not (out / "run/checkpoints/last.ckpt").is_file() and time.time() < deadline:
        time.sleep(0.05)


def test_cancelled(cluster, many, tmp_path):  # noqa: F811
    """SIGTERM, and ten seconds later SIGKILL: time for a checkpoint."""
    arguments = [*fit(many, tmp_path), *WORKERS, "--trainer.max_epochs", "1000"]
    job = submit(cluster, tmp_path, "train.sbatch", *arguments, options=["--nodes=2"])
    wait_for_a_checkpoint(tmp_path)
    subprocess.run(["scancel", job], env=cluster, check=True)
    assert wait(cluster, job)["JobState"] == "CANCELLED"
    deadline = time.time() + 30  # the steps end after the job
    while not all("stopped by SIGTERM" in text for text in logs(cluster, job)) and time.time() < deadline:
        time.sleep(0.2)
    assert all("error: stopped by SIGTERM; --ckpt_path auto goes on" in text for text in logs(cluster, job))
    assert fault(tmp_path / "run/checkpoints/last.ckpt") is None


def test_a_table_as_a_job_array(cluster, tmp_path):
    """Task 1 of ``ranks`` is its second run; the others are other tasks'."""
    models = "MODELS=vit_demo_random vim_demo_random"  # which nothing is pretrained for
    job = submit(
        cluster, tmp_path, "table.sbatch", "ranks", "DATA=demo", models, f"RUNS={tmp_path}/runs",
        options=["--nodes=1", "--array=1"],
    )  # fmt: skip
    fields = wait(cluster, f"{job}_1")
    assert fields["JobState"] == "COMPLETED", (tmp_path / "job.out").read_text() + "".join(logs(cluster, f"{job}_1"))
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["vim_demo_random-ranks"]
    assert (tmp_path / "runs/vim_demo_random-ranks/results.json").is_file()
    job = submit(cluster, tmp_path, "table.sbatch", "ranks", "DATA=demo", options=["--nodes=1", "--array=3"])
    assert wait(cluster, f"{job}_3")["JobState"] == "FAILED"
    assert "error: task 3, but ranks has 3 runs: --array=0-2" in (tmp_path / "job.out").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nodes=1", "--ntasks-per-node=2"], "`devices=1` in Lightning, but the number of tasks per node configured in SLURM `--ntasks-per-node=2`"),
        (["--nodes=2", "--ntasks-per-node=1"], "`num_nodes=1` in Lightning, but the number of nodes configured in SLURM `--nodes=2`"),
        (["--nodes=2", "--ntasks-per-node=1", "--job-name=bash"], "--job-name=bash with 2 tasks"),
    ],
    ids=["tasks", "nodes", "name"],
)  # fmt: skip
def test_a_mismatch_is_refused_at_the_start(options, said, cluster, many, tmp_path):  # noqa: F811
    """By hand with srun, so with nothing that would keep the two apart."""
    run = subprocess.run(
        ["srun", *options, "--time=2", sys.executable, "-m", *fit_command(many, tmp_path)],
        cwd=ROOT, env=cluster, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode != 0 and said in " ".join((run.stdout + run.stderr).split()), run.stdout + run.stderr
    assert not (tmp_path / "run/checkpoints").exists()


def fit_command(shards, out):
    return ["cli", *fit(shards, out), "-c", str(CONFIGS / "cluster/slurm.yaml"), "--trainer.devices", "1"]
