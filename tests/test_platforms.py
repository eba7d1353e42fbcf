"""macOS, MPS and Windows, by taking away what they do not have."""

import os
import subprocess
import sys

import pytest
import torch

import configs
from backbones import LinearVisionTransformer, MambaReg, MambaRegMamba1, VimMamba1, VisionMamba, VisionTransformer
from common.precision import exact
from lightning_modules import DINO
from metrics import BinaryAUC, KNNAccuracy, binary_auc
from tests.lightning_modules.test_dino import batches

WITHOUT = """
import multiprocessing, os, signal, sys
import torch.multiprocessing
del signal.sigwaitinfo
if sys.argv[1] == "windows":
    # pthread_sigmask and SIGUSR1 stay: multiprocessing and Lightning ask for them where they do not see Windows
    for name in ("fcntl", "resource"):
        sys.modules[name] = None
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    from pathlib import Path
    from tests.tiny_runs import run
    run("fit", "dino", Path(sys.argv[2]), Path(sys.argv[3]), "vit", "--data.init_args.num_workers", "2", "--trainer.max_epochs", "1")
"""


@pytest.mark.parametrize("system", ["macos", pytest.param("windows", marks=pytest.mark.slow)])
def test_a_run_with_workers_ends(system, shards, tmp_path):
    """Workers are spawned there, and nothing tells them who sent a signal."""
    script = tmp_path / "without.py"
    script.write_text(WITHOUT)
    done = subprocess.run(
        [sys.executable, str(script), system, str(shards), str(tmp_path)], cwd=tmp_path, text=True, capture_output=True,
        timeout=200, env=os.environ | {"PYTHONPATH": str(configs.ROOT.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "dino-vit/checkpoints/last.ckpt").is_file()


class OnMPS(torch.Tensor):
    """A tensor of a device that has no float64, until it is brought to the CPU."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        found = super().__torch_function__(function, types, args, kwargs or {})
        name = getattr(function, "__name__", "")
        if name == "cpu":
            return found.as_subclass(torch.Tensor)
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float64, torch.complex128):
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return found


def on_mps(module):
    """A module whose parameters are there."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(
                    parameter.detach().as_subclass(OnMPS), parameter.requires_grad
                )
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = buffer.as_subclass(OnMPS)
    return module


def test_exact_numbers_come_from_the_cpu():
    t = torch.arange(3).as_subclass(OnMPS)
    with pytest.raises(TypeError):
        t.double()
    assert type(exact(t)) is torch.Tensor and exact(t).dtype == torch.float64


def test_metrics():
    torch.manual_seed(0)
    scores, masks = torch.randn(5, 2, 6, 7), torch.randint(0, 2, (5, 12, 14))
    there = binary_auc(scores.as_subclass(OnMPS), masks.as_subclass(OnMPS))
    assert torch.equal(there, binary_auc(scores, masks))
    here, metric = BinaryAUC(2), BinaryAUC(2)
    here.update(scores, masks)
    for name in ("sum_auc", "sum_normalized", "images", "skipped"):
        setattr(metric, name, getattr(metric, name).as_subclass(OnMPS))
    metric.update(scores.as_subclass(OnMPS), masks.as_subclass(OnMPS))
    for name, value in here.compute().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(metric.compute()[name].cpu())), name
    knn = KNNAccuracy(k=2)
    knn.update(torch.randn(9, 4).as_subclass(OnMPS), torch.randint(0, 3, (9,)).as_subclass(OnMPS))
    assert 0 <= float(knn.compute()["top1"]) <= 1


SMALL = dict(img_size=16, patch_size=4, embed_dim=16, depth=2)
FAMILIES = {
    "vit": lambda: VisionTransformer(**SMALL, num_heads=2),
    "linear_vit": lambda: LinearVisionTransformer(**SMALL, num_heads=2),
    "vim": lambda: VisionMamba(**SMALL, d_state=4, headdim=8),
    "mambar": lambda: MambaReg(**SMALL, d_state=4, headdim=8, num_registers=2),
    "vim_mamba1": lambda: VimMamba1(**SMALL, d_state=4),
    "mambar_mamba1": lambda: MambaRegMamba1(**SMALL, d_state=4, num_registers=2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_dino(family):
    """Loss, gradients, EMA and centre, at two sizes of images."""
    torch.manual_seed(0)
    module = on_mps(DINO(FAMILIES[family](), out_dim=12, hidden_dim=8, bottleneck_dim=4))
    crops = [crop.as_subclass(OnMPS) for crop in batches(1)[0]["crops"]]
    with torch.no_grad():
        _, z = module.teacher(crops[:2])
        teacher = module.teacher.head.last_layer(z)
    _, z = module.student(crops)
    parts = module.loss.of_prototypes(z, module.student.head.last_layer.prototypes(), teacher, len(crops), 0.05)
    parts.loss.backward()
    module.loss.observe(teacher)
    module.after_update({"momentum": 0.9}, None)
    assert all(p.grad.isfinite().all() for p in module.student.parameters() if p.requires_grad)
