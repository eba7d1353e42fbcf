"""What timm's families take, and what they say to the rest; benchmarks/timm_sweep.py goes over all of them."""

from pathlib import Path

import pytest
import timm
import torch

from backbones import TimmModel


def test_options_that_a_family_does_not_have_are_named():
    with pytest.raises(ValueError, match="img_size=64: timm's resnet18 does not have this option; leave it null"):
        TimmModel("resnet18", img_size=64)
    with pytest.raises(ValueError, match=r"drop_path=0\.1: timm's vgg11 does not have this option; set drop_path to 0"):
        TimmModel("vgg11", drop_path=0.1)
    with pytest.raises(ValueError, match="no gradient checkpointing"):
        TimmModel("pit_ti_224").set_grad_checkpointing()
    TimmModel("pit_ti_224").set_grad_checkpointing(False)
    tiny = {"depth": 1, "img_size": 32}
    timm.create_model("vim_tiny_patch16_224", drop_rate=0.0, **tiny)
    with pytest.raises(ValueError, match=r"drop_rate=0\.1; these backbones have no dropout"):
        timm.create_model("vim_tiny_patch16_224", drop_rate=0.1, **tiny)


def test_sizes_that_a_family_does_not_take_are_named():
    """With what it takes; other faults keep their own words."""
    levit = TimmModel("levit_128s")
    said = r"timm's levit_128s does not take images of 96 x 64 .*takes 224 x 224: set data.init_args.crop.*local_size to 224"
    for ask in (levit, levit.forward_intermediates, levit.forward_readouts):
        with pytest.raises(ValueError, match=said):
            ask(torch.zeros(2, 3, 96, 64))
    assert levit.training
    with pytest.raises(ValueError, match=r"does not take images of 32 x 32 .*as it is built it takes 64 x 64: set"):
        TimmModel("levit_128s", img_size=64)(torch.zeros(2, 3, 32, 32))
    with pytest.raises(
        ValueError, match=r"test_vit does not take images of 60 x 64 .*multiples of 16 pixels, such as 64 x 64"
    ):
        TimmModel("test_vit")(torch.zeros(1, 3, 60, 64))
    crossed = TimmModel("crossvit_tiny_240", img_size=96)
    with pytest.raises(
        ValueError, match=r"does not take the size it was built for, 96 x 96.*published size is 240 x 240"
    ):
        crossed(torch.zeros(1, 3, 96, 96))
    with pytest.raises(ValueError, match=r"img_size=100: timm's nest_tiny cannot be built for it .*224 x 224"):
        TimmModel("nest_tiny", img_size=100)
    with pytest.raises(ValueError, match="more than 1 value per channel"):  # one image in training: the batch's fault
        TimmModel("test_resnet")(torch.zeros(1, 3, 32, 32))
    with pytest.raises(RuntimeError, match="channels"):
        TimmModel("test_resnet")(torch.zeros(2, 5, 32, 32))
    swin = TimmModel("swin_tiny_patch4_window7_224").eval()  # built to take any
    assert swin(torch.zeros(1, 3, 96, 64)).shape == (1, swin.num_features)


