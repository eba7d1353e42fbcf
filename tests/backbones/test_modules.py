"""Modules act as modules: wrapped, hooked, pruned, parametrised and quantised ones are called, by no kernel passed over."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize, prune

from backbones import LinearVisionTransformer, MambaReg, MambaRegMamba1, VimMamba1, VisionMamba, VisionTransformer

SIZES = dict(img_size=16, patch_size=8, embed_dim=16, depth=2)
FAMILIES = {
    "vit": lambda: VisionTransformer(**SIZES, num_heads=2),
    "linear_vit": lambda: LinearVisionTransformer(**SIZES, num_heads=2),
    "vim": lambda: VisionMamba(**SIZES, d_state=4, headdim=8),
    "vim in C": lambda: VisionMamba(**SIZES, d_state=4, headdim=8, backend="c"),
    "vim recurrent": lambda: VisionMamba(**SIZES, d_state=4, headdim=8, backend="recurrent"),
    "mambar": lambda: MambaReg(**SIZES, d_state=4, headdim=8, num_registers=2),
    "vim_mamba1": lambda: VimMamba1(**SIZES, d_state=4),
    "mambar_mamba1": lambda: MambaRegMamba1(**SIZES, d_state=4, num_registers=2),
}
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
every_family = pytest.mark.parametrize("family", FAMILIES)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


def build(family):
    torch.manual_seed(0)
    model = FAMILIES[family]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.05)
    return model


def leaves(model, kinds=nn.Module):
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, kinds) and next(module.parameters(recurse=False), None) is not None
        and not list(module.children())
    }  # fmt: skip


def close(a, b):
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@every_family
def test_hooks_are_called(family):
    """On each module and on all of them, before, behind and in the backward pass."""
    model = build(family)
    expected, wanted = model(IMAGES), leaves(model)
    seen = {"before": set(), "after": set(), "back": set(), "all": set()}
    names = {module: name for name, module in wanted.items()}
    hook = register_module_forward_hook(lambda module, given, out: seen["all"].add(names.get(module)))
    try:
        close(model(IMAGES), expected)
    finally:
        hook.remove()
    for name, module in wanted.items():
        module.register_forward_pre_hook(lambda module, given, name=name: seen["before"].add(name))
        module.register_forward_hook(lambda module, given, out, name=name: seen["after"].add(name))
        module.register_full_backward_hook(lambda module, given, out, name=name: seen["back"].add(name))
    out = model(IMAGES)
    out.sum().backward()
    close(out, expected)
    assert all(wanted.keys() <= found for found in seen.values())


@every_family
def test_what_a_hook_returns_counts(family):
    model = build(family)
    expected = model(IMAGES)
    for name, module in leaves(model).items():
        hook = module.register_forward_hook(lambda module, given, out: out * 1.5)
        assert not torch.equal(model(IMAGES), expected), name
        hook.remove()
    assert torch.equal(model(IMAGES), expected)


class LoRA(nn.Module):
    """Without attributes of what it stands for."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside
        self.down = nn.Linear(inside.in_features, 2, bias=False)
        self.up = nn.Linear(2, inside.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.inside(x) + self.up(self.down(x))


@every_family
def test_wrapped_linear_layers_learn(family):
    model = build(family)
    expected = model(IMAGES)
    for name, module in leaves(model, nn.Linear).items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, LoRA(module))
    out = model(IMAGES)
    close(out, expected)
    out.sin().sum().backward()
    dead = [name for name, p in model.named_parameters() if "up.weight" in name and not p.grad.any()]
    assert not dead


@every_family
@pytest.mark.parametrize("how", ["pruned", "parametrised"])
def test_weights_made_anew_at_each_call(family, how):
    """The original learns, and a step of it shows."""
    model = build(family)
    expected, changed = model(IMAGES), leaves(model, (nn.Linear, nn.Conv1d))
    for module in changed.values():
        if how == "pruned":
            prune.custom_from_mask(module, "weight", torch.ones_like(module.weight))
        else:
            parametrize.register_parametrization(module, "weight", Doubled())
    close(model(IMAGES), expected)
    for _ in range(2):  # a graph of its own for each step
        model.zero_grad()
        model(IMAGES).sin().sum().backward()
    for name, module in changed.items():
        original = module.weight_orig if how == "pruned" else module.parametrizations.weight.original
        assert original.grad.any(), name
        before = model(IMAGES)
        with torch.no_grad():
            original.mul_(1.5)
        assert not torch.equal(model(IMAGES), before), name


class Doubled(nn.Module):
    def forward(self, halves):
        return halves * 2

    def right_inverse(self, weight):
        return weight / 2


@every_family
def test_quantised_linear_layers(family):
    model = build(family).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, torch.qint8)
    assert not leaves(quantised, nn.Linear)
    expected = model(IMAGES)
    assert (quantised(IMAGES) - expected).norm() < 0.1 * expected.norm()


@every_family
def test_a_forward_of_its_own(family):
    """As libraries that move weights between devices put it into a module."""
    model, seen = build(family), set()
    for name, module in leaves(model).items():

        def forward(*given, inside=module.forward, name=name):
            seen.add(name)
            return inside(*given)

        module.forward = forward
    model(IMAGES)
    assert seen == leaves(model).keys()
