"""DINO's parts and its behaviour per optimiser step, under accumulation, several processes and faults."""

import copy
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision

from backbones import VisionMamba, VisionTransformer
from callbacks import CollapseMonitor
from lightning_modules import DINO, DINOHead, pretraining
from lightning_modules.ema import ema_update
from lightning_modules.schedules import cosine_schedule, linear_warmup

QUIET = dict(
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    accelerator="cpu",
)


def tiny(seed=0, **kwargs):
    torch.manual_seed(seed)
    backbone = VisionMamba(img_size=16, patch_size=8, embed_dim=16, depth=2, d_state=4, headdim=8)
    defaults = dict(
        out_dim=12, hidden_dim=8, bottleneck_dim=4, lr=0.01 * 256 / 4, warmup_epochs=0, momentum=0.9,
        freeze_last_layer_epochs=0, warmup_teacher_temp_epochs=0, global_batch_size=4,
    )  # fmt: skip
    return DINO(backbone, **{**defaults, **kwargs})


def batches(count, size=4, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    sides = (16, 16, 8, 8, 8)
    return [{"crops": [torch.randn(size, 3, s, s, generator=g, dtype=dtype) for s in sides]} for _ in range(count)]


def fit(module, data, epochs=1, callbacks=(), **kwargs):
    trainer = Trainer(max_epochs=epochs, callbacks=list(callbacks), **{**QUIET, **kwargs})
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    return trainer


class UnroundedHalf(MixedPrecision):
    """16-mixed with a real GradScaler and no rounding, as there is no CUDA here."""

    def __init__(self):
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**16))

    def autocast_context_manager(self):
        return torch.autocast("cpu", enabled=False)