@pytest.mark.parametrize(
    "name",
    ["test_convnext", "test_efficientnet", "test_vit", "levit_128s", "test_mambaout", "test_vit_relpos"],
)
def test_a_family_trains_and_is_evaluated(name, monkeypatch):
    """What the whole sweep does with one model of every family of timm's: ``python benchmarks/timm_sweep.py``."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from timm_sweep import check_family

    found = check_family(name)
    assert found["local"] != found["size"] or found["notes"] == ["one size"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "name is empty; give one of timm's registry, such as"),
        ("test_vitt", "timm has no model 'test_vitt'; near it: test_vit"),
        (
            "test_vit.nope",
            r"name='test_vit\.nope': timm's test_vit has no weights of the tag 'nope'; its tags: r160_in1k",
        ),
        ("vgg11.", None),
        (
            "hf-hub:timm/test_vit.r160_in1k",
            r"is an address.*write name: test_vit\.r160_in1k, of which pretrained: true",
        ),
        (
            "timm/test_vit.r160_in1k",
            r"write name: test_vit\.r160_in1k, of which pretrained: true takes the same weights",
        ),
        ("hf-hub:somebody/model", "is an address.*name of its architecture.*backbone_weights"),
        ("local-dir:/data/test_vit", "write name: test_vit, of which"),
        ("vim_tiny_patch16_224", "one of this project's own.*class_path: backbones.VisionMamba with its own init_args"),
        ("mambar_small_mamba1_patch16_224", "class_path: backbones.MambaRegMamba1"),
    ],
)
def test_names(name, said):
    if said is None:
        TimmModel(name)
    else:
        with pytest.raises(ValueError, match=said):
            TimmModel(name)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_efficientnet", "test_convnext", "test_vit4"])
def test_what_the_embedding_is_follows_its_pooling(name):
    torch.manual_seed(0)
    model, images = TimmModel(name).eval(), torch.randn(2, 3, 64, 64)
    refused = 0
    for pool in ("avg", "max", "catavgmax", "token", "", "avg"):
        for classes in (0, 5):
            if classes and not pool:
                with pytest.raises(ValueError, match="num_classes=5 with global_pool='': a classifier reads pooled"):
                    model.reset_classifier(classes, pool)
                continue
            try:
                model.reset_classifier(classes, pool)
            except ValueError as error:
                assert f"global_pool={pool!r}: timm's {name} does not take it" in str(error)
                refused += 1
                continue
            with torch.no_grad():
                embedding, last = model.embedding(images), model.forward_readouts(images)[0]
                assert model(images).shape == ((2, 5) if classes else embedding.shape)
            assert embedding.shape[1 if embedding.ndim == 4 else -1] == model.num_features
            assert last.cls.shape == (2, model.cls_widths[-1])
            if pool and model.embedding_is_cls:
                torch.testing.assert_close(last.cls, embedding)
            elif pool:
                assert not torch.equal(last.cls, embedding)
    assert refused in (2, 4) and model.num_features == TimmModel(name).num_features
    with pytest.raises(ValueError, match=f"global_pool='nope': timm's {name} does not take it"):
        model.reset_classifier(0, "nope")


def test_configurations_of_our_sizes():
    """What timm's users give for input statistics reaches timm's own reader of them."""
    tiny = {"depth": 1, "img_size": 32}
    half = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    for given in (
        {"pretrained_cfg_overlay": half}, {"pretrained_cfg": half},
        {"pretrained_cfg": {"mean": (0.1,) * 3, "std": (0.5,) * 3}, "pretrained_cfg_overlay": {"mean": (0.5,) * 3}},
        {"pretrained_cfg": timm.models.PretrainedCfg(**half)},
    ):  # fmt: skip
        model = timm.create_model("vim_tiny_patch16_224", **given, **tiny)
        read = timm.data.resolve_model_data_config(model)
        assert read["mean"] == read["std"] == (0.5,) * 3 and read["input_size"] == (3, 32, 32)
        assert model.num_classes == 0 and model.default_cfg == model.pretrained_cfg
    model = timm.create_model("linear_vit_small_patch16_224", pretrained_cfg={"num_classes": 4}, **tiny)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 4)
    grey = {"input_size": (1, 32, 32)}
    assert timm.create_model("vim_tiny_patch16_224", pretrained_cfg_overlay=grey, **tiny).in_chans == 1
    with pytest.raises(ValueError, match="pretrained_cfg has 'meen'; allowed: architecture"):
        timm.create_model("vim_tiny_patch16_224", pretrained_cfg_overlay={"meen": 0}, **tiny)
    with pytest.raises(ValueError, match=r"vim_tiny_patch16_224\.in1k: no weights are published through timm"):
        timm.create_model("vim_tiny_patch16_224.in1k", **tiny)
