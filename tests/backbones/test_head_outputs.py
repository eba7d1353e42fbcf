"""Outputs of a token mixer's heads at the class token, before the output projection."""

import pytest
import torch

from backbones import LinearVisionTransformer, MambaReg, TimmModel, VimMamba1, VisionMamba, VisionTransformer

SIZE = {"img_size": (20, 12), "patch_size": 4, "embed_dim": 24, "depth": 3}  # 5 x 3 patches
FAMILIES = {
    "vit": (VisionTransformer, {"num_heads": 3, "num_registers": 2}, (3, 8), "proj"),
    "linear_vit": (LinearVisionTransformer, {"num_heads": 3}, (3, 8), "proj"),
    "vim": (VisionMamba, {"d_state": 5, "headdim": 8}, (6, 8), "out_proj"),
    "mambar": (MambaReg, {"d_state": 5, "headdim": 6, "num_registers": 2}, (8, 6), "out_proj"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_projected_side_by_side_they_are_the_branch(family):
    kind, options, shape, projection = FAMILIES[family]
    torch.manual_seed(0)
    model = kind(**SIZE, **options).double().eval()
    images = torch.randn(2, 3, 20, 12, dtype=torch.float64)
    assert model.mixer_heads == [shape] * 3
    found = model.head_outputs(images, (2, 0))
    assert [tuple(outputs.shape) for outputs in found] == [(2, *shape)] * 2
    branches = model.forward_intermediates(images, (0, 2), "branch")
    for outputs, block, branch in zip(found, (2, 0), reversed(branches), strict=True):
        mixer = getattr(model._blocks[block], model.mixer_name)
        projected = model._final_norm(getattr(mixer, projection)(outputs.flatten(1)))
        if family != "mambar":  # the norm of a mean is not the mean of norms
            torch.testing.assert_close(projected, branch.cls, atol=1e-10, rtol=0)
    kept = []
    mixer = getattr(model._blocks[2], model.mixer_name)
    hook = getattr(mixer, projection).register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    model(images)
    hook.remove()
    _, layout = model._embed(images)
    torch.testing.assert_close(found[0].flatten(1), kept[0][:, layout.readout].mean(1), atol=1e-10, rtol=0)


def test_families_without_heads_say_so():
    model = VimMamba1(**SIZE, d_state=4)
    assert model.mixer_heads == []
    with pytest.raises(ValueError, match="VimMamba1: its mixers' channels are not grouped in heads"):
        model.head_outputs(torch.zeros(1, 3, 20, 12))
    other = TimmModel("vit_tiny_patch16_224", img_size=32)
    assert other.mixer_heads == []
    with pytest.raises(ValueError, match="TimmModel does not give the outputs of its mixers' heads"):
        other.head_outputs(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize("block", [3, -4])
def test_blocks_that_are_not_there(block):
    with pytest.raises(ValueError, match=rf"block={block}: this backbone has blocks 0..2"):
        VisionMamba(**SIZE, d_state=4, headdim=8).head_outputs(torch.zeros(1, 3, 20, 12), (block,))
