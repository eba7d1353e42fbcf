"""The linear probe, and a trained one on other sets."""

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from backbones import MambaReg, VisionMamba
from lightning_modules import HeadSpec, LinearProbe, RobustnessEvaluation
from lightning_modules.places import Places
from lightning_modules.robustness import accepted

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 8, "d_state": 4, "headdim": 8}


def backbone(**kwargs):
    torch.manual_seed(0)
    return VisionMamba(**SMALL | kwargs)


def read(model, spec, images, stream="published"):
    """What one head reads."""
    places = Places(model, [spec], stream)
    return places.split(places.read(images))[0]


class Batches(LightningDataModule):
    """Batches as they are, for training and validation."""

    batch_size = 4

    def __init__(self, *loaders, classes=None):
        super().__init__()
        self.loaders = [DataLoader(batches, batch_size=None) for batches in loaders]
        self.classes = classes or {}

    def train_dataloader(self):
        return self.loaders[0]

    def val_dataloader(self):
        return self.loaders if self.classes else self.loaders[0]


def labelled(count, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {"image": torch.randn(4, 3, 16, 16, generator=generator), "label": torch.randint(classes, (4,), generator=generator)}
        for _ in range(count)
    ]  # fmt: skip


def trainer(tmp_path, **kwargs):
    return Trainer(
        default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, **{"max_epochs": 2, "num_sanity_val_steps": 0} | kwargs,
    )  # fmt: skip


@pytest.mark.parametrize("n", range(1, 9))
def test_features_of_the_last_blocks_by_hand(n):
    """The released protocol: norm_f of each mixer branch's output, without the residual stream, at the middle token."""
    model = backbone().double().eval()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    branches = []
    hooks = [block.mixer.register_forward_hook(lambda _, __, out: branches.append(out)) for block in model.layers]
    model(images)
    for hook in hooks:
        hook.remove()
    wanted = torch.cat([model.norm_f(branch)[:, 8] for branch in branches[-n:]], 1)
    found = read(model, HeadSpec(n_last_blocks=n), images)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


def test_many_heads_take_one_backbone_pass_an_image_and_learn_as_if_alone(tmp_path):
    specs = [HeadSpec(1, "cls", 1.0), HeadSpec(3, "cls+mean", 0.5, 1e-3), HeadSpec(2, "max", 2.0)]

    def fit(heads):
        model = backbone()
        probe = LinearProbe(model, heads, num_classes=3)
        for head in probe.heads:
            torch.nn.init.constant_(head[1].weight, 0.01)
        seen = 0
        forward = model.forward_intermediates

        def counted(images, n, stream):
            nonlocal seen
            seen += len(images)
            return forward(images, n, stream)

        model.forward_intermediates = counted
        trainer(tmp_path, enable_checkpointing=False, limit_val_batches=0).fit(probe, Batches(labelled(5)))
        return probe, seen

    together, seen = fit(specs)
    assert seen == 2 * 5 * 4  # epochs, batches, images
    assert together.counts() == {"heads": 3, "training_images": 40, "backbone_passes_per_training_image": 1.0}
    for spec, head in zip(specs, together.heads, strict=True):
        alone, _ = fit([spec])
        torch.testing.assert_close(head[1].weight, alone.heads[0][1].weight, atol=1e-6, rtol=1e-5)


def test_registers_one_by_one():
    torch.manual_seed(0)
    model = MambaReg(**SMALL | {"depth": 2, "num_registers": 3}).eval()
    images = torch.randn(2, 3, 16, 16)
    features = model.forward_intermediates(images, 2)
    found = read(model, HeadSpec(2, "register2+register0"), images)
    wanted = [f.registers[:, r] for r in (2, 0) for f in features]
    assert torch.equal(found, torch.cat(wanted, 1))
    with pytest.raises(ValueError, match=r"pooling='cls\+register3': this backbone has 3 registers, counted from 0"):
        LinearProbe(model, [HeadSpec(1, "cls+register3")])
    with pytest.raises(ValueError, match=r"this backbone has 0 registers"):
        LinearProbe(VisionMamba(**SMALL), [HeadSpec(1, "register0")])
    with pytest.raises(ValueError, match=r"'register' is not one of cls, mean, max, register0"):
        LinearProbe(model, [HeadSpec(1, "register")])