def clipped_run(plugins, monkeypatch, **kwargs):
    """Which gradients were clipped, the largest of each step, what GradientNorm sees, and the student afterwards."""
    seen, real = [], pretraining.clip_each

    def spy(gradients, largest):
        norms = torch.stack([g.norm() for g in gradients])
        seen.append(norms)
        real(gradients, largest)

    monkeypatch.setattr(pretraining, "clip_each", spy)
    module, norm = tiny(clip_grad=0.05, **kwargs), []

    class Norms(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            norm.append(torch.nn.utils.get_total_norm([p.grad for p in pl_module.parameters() if p.grad is not None]))

    fit(module, batches(4), callbacks=[Norms()], plugins=plugins)
    monkeypatch.undo()
    return torch.stack(seen), torch.stack(norm), module.student.state_dict()


def test_a_scaled_loss_clips_what_an_unscaled_one_clips(monkeypatch):
    norms, total, student = clipped_run([], monkeypatch)
    share = (norms > 0.05).float().mean(1)
    assert 0.05 < share[0] < 0.95  # some are clipped, some are not
    scaled_norms, scaled_total, scaled_student = clipped_run([UnroundedHalf()], monkeypatch)
    torch.testing.assert_close(scaled_norms, norms)  # a power of two changes no bit
    torch.testing.assert_close(scaled_total, total)
    for name, value in student.items():
        torch.testing.assert_close(scaled_student[name], value, msg=name)


def test_an_overflow_leaves_the_student_as_it_is():
    """A step whose scaled gradients are infinite is left out; the scale is halved and training goes on."""
    module = tiny(clip_grad=0.05)
    plugin = UnroundedHalf()
    plugin.scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    kept = []

    class Students(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            kept.append(torch.cat([p.detach().flatten() for p in pl_module.student.parameters()]))

    before = torch.cat([p.detach().flatten() for p in module.student.parameters()])
    fit(module, batches(2), callbacks=[Students()], plugins=[plugin])
    assert torch.equal(kept[0], before) and kept[1].isfinite().all() and plugin.scaler.get_scale() < 3e38


def test_teacher_is_a_distinct_copy_in_eval_mode():
    module = tiny()
    module.train()
    assert module.student.training and not any(m.training for m in module.teacher.modules())
    for (name, t), s in zip(module.teacher.named_parameters(), module.student.parameters(), strict=True):
        assert torch.equal(t, s) and t.data_ptr() != s.data_ptr() and not t.requires_grad, name


def test_ema_moves_by_one_minus_momentum():
    module = tiny().double()
    before = copy.deepcopy(module.teacher)
    with torch.no_grad():
        for p in module.student.parameters():
            p.add_(torch.randn_like(p))
    ema_update(module.teacher, module.student, 0.9)
    for t, old, s in zip(module.teacher.parameters(), before.parameters(), module.student.parameters(), strict=True):
        torch.testing.assert_close(t - old, 0.1 * (s - old), atol=1e-14, rtol=1e-12)


def test_ema_refuses_half_precision():
    module = tiny().bfloat16()
    with pytest.raises(ValueError, match="bf16-mixed"):
        ema_update(module.teacher, module.student, 0.9)


def test_head():
    head = DINOHead(6, out_dim=9, hidden_dim=7, bottleneck_dim=5)
    assert set(head.state_dict()) >= {
        "mlp.0.weight",
        "mlp.4.bias",
        "last_layer.weight_g",
        "last_layer.weight_v",
    }
    assert not head.last_layer.weight_g.requires_grad
    x = torch.randn(3, 6)
    z = F.normalize(head.mlp(x), dim=-1)
    v = head.last_layer.weight_v
    torch.testing.assert_close(head(x), z @ (v / v.norm(dim=1, keepdim=True)).t())
    assert DINOHead(6, 9, norm_last_layer=False).last_layer.weight_g.requires_grad
    with pytest.raises(ValueError, match="num_layers=0"):
        DINOHead(6, 9, num_layers=0)


def test_schedules():
    values = [cosine_schedule(i, 10, 1.0, 0.1, 4) for i in range(10)]
    assert values[:4] == pytest.approx([0, 1 / 3, 2 / 3, 1]) and values[4] == 1.0
    assert all(a > b for a, b in zip(values[4:-1], values[5:], strict=True))
    assert cosine_schedule(10, 10, 1.0, 0.1, 4) == pytest.approx(0.1)
    assert [linear_warmup(e, 3, 0.04, 0.07) for e in range(4)] == pytest.approx([0.04, 0.055, 0.07, 0.07])
    assert linear_warmup(0, 0, 0.04, 0.07) == 0.07


@pytest.mark.parametrize("which", ["warmup_teacher_temp", "teacher_temp"])
def test_teacher_temperature_must_be_lower(which):
    with pytest.raises(ValueError, match=f"{which}=0.2 .* student_temp=0.1"):
        tiny(**{which: 0.2})


def test_two_parameter_groups():
    module = tiny()
    trainer = fit(module, batches(1))
    decayed, free = trainer.optimizers[0].param_groups
    names = {id(p): n for n, p in module.student.named_parameters()}
    for p in free["params"]:
        assert p.ndim == 1
    assert free["weight_decay"] == 0 and decayed["weight_decay"] > 0
    undecayed = {names[id(p)].split(".")[-1] for p in free["params"]}
    assert {"A_log", "A_log_b", "dt_bias", "dt_b_bias", "D", "D_b", "bias"} <= undecayed
    assert not any(names[id(p)].endswith(("bias", "norm.weight", "A_log")) for p in decayed["params"])


def test_last_layer_freeze_is_the_students_and_ends():
    module = tiny(freeze_last_layer_epochs=1)
    seen = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer, m):
            seen.append((m.student.head.last_layer.weight_v.clone(), m.teacher.head.mlp[0].weight.clone()))

    start = module.student.head.last_layer.weight_v.clone()
    fit(module, batches(2), epochs=2, callbacks=[Watch()])
    assert torch.equal(seen[0][0], start) and not torch.equal(seen[1][0], start)
    assert not torch.equal(seen[0][1], seen[1][1])


def test_clipping_is_per_parameter():
    norms = {}

    class Watch(Callback):
        def on_train_batch_end(self, trainer, m, outputs, batch, batch_idx):
            norms.update({n: p.grad.norm().item() for n, p in m.student.named_parameters() if p.grad is not None})

    free = tiny(clip_grad=None)
    fit(free, batches(1), callbacks=[Watch()])
    raw = dict(norms)
    limit = sorted(raw.values())[len(raw) // 2]
    fit(tiny(clip_grad=limit), batches(1), callbacks=[Watch()])
    for name, norm in raw.items():
        assert norms[name] == pytest.approx(min(norm, limit), rel=1e-3)
    with pytest.raises(ValueError, match=r"clip_grad, not trainer\.gradient_clip_val"):
        fit(tiny(), batches(1), gradient_clip_val=1.0)


def test_accumulation_is_one_large_step():
    """Four micro-batches give the step of the whole batch: weights, teacher, centre and schedules."""
    whole = batches(3, size=8, dtype=torch.float64)
    parts = [{"crops": [c[i : i + 2] for c in b["crops"]]} for b in whole for i in range(0, 8, 2)]
    one, four = tiny(global_batch_size=8).double(), tiny(global_batch_size=8).double()
    fit(one, whole, precision="64-true")
    trainer = fit(four, parts, precision="64-true", accumulate_grad_batches=4)
    assert trainer.global_step == 3
    for (name, a), b in zip(one.state_dict().items(), four.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0, msg=name)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_precisions(precision):
    module = tiny()
    before = copy.deepcopy(module.teacher.state_dict())
    fit(module, batches(3), precision=precision)
    for name, value in module.teacher.named_parameters():
        assert value.dtype == torch.float32 and value.isfinite().all()
        if value.ndim and not name.endswith("weight_g"):
            assert not torch.equal(value, before[name]), name


def test_collapse_is_warned_of_once(caplog):
    module = tiny(lr=0.0, min_lr=0.0)
    with torch.no_grad():  # every image gets one and the same output
        for network in (module.student, module.teacher):
            network.head.mlp[-1].weight.zero_()
            network.head.mlp[-1].bias.fill_(1.0)
            network.head.last_layer.weight_v.copy_(torch.ones_like(network.head.last_layer.weight_v))
    with caplog.at_level("WARNING"):
        fit(module, batches(60, size=2), callbacks=[CollapseMonitor(patience=20)])
    warned = [r.message for r in caplog.records if "collapse" in r.message]
    assert len([m for m in warned if f"uniform distribution, {math.log(12):.3f}," in m]) == 1


@pytest.mark.parametrize(("tilt", "warns"), [(0.8, True), (4.0, False)])
def test_drift_to_uniform_is_told_from_a_start(caplog, tilt, warns):
    """A uniform student is collapsing where the teacher is nearly uniform too, and just beginning where it is not."""
    module = tiny(lr=0.0, min_lr=0.0, center_momentum=1.0)
    with torch.no_grad():
        for network in (module.student, module.teacher):
            network.head.last_layer.weight_v.copy_(torch.ones_like(network.head.last_layer.weight_v))
        module.loss.center[..., 0] = -tilt * module.hparams.warmup_teacher_temp
    with caplog.at_level("WARNING"):
        fit(module, batches(60, size=2), callbacks=[CollapseMonitor(patience=20)])
    assert any("uniform distribution" in r.message for r in caplog.records) == warns


def test_schedules_need_an_end_and_a_batch_size():
    with pytest.raises(ValueError, match="max_epochs or"):
        fit(tiny(), batches(1), epochs=-1)
    with pytest.raises(ValueError, match="global_batch_size"):
        fit(tiny(global_batch_size=None), batches(1))


def test_resolutions_are_grouped():
    module, sizes = tiny(), []
    module.student.backbone.register_forward_pre_hook(lambda m, x: sizes.append(tuple(x[0].shape)))
    fit(module, batches(1))
    assert sizes == [(8, 3, 16, 16), (12, 3, 8, 8)]


def test_any_backbone():
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=12, depth=2, num_heads=2)
    trainer = fit(DINO(vit, out_dim=8, hidden_dim=8, bottleneck_dim=4, global_batch_size=4), batches(2))
    assert trainer.global_step == 2


WORKER = """
import sys, torch
from lightning.pytorch import Trainer
sys.path.insert(0, {root!r})
from tests.lightning_modules.test_dino import QUIET, batches, tiny
class Halves(torch.utils.data.IterableDataset):
    def __init__(self, world): self.world = world
    def __len__(self): return 4
    def __iter__(self):
        rank = torch.distributed.get_rank() if self.world > 1 else 0
        n = 8 // self.world
        for b in batches(4, size=8, dtype=torch.float64):
            yield {{"crops": [c[rank * n:(rank + 1) * n] for c in b["crops"]]}}
world = int(sys.argv[1])
module = tiny(global_batch_size=8, freeze_last_layer_epochs=1, centering=sys.argv[3]).double()
trainer = Trainer(max_epochs=2, devices=world, strategy="ddp" if world > 1 else "auto", precision="64-true", **QUIET)
trainer.fit(module, torch.utils.data.DataLoader(Halves(world), batch_size=None))
if trainer.is_global_zero:
    torch.save(module.state_dict(), sys.argv[2])
"""


@pytest.mark.parametrize("centering", [pytest.param("mean", marks=pytest.mark.slow), "sinkhorn"])
def test_two_processes_equal_one(tmp_path, centering):
    """Plain ``ddp``, a frozen epoch included: weights, teacher and centre as with one process."""
    root = str(Path(__file__).parents[2])
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(root=root))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    states = []
    for world in ("1", "2"):
        out = tmp_path / f"{world}.pt"
        run = subprocess.run(
            [sys.executable, str(script), world, str(out), centering],
            env=env,
            cwd=root,
            timeout=240,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr[-3000:]
        states.append(torch.load(out, weights_only=True))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, atol=1e-9, rtol=0, msg=name)


def test_same_seed_same_run():
    states = []
    for _ in range(2):
        seed_everything(0, verbose=False)
        module = tiny()
        fit(module, batches(3))
        states.append(module.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values(), strict=True))
