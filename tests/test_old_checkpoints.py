"""Checkpoints of earlier versions load and resume.

``tests/golden/checkpoints/TASK-BACKBONE.ckpt`` were written by revision 07919da after the first of two epochs of
tests.tiny_runs on ``shards``, the demo's scenes of that time; ``ends.safetensors`` holds what that revision came to after
the second.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lightning_modules
from backbones import weights
from tests.tiny_runs import run

FOLDER = Path(__file__).parent / "golden/checkpoints"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ckpt"))
ENDS = load_file(FOLDER / "ends.safetensors")
TIMM = ["--data.init_args.resize", "32", "--data.init_args.crop", "32", "--data.init_args.probe_size", "32"]


def test_every_class_is_there():
    models = {name.split("-")[1] for name in NAMES}
    assert models == {"vim", "mambar", "vit", "linear_vit", "timm", "vim_mamba1"}


@pytest.mark.parametrize("name", NAMES)
def test_resumes_to_the_same_end(name, tmp_path):
    """As near as processors agree: by hand, on the one that wrote them, to the bit."""
    task, backbone = name.split("-")
    path = FOLDER / f"{name}.ckpt"
    more = [*(TIMM if backbone == "timm" else []), "--ckpt_path", str(path)]
    folder = run("fit", task, FOLDER / "shards", tmp_path, backbone, *more)
    found = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    before = torch.load(path, weights_only=True)
    assert before["global_step"] == 3 and found["global_step"] == 6
    wanted = {key.split("/", 1)[1]: value for key, value in ENDS.items() if key.startswith(f"{name}/")}
    assert wanted
    for key, value in wanted.items():
        torch.testing.assert_close(found["state_dict"][key], value, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_reloads_by_itself(name):
    """Class paths of that time included."""
    task, _ = name.split("-")
    family = {"dino": "DINO", "supervised": "Supervised", "linear_probe": "LinearProbe"}[task]
    module = getattr(lightning_modules, family).load_from_checkpoint(
        FOLDER / f"{name}.ckpt", map_location="cpu", weights_only=True
    )
    state = torch.load(FOLDER / f"{name}.ckpt", weights_only=True)["state_dict"]
    prefix = "teacher.backbone." if task == "dino" else "backbone."
    weights.load(module.backbone, FOLDER / f"{name}.ckpt")
    for key, value in module.backbone.state_dict().items():
        assert torch.equal(value, state[prefix + key])
