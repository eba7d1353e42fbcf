"""Dense tasks that are cut off inside an epoch and resumed are those that were not, to the last bit."""

import os
import signal
import subprocess
import sys

import pytest
import yaml

from datamodules import prepare_dense
from tests.key_log import read_keys
from tests.processes import free_port
from tests.test_resume import finish, history, same, state, wait_for_step
from tests.tiny_runs import CONFIGS, ROOT

BACKBONE = """
model:
  init_args:
    backbone:
      class_path: backbones.VisionMamba
      init_args: {img_size: 32, patch_size: 8, embed_dim: 16, depth: 4, d_state: 4, headdim: 8, drop_path: 0.3}
"""
TASKS = {
    "segmentation": """
data: {init_args: {size: 32, resize: [96, 48], batch_size: 8, num_workers: 0}}
model: {init_args: {num_classes: 11, channels: 8, aux_channels: 4, neck_channels: 8, lr: 0.01, warmup_steps: 4}}
trainer: {max_steps: 30, val_check_interval: 7}
""",
    "detection": """
data: {init_args: {resize: [64, 48], batch_size: 8, num_workers: 0}}
model:
  init_args: {num_classes: 10, neck_channels: 8, fc_channels: 8, mask_channels: 4, rpn_samples: 16, roi_samples: 8,
    milestones: [1, 2], warmup_steps: 4, lr: 0.003}
trainer: {max_epochs: 3, check_val_every_n_epoch: 1}
""",
}
STEPS = {"segmentation": 30, "detection": 33}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    out = tmp_path_factory.mktemp("dense")
    prepare_dense.demo_dense(str(out), train=88, validation=12, samples_per_shard=9)
    return out


def start(scenes, out, task, *extra):
    base = yaml.safe_load((CONFIGS / "base.yaml").read_text())
    next(c for c in base["trainer"]["callbacks"] if c["class_path"] == "callbacks.Checkpoints")["init_args"] |= {
        "every_n_steps": 3, "check_every": 3,
    }  # fmt: skip
    base["trainer"]["callbacks"].append({"class_path": "tests.key_log.KeyLog"})
    base["trainer"] |= {"accelerator": "cpu", "log_every_n_steps": 1}
    for name, text in (("base", yaml.safe_dump(base)), ("backbone", BACKBONE), ("tiny", TASKS[task])):
        (out / f"{name}.yaml").write_text(text)
    files = [
        out / "base.yaml", CONFIGS / f"task/{task}.yaml", CONFIGS / f"data/demo_{task}.yaml", out / "backbone.yaml",
        out / "tiny.yaml",
    ]  # fmt: skip
    words = [
        sys.executable, "-m", "cli", "fit", *[word for file in files for word in ("-c", str(file))],
        "--data.init_args.root", str(scenes / task), "--ckpt_path", "auto",
        "--trainer.logger.init_args.save_dir", str(out), "--trainer.logger.init_args.name", "run", *extra,
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return subprocess.Popen(
        words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_killed_inside_an_epoch_and_resumed(task, scenes, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    finish(start(scenes, whole, task))
    monkeypatch.setenv("SECONDS_A_BATCH", "0.3")
    for step in (5, 16):  # the first is killed just before a validation
        process = start(scenes, cut, task)
        wait_for_step(cut, step, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        at = state(cut)[0]
        assert step <= at < STEPS[task] and at % 11
    monkeypatch.undo()
    assert "resuming from" in finish(start(scenes, cut, task))
    assert same(state(cut), state(whole))
    expected = history(whole)
    assert history(cut) == expected and [step for step, _ in expected["train/loss"]] == list(range(STEPS[task]))
    keys = [key for line in read_keys(whole / "run") if line["epoch"] == 1 for key in line["keys"]]
    assert len(keys) == len(set(keys)) == 88
