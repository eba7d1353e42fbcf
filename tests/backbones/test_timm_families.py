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
