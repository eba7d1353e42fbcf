"""Backbones against the published implementations' outputs, in float64."""

import re

import pytest
import torch
from safetensors.torch import load_file

from backbones import MambaReg, MambaRegMamba1, VimMamba1, VisionMamba, VisionTransformer, weights
from tests.golden_files import golden_files, present


def shared_dims_of(state, inner):
    """Constructor arguments that both kinds of Mamba have, read from the shapes of their state."""
    embed_dim = state["norm_f.weight"].shape[0]
    patch = state["patch_embed.proj.weight"].shape[-1]
    registers = state["cls_token"].shape[1] if "pos_embed_cls" in state else 0
    tokens = state["pos_embed"].shape[1] - (0 if registers else 1)
    dims = {
        "embed_dim": embed_dim,
        "depth": 1 + max(int(re.match(r"layers\.(\d+)", k)[1]) for k in state if k.startswith("layers.")),
        "patch_size": patch,
        "img_size": patch * round(tokens**0.5),
        "expand": inner // embed_dim,
        "d_conv": state["layers.0.mixer.conv1d.weight"].shape[-1],
    }
    return dims | ({"num_registers": registers} if registers else {})


def dims_of(state):
    """Constructor arguments of a Mamba-2 backbone."""
    mixer = "layers.0.mixer."
    inner = state[mixer + "norm.weight"].shape[0]
    headdim = inner // state[mixer + "A_log"].shape[0]
    d_state = (state[mixer + "conv1d.weight"].shape[0] - inner) // 2
    return shared_dims_of(state, inner) | {"headdim": headdim, "d_state": d_state}


def supervised_dims_of(state):
    """Constructor arguments of a supervised Mamba-1 model."""
    inner, d_state = state["layers.0.mixer.A_log"].shape
    dims = shared_dims_of(state, inner) | {"d_state": d_state, "num_classes": state["head.weight"].shape[0]}
    if "neck.weight" in state:
        dims["cls_reduce"] = dims["embed_dim"] // state["neck.weight"].shape[0]
    return dims


def open_golden(path):
    tensors = load_file(present(path))
    state = {k.removeprefix("state/"): v for k, v in tensors.items() if k.startswith("state/")}
    sizes = [k.removeprefix("input/") for k in tensors if k.startswith("input/")]
    return tensors, state, sizes


def last_of(tensors, size):
    """(B, n, D): the image embedding after each of the last n blocks."""
    return next(v for k, v in tensors.items() if re.fullmatch(rf"last\d+/{size}", k))


def close(ours, golden):
    torch.testing.assert_close(ours, golden.double(), atol=1e-5, rtol=0)


def check_mamba(path, family, backend):
    tensors, state, sizes = open_golden(path)
    model = family(**dims_of(state), backend=backend).double().eval()
    model.load_state_dict({k: v.double() for k, v in state.items()})
    for size in sizes:
        images = tensors[f"input/{size}"].double()
        close(model(images), tensors[f"cls/{size}"])
        last = last_of(tensors, size)
        ours = torch.stack([f.cls for f in model.forward_intermediates(images, last.shape[1])], 1)
        close(ours, last)


@pytest.mark.parametrize("backend", ["torch", "recurrent"])
@golden_files("vim*.safetensors", without="*mamba1*")
def test_vim(path, backend):
    check_mamba(path, VisionMamba, backend)


@pytest.mark.parametrize("backend", ["torch", "recurrent"])
@golden_files("mambar*.safetensors", without="*mamba1*")
def test_mambar(path, backend):
    check_mamba(path, MambaReg, backend)


@golden_files("*mamba1*.safetensors")
def test_supervised(path, tmp_path):
    """From a file in the published layout, ``ckpt["model"]``: features and logits, and the backbone by itself."""
    tensors, state, sizes = open_golden(path)
    family = MambaRegMamba1 if "neck.weight" in state else VimMamba1
    torch.save({"model": state, "epoch": 299}, tmp_path / "published.pth")
    model, alone = (family(**(supervised_dims_of(state) | classes)) for classes in ({}, {"num_classes": 0}))
    for each in (model, alone):
        assert weights.load(each, tmp_path / "published.pth") == "supervised"
        each.double().eval()
    for size in sizes:
        images = tensors[f"input/{size}"].double()
        close(model.pre_logits(images), tensors[f"features/{size}"])
        close(model.logits(images), tensors[f"logits/{size}"])
        assert torch.equal(alone(images), model.embedding(images))


@golden_files("vit*.safetensors")
def test_vit(path):
    tensors, state, sizes = open_golden(path)
    patch = state["patch_embed.proj.weight"].shape[-1]
    model = VisionTransformer(
        img_size=patch * round((state["pos_embed"].shape[1] - 1) ** 0.5),
        patch_size=patch,
        embed_dim=state["norm.weight"].shape[0],
        depth=1 + max(int(k.split(".")[1]) for k in state if k.startswith("blocks.")),
        num_heads=tensors[f"attn/{sizes[0]}"].shape[1],
        mlp_ratio=state["blocks.0.mlp.fc1.weight"].shape[0] / state["norm.weight"].shape[0],
    )
    model.load_state_dict(state)
    model = model.double().eval()
    for size in sizes:
        images = tensors[f"input/{size}"].double()
        close(model(images), tensors[f"cls/{size}"])
        last = last_of(tensors, size)
        close(torch.stack([f.cls for f in model.forward_intermediates(images, last.shape[1])], 1), last)
        close(model.token_mixing(images), tensors[f"attn/{size}"])
        close(model.cls_mixing(images).flatten(2), tensors[f"attn/{size}"][:, :, 0, 1:])
