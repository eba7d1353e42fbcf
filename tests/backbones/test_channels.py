"""Backbones of any number of channels, and weights of RGB in them."""

import logging

import pytest
import torch
from timm.models import adapt_input_conv

from backbones import LinearVisionTransformer, MambaReg, TimmModel, VimMamba1, VisionMamba, VisionTransformer, weights

SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1}
FAMILIES = {
    "vit": lambda c: VisionTransformer(**SIZES, num_heads=2, in_chans=c),
    "linear_vit": lambda c: LinearVisionTransformer(**SIZES, num_heads=2, in_chans=c),
    "vim": lambda c: VisionMamba(**SIZES, d_state=4, headdim=8, in_chans=c),
    "vim_mamba1": lambda c: VimMamba1(**SIZES, d_state=4, in_chans=c),
    "mambar": lambda c: MambaReg(**SIZES, d_state=4, headdim=8, num_registers=2, in_chans=c),
    "timm's ViT": lambda c: TimmModel("test_vit", img_size=32, in_chans=c),
    "timm's ResNet": lambda c: TimmModel("test_resnet", in_chans=c),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_rgb_in_other_channels(family, tmp_path, caplog):
    """One channel takes the sum, so grey images give what they gave as RGB; others repeat them as timm does."""
    torch.manual_seed(0)
    rgb = FAMILIES[family](3).eval()
    weights.export(rgb, tmp_path / "rgb.safetensors")
    assert rgb.in_chans == 3
    image = torch.rand(2, 1, 32, 32)
    for channels in (1, 5):
        other = FAMILIES[family](channels).eval()
        with caplog.at_level(logging.WARNING):
            weights.load(other, tmp_path / "rgb.safetensors")
        assert other.in_chans == channels and f"the backbone takes in_chans={channels}" in caplog.messages[-1]
        given = rgb.state_dict()[rgb.input_conv]
        assert torch.equal(other.state_dict()[other.input_conv], adapt_input_conv(channels, given))
        if channels == 1:
            torch.testing.assert_close(other(image), rgb(image.expand(-1, 3, -1, -1)), atol=1e-4, rtol=1e-4)
    weights.export(other, tmp_path / "five.safetensors")
    with pytest.raises(ValueError, match=r"shapes: .*, 5, .* wanted .*, 3, "):
        weights.load(rgb, tmp_path / "five.safetensors")  # which three there is no telling


def test_timms_attention_is_found_in_other_channels():
    model = TimmModel("test_vit", img_size=32, in_chans=5).eval()
    assert model.mixes_tokens() and model.cls_mixing(torch.rand(1, 5, 32, 32)).shape[-2:] == (2, 2)
    assert model(torch.rand(1, 5, 32, 32)).shape == (1, 64)
