"""What the base gives every method, on two of the smallest."""

import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from torch import nn

from backbones import VisionTransformer, weights
from callbacks import CollapseMonitor
from lightning_modules import DINO, EMATeacher, Pretraining, Supervised
from lightning_modules.schedules import cosine_schedule
from tests.lightning_modules.test_dino import QUIET, fit


def backbone():
    torch.manual_seed(0)
    return VisionTransformer(img_size=16, patch_size=8, embed_dim=12, depth=2, num_heads=2)


class Constant(Pretraining):
    """Pulls every embedding to one."""

    def __init__(self, **kwargs):
        super().__init__(
            backbone(), **{"lr": 0.64, "global_batch_size": 4, "warmup_epochs": 0, "knn_k": None, **kwargs}
        )
        self.read = 0

    def training_loss(self, batch):
        def costly():
            self.read += 1
            return torch.tensor(3.0)

        return (self(batch["image"]) - 1).square().mean(), {"costly": costly, "plain": torch.tensor(2.0)}


def images(count, size=4):
    g = torch.Generator().manual_seed(1)
    return [{"image": torch.randn(size, 3, 16, 16, generator=g), "label": torch.arange(size) % 3} for _ in range(count)]


def test_the_least_that_a_method_says():
    """The loss alone; the backbone is kept by the base. Plain numbers are logged too. Without a loss it is none."""

    class Least(Pretraining):
        def training_loss(self, batch):
            return (self(batch["image"]) - 1).square().mean()

    class Logs(Least):
        def training_loss(self, batch):
            return super().training_loss(batch), {"number": 0.5}

    trainer = fit(Logs(backbone(), global_batch_size=4, knn_k=2), images(2), log_every_n_steps=1)
    assert trainer.callback_metrics["train/number"] == 0.5 and trainer.global_step == 2
    assert fit(Least(backbone(), global_batch_size=4), images(2)).global_step == 2
    with pytest.raises(TypeError, match="training_loss"):
        Pretraining(backbone())


def test_schedules_reach_the_optimiser():
    """Rate and decay of each step, the latter on matrices only; constant unless an end is said."""
    for end in (None, 0.5):
        seen = []

        class Watch(Constant):
            def after_update(self, values, skip_update):
                groups = self.trainer.optimizers[0].param_groups
                seen.append((groups[0]["lr"], groups[0]["weight_decay"], groups[1]["weight_decay"]))  # noqa: B023
                assert skip_update is None and values["lr"] == groups[1]["lr"]

        fit(Watch(min_lr=0.001, weight_decay=0.1, weight_decay_end=end), images(5), epochs=2)
        wanted = [
            (cosine_schedule(i, 10, 0.01, 0.001), cosine_schedule(i, 10, 0.1, 0.1 if end is None else end), 0.0)
            for i in range(10)
        ]
        assert seen == wanted


def test_once_per_optimiser_step():
    calls = []

    class Watch(Constant):
        def after_update(self, values, skip_update):
            calls.append(self.trainer.global_step)

    fit(Watch(), images(6), accumulate_grad_batches=3)
    assert calls == [0, 1]  # the step just made


def test_values_are_computed_where_they_are_logged():
    module = Constant()
    trainer = fit(module, images(7), log_every_n_steps=3)
    assert module.read == 2
    assert trainer.callback_metrics["train/plain"] == 2 and trainer.callback_metrics["train/costly"] == 3
    assert {"schedule/lr", "schedule/weight_decay", "train/loss"} <= set(trainer.callback_metrics)


@pytest.mark.parametrize("clip", ["each", "all"])
def test_clipping(clip):
    """Of each gradient by itself, or by one factor that keeps their directions."""
    module, raw = Constant(clip=clip, clip_grad=0.01), {}

    class Watch(Callback):
        def on_after_backward(self, trainer, pl_module):
            raw.update({n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None})

    fit(module, images(1), callbacks=[Watch()])
    clipped = {n: p.grad for n, p in module.named_parameters()}
    total = torch.stack([g.norm() for g in raw.values()]).norm()
    for name, gradient in raw.items():
        norm = gradient.norm() if clip == "each" else total
        torch.testing.assert_close(clipped[name], gradient * min(1.0, 0.01 / (norm.item() + 1e-6)))
    with pytest.raises(ValueError, match=r"set model\.clip_grad, not trainer\.gradient_clip_val"):
        fit(Constant(), images(1), gradient_clip_val=1.0)
    with pytest.raises(ValueError, match="clip='some'; allowed: each, all"):
        Constant(clip="some")