def test_an_answer_is_sought_among_the_classes_of_the_set():
    logits = torch.tensor([[9.0, 1.0, 2.0, 3.0], [0.0, 5.0, 4.0, 1.0]])
    right = torch.tensor([[3, -1], [1, 2]])
    assert accepted(logits, right, None).tolist() == [False, True]  # the naive way: all logits
    assert accepted(logits, right, [1, 3]).tolist() == [True, True]
    assert accepted(logits, right, [2, 3]).tolist() == [True, True]
    assert accepted(logits, right, [0, 3]).tolist() == [False, False]


def evaluate(tmp_path, module, sets, classes):
    data = Batches(*sets, classes=classes)
    trainer(tmp_path).validate(module, data, verbose=False)
    return {row["set"]: (row["top1"], row["images"]) for row in module.rows()}


def test_a_trained_probe_on_sets(tmp_path):
    """The numbers are those of the head applied by hand; images without an answer are not counted."""
    model = backbone(depth=2)
    probe = LinearProbe(model, [HeadSpec(1, "cls", 1.0), HeadSpec(2, "mean", 1.0)], num_classes=3)
    run = trainer(tmp_path)
    run.fit(probe, Batches(labelled(3)))
    path = tmp_path / "probe.ckpt"
    run.save_checkpoint(path)
    batch = {k: v for k, v in labelled(1, seed=5)[0].items()}
    answers = torch.tensor([[0, 1], [2, -1], [-1, -1], [1, -1]])
    empty = {"image": torch.zeros(0, 3, 16, 16), "answers": torch.zeros(0, 2, dtype=torch.int64)}
    sets = [[{"image": batch["image"], "answers": answers}, empty], [{"image": batch["image"], "answers": answers}]]
    classes = {"all": None, "some": [1, 2]}
    for name, index in (("n1_cls_lr1_wd0", 0), ("n2_mean_lr1_wd0", 1)):
        other = RobustnessEvaluation(backbone(depth=2, img_size=16), str(path), head_name=name)
        # built in Python, the checkpoint holds no backbone or heads to build: as the command line has them
        other.spec, other.head = probe.trained_head(name)
        other._weights = str(path)
        found = evaluate(tmp_path, other, sets, classes)
        logits = probe.eval().logits(probe.encode(batch["image"]))[index]
        for key, among in classes.items():
            hits = [bool(hit) for hit in accepted(logits, answers, among)]
            assert found[key] == (pytest.approx((hits[0] + hits[1] + hits[3]) / 3), 3)


def test_a_published_classifier(tmp_path):
    model = backbone(depth=2)
    torch.save(model.state_dict(), tmp_path / "backbone.pth")
    weight, bias = torch.randn(5, 32), torch.randn(5)
    state = {"module.linear.weight": weight, "module.linear.bias": bias}
    torch.save({"epoch": 1, "state_dict": state, "best_acc": 1.0}, tmp_path / "checkpoint.pth.tar")
    batch = labelled(1, classes=5)[0]
    sets = [[{"image": batch["image"], "answers": batch["label"][:, None]}]]
    options = {"backbone_weights": str(tmp_path / "backbone.pth"), "head": HeadSpec(2), "num_classes": 5}
    module = RobustnessEvaluation(VisionMamba(**SMALL | {"depth": 2}), str(tmp_path / "checkpoint.pth.tar"), **options)
    found = evaluate(tmp_path, module, sets, {"set": None})
    features = torch.cat([f.cls for f in model.eval().forward_intermediates(batch["image"], 2)], 1)
    right = ((features @ weight.T + bias).argmax(1) == batch["label"]).float().mean().item()
    assert found["set"] == (pytest.approx(right), 4)
    with pytest.raises(ValueError, match=r"is a classifier alone: say what it reads"):
        evaluate(tmp_path, RobustnessEvaluation(model, str(tmp_path / "checkpoint.pth.tar")), sets, {"set": None})
    with pytest.raises(ValueError, match=r"has a weight of \(5, 32\); the head n1_cls_lr0.001_wd0 .* wants \(5, 16\)"):
        wrong = RobustnessEvaluation(
            model, str(tmp_path / "checkpoint.pth.tar"), **options | {"head": HeadSpec(1)}
        )  # fmt: skip
        evaluate(tmp_path, wrong, sets, {"set": None})
