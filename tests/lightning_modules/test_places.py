"""Linear heads that read different places of a backbone."""

import pytest
import torch

from backbones import MambaReg, VimMamba1, VisionTransformer
from callbacks.settings import compare, refused
from lightning_modules import HeadSpec, LinearProbe, RobustnessEvaluation
from lightning_modules.places import Places
from tests.lightning_modules.test_probe import Batches, evaluate, labelled, trainer

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 3}


def mambar(**kwargs):
    torch.manual_seed(0)
    return MambaReg(**SMALL, d_state=4, headdim=8, num_registers=2, **kwargs)


def vit():
    torch.manual_seed(0)
    return VisionTransformer(**SMALL, num_heads=2)


SPECS = [
    HeadSpec(2, "cls+register1"),
    HeadSpec(block=0, pooling="mean", stream="residual"),
    HeadSpec(block=-1, pooling="head3+head0"),
    HeadSpec(block=1, pooling="register0", stream="branch"),
    HeadSpec(block=1, pooling="max+head2", stream="residual"),
]


def test_each_head_reads_its_place():
    model = mambar().double().eval()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    branch, residual = (model.forward_intermediates(images, 3, stream) for stream in ("branch", "residual"))
    heads = model.head_outputs(images, range(3))
    wanted = [
        [branch[1].cls, branch[2].cls, branch[1].registers[:, 1], branch[2].registers[:, 1]],
        [residual[0].patches.mean((2, 3))],
        [heads[2][:, 3], heads[2][:, 0]],
        [branch[1].registers[:, 0]],
        [residual[1].patches.amax((2, 3)), heads[1][:, 2]],
    ]
    passes = []
    model.patch_embed.register_forward_hook(lambda *_: passes.append(1))
    places = Places(model, SPECS, "published")
    found = places.split(places.read(images))
    assert len(passes) == places.passes == 3  # of the streams asked for, and of the mixers' heads
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, torch.cat(theirs, 1), atol=1e-12, rtol=0)
    sizes = [16] * 3, 5, None, model.mixer_heads
    assert [spec.build(*sizes)[1].in_features for spec in SPECS] == [64, 16, 16, 16, 24]


def test_what_the_module_reads_is_the_default():
    model = mambar().eval()
    images = torch.randn(2, 3, 16, 16)
    (residual,) = model.forward_intermediates(images, 1, "residual")
    places = Places(model, [HeadSpec(1)], "residual")
    assert places.passes == 1 and torch.equal(places.read(images), residual.cls)


def test_names():
    """Those of heads without the newer fields stay: checkpoints and pages know them."""
    assert HeadSpec(4, "cls", 0.001, 0.0).name == "n4_cls_lr0.001_wd0"
    assert HeadSpec(1, "cls+mean", 0.3, 1e-4, True).name == "n1_cls+mean_bn_lr0.3_wd0.0001"
    assert HeadSpec(block=0, lr=1.0).name == "block0_cls_lr1_wd0"
    assert HeadSpec(block=-1, pooling="head2", stream="branch", batch_norm=True).name == (
        "block-1_head2_branch_bn_lr0.001_wd0"
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (HeadSpec(block=3), r"heads: block=3; the backbone has blocks 0..2 \(or -3..-1\)"),
        (HeadSpec(block=-4), r"heads: block=-4; "),
        (HeadSpec(1, stream="both"), r"heads: stream='both'; allowed: published, branch, residual, or null"),
        (HeadSpec(block=-1, pooling="head4"), r"pooling='head4': the mixer of block 2 has 4 heads, counted from 0"),
        (HeadSpec(1, "head"), r"'head' is not one of cls, mean, max, register0, …, head0, …"),
    ],
)
def test_wrong_places(spec, words):
    with pytest.raises(ValueError, match=words):
        LinearProbe(mambar(), [spec])


def test_mixers_without_heads():
    with pytest.raises(ValueError, match=r"pooling='head0': this backbone's token mixers give no heads' outputs"):
        LinearProbe(VimMamba1(**SMALL, d_state=4), [HeadSpec(1, "head0")])


def test_rows_say_what_was_read(tmp_path):
    probe = LinearProbe(mambar(), [HeadSpec(1, lr=1.0), *SPECS[1:4]], num_classes=3)
    trainer(tmp_path, max_epochs=1).fit(probe, Batches(labelled(2)))
    read = [(row["n_last_blocks"], row["block"], row["stream"], row["reading"]) for row in probe.rows()]
    assert read == [
        (1, None, "branch", "published"),
        (None, 0, "residual", "other"),
        (None, -1, "branch", "published"),
        (None, 1, "branch", "published"),
    ]
    assert probe.counts()["backbone_passes_per_training_image"] == 3


def test_a_trained_head_of_any_place_on_sets(tmp_path):
    probe = LinearProbe(vit(), [HeadSpec(block=1, pooling="head1+mean", stream="branch", lr=1.0)], num_classes=3)
    run = trainer(tmp_path)
    run.fit(probe, Batches(labelled(3)))
    run.save_checkpoint(tmp_path / "probe.ckpt")
    batch = labelled(1, seed=5)[0]
    module = RobustnessEvaluation(vit(), str(tmp_path / "probe.ckpt"))
    module.spec, module.head = probe.trained_head()
    module._weights = str(tmp_path / "probe.ckpt")
    found = evaluate(tmp_path, module, [[{"image": batch["image"], "answers": batch["label"][:, None]}]], {"set": None})
    right = probe.eval().logits(probe.encode(batch["image"]))[0].argmax(1) == batch["label"]
    assert found["set"] == (pytest.approx(right.float().mean().item()), 4)


def test_what_a_head_reads_stays_on_resume():
    """A run of before these options goes on; another place is refused."""
    old = {"model.init_args.heads.0.pooling": "cls", "model.init_args.heads.0.n_last_blocks": 1}
    new = old | {"model.init_args.heads.0.block": None, "model.init_args.heads.0.stream": None}
    probe = LinearProbe(mambar(), [HeadSpec(1)])
    assert compare(old, new) == []
    for key, value in (("block", 0), ("stream", "residual")):
        asked = new | {f"model.init_args.heads.0.{key}": value}
        for before in (old, new):
            (change,) = refused(compare(before, asked), probe.backbone, probe)
            assert change.key == f"model.init_args.heads.0.{key}" and change.now == value