def test_the_rate_needs_a_batch_size_and_every_method_says_so():
    """Supervised training took 256 in silence."""
    for module in (Constant(global_batch_size=None), Supervised(backbone(), num_classes=3)):
        with pytest.raises(ValueError, match="global_batch_size is not set and the data have no batch_size"):
            fit(module, images(1))
    assert fit(Supervised(backbone(), num_classes=3, global_batch_size=4), images(2)).global_step == 2


def test_supervised_stops_at_a_loss_that_is_no_number():
    data = images(3)
    data[1]["image"][0] = torch.inf
    module = Supervised(backbone(), num_classes=3, global_batch_size=4)
    with pytest.raises(FloatingPointError, match="the loss is nan at step 1; nothing was updated by it"):
        fit(module, data)
    assert all(p.isfinite().all() for p in module.parameters())


def test_a_callback_reads_what_the_base_offers(caplog):
    """The uniform loss of another method; nothing where it has none."""

    class Uniform(Constant):
        uniform_loss = math.log(5)

        def training_loss(self, batch):
            logits = self(batch["image"])[:, :5] * 0
            return F.cross_entropy(logits, batch["label"]), {"kl": torch.tensor(0.0)}

    for module, warns in ((Uniform(), True), (Constant(), False)):
        caplog.clear()
        with caplog.at_level("WARNING"):
            fit(module, images(40), callbacks=[CollapseMonitor(patience=20)], log_every_n_steps=1)
        assert any(f"uniform distribution, {math.log(5):.3f}" in r.message for r in caplog.records) == warns


def test_a_teacher_of_any_method():
    """Mixed in, it follows what it is told to, in eval mode with storage of its own."""

    class Followed(EMATeacher, Constant):
        def __init__(self):
            super().__init__()
            self.follow(self.backbone)

        def after_update(self, values, skip_update):
            before = [p.clone() for p in self.teacher.parameters()]
            self.update_teacher(self.backbone, 0.75, skip_update)
            for now, old, student in zip(self.teacher.parameters(), before, self.backbone.parameters(), strict=True):
                torch.testing.assert_close(now, 0.75 * old + 0.25 * student)

    module = Followed()
    fit(module, images(3))
    module.train()
    assert not any(m.training for m in module.teacher.modules()) and module.backbone.training
    assert not any(p.requires_grad for p in module.teacher.parameters())
    assert isinstance(module.teacher, nn.Module) and "teacher.norm.weight" in module.state_dict()


@pytest.mark.parametrize("method", ["dino", "supervised"])
def test_training_starts_from_weights(method, tmp_path):
    """Of a file of any format; the teacher too; a run that is resumed reads its checkpoint instead."""
    torch.manual_seed(5)

    def backbone():
        return VisionTransformer(img_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=2)

    def made(path):
        if method == "dino":
            return DINO(backbone(), out_dim=4, hidden_dim=4, bottleneck_dim=2, global_batch_size=2, init_weights=path)
        return Supervised(backbone(), num_classes=3, global_batch_size=2, init_weights=path)

    start = backbone()
    weights.export(start, tmp_path / "w.pth")
    batch = {
        "crops": [torch.randn(2, 3, 8, 8) for _ in range(3)],
        "image": torch.randn(2, 3, 8, 8),
        "label": torch.tensor([0, 2]),
    }
    module, seen = made(str(tmp_path / "w.pth")), []

    class First(Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append({k: v.clone() for k, v in pl_module.state_dict().items()})

    def train(module, **kwargs):
        trainer = Trainer(max_epochs=kwargs.pop("epochs"), callbacks=[First()], **QUIET)
        trainer.fit(module, torch.utils.data.DataLoader([batch], batch_size=None), **kwargs)
        return trainer

    trainer = train(module, epochs=1)
    networks = ("student.backbone.", "teacher.backbone.") if method == "dino" else ("backbone.",)
    for network in networks:
        for name, value in start.state_dict().items():
            assert torch.equal(seen[0][network + name], value), network + name
    assert module.weights_source == f"trained from {tmp_path / 'w.pth'} (dino)"
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    (tmp_path / "w.pth").unlink()
    train(made(str(tmp_path / "w.pth")), epochs=2, ckpt_path=tmp_path / "run.ckpt", weights_only=True)
    end = module.state_dict()
    assert all(torch.equal(value, end[name]) for name, value in seen[1].items())
