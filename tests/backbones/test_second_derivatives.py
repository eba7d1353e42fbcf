"""Derivatives of gradients, by plain autograd, against differences of gradients and against float64."""

from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from backbones import MambaReg, MambaRegMamba1, VimMamba1, VisionMamba
from backbones.ops import Directions, bidirectional_ssd, causal_conv, recompute, ssd
from tests.backbones.test_bidirectional import KERNELS, device, inputs, reference
from tests.backbones.test_ops import ssd_module
from tests.tiny_runs import ROOT

SIZES = dict(img_size=(16, 24), patch_size=8, embed_dim=16, depth=2, d_state=4)
FAMILIES = {
    "vim": lambda **more: VisionMamba(**SIZES, headdim=8, **more),
    "mambar": lambda **more: MambaReg(**SIZES, headdim=8, num_registers=2, **more),
    "vim_mamba1": lambda **more: VimMamba1(**SIZES, **more),
    "mambar_mamba1": lambda **more: MambaRegMamba1(**SIZES, num_registers=2, **more),
}
MAMBA2 = ("vim", "mambar")
CASES = [
    *(
        pytest.param(family, {"backend": b}, marks=[pytest.mark.slow] if b == "triton" else [])
        for family in MAMBA2
        for b in ("auto", "torch", "recurrent", *KERNELS)
    ),
    ("vim", {"backend": "torch", "chunk_size": 3}),
    *((family, {}) for family in FAMILIES if family not in MAMBA2),
]


pytestmark = pytest.mark.usefixtures("one_thread")


def build(family, options):
    """Of the same weights whatever the options, but for dtype."""
    torch.manual_seed(0)
    model = FAMILIES[family](**options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.1)
    return model.to(device(options.get("backend")))


def loss(model, images):
    return model(images).sin().sum()


def gradient(model, images, **how):
    images = images.detach().requires_grad_()
    return torch.autograd.grad(loss(model, images), images, **how)[0]


def along(model, images, v):
    """The Hessian times v."""
    images = images.detach().requires_grad_()
    g = torch.autograd.grad(loss(model, images), images, create_graph=True)[0]
    return torch.autograd.grad(g, images, v)[0]


def penalty(model, images):
    """||d loss / d images||², as a function of the parameters."""
    return gradient(model, images, create_graph=True).square().sum()


IMAGES, V = torch.randn(2, 2, 3, 16, 24, generator=torch.Generator().manual_seed(1))


@cache
def differences(family):
    """By differences of gradients in float64: the Hessian times V, and the penalty's derivative along a direction."""
    model = build(family, {"backend": "recurrent"} if family in MAMBA2 else {}).double()
    images, v, step = IMAGES.double(), V.double(), 1e-5
    hessian = (gradient(model, images + step * v) - gradient(model, images - step * v)) / (2 * step)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    direction, slope = {name: torch.randn_like(p) for name, p in weights.items()}, 0.0
    for sign in (1, -1):
        model.load_state_dict({name: p + sign * step * direction[name] for name, p in weights.items()})
        slope += sign * gradient(model, images).square().sum().item() / (2 * step)
    return hessian, direction, slope


def near(ours, expected, tolerance):
    return (ours.double().cpu() - expected.cpu()).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(("family", "options"), CASES, ids=str)
def test_hessian_and_gradient_penalty(family, options, checkpointing):
    model, there = build(family, options), device(options.get("backend"))
    model.set_grad_checkpointing(checkpointing)
    hessian, direction, slope = differences(family)
    assert near(along(model, IMAGES.to(there), V.to(there)), hessian, 1e-4)
    penalty(model, IMAGES.to(there)).backward()
    parts = [(p.grad.double().cpu() * direction[n]).sum() for n, p in model.named_parameters() if p.grad is not None]
    assert abs(sum(parts) - slope) <= 1e-4 * torch.stack(parts).norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_computed_again(family, monkeypatch):
    """As on a device that keeps little, in float64."""
    model = build(family, {}).double()
    monkeypatch.setattr(recompute, "KEEPING", ())
    assert near(along(model, IMAGES.double(), V.double()), differences(family)[0], 1e-6)


@pytest.mark.parametrize(("family", "options"), CASES, ids=str)
def test_rows_of_the_jacobian_at_once(family, options):
    model = build(family, options)
    images = torch.randn(1, 3, 16, 24).to(device(options.get("backend"))).requires_grad_()
    y = model(images)[0, :2]
    rows = [torch.autograd.grad(y, images, d, retain_graph=True) for d in torch.eye(2).to(y)]
    (at_once,) = torch.autograd.grad(y, images, torch.eye(2).to(y), is_grads_batched=True)
    torch.testing.assert_close(at_once, torch.stack([row for (row,) in rows]), atol=1e-6, rtol=1e-4)


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def test_convolution():
    """Also where one argument is made of another."""
    x, weight, bias = randn(2, 5, 3), randn(3, 4), randn(3)
    assert torch.autograd.gradgradcheck(causal_conv, (x, weight, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: causal_conv(x, x[0, :4].t(), x[0, 0]), (x,), fast_mode=True)


@pytest.mark.parametrize("counted", [False, True], ids=["", "counted"])
@pytest.mark.parametrize("chunk_size", [2, 8])
def test_scan(chunk_size, counted):
    def scan(x, dt, A, B, C, D):
        return ssd(x, dt.exp(), -A.exp(), B, C, D, chunk_size, "torch")

    inputs = randn(2, 5, 2, 3), randn(2, 5, 2), randn(2), randn(2, 5, 1, 2), randn(2, 5, 1, 2, seed=1), randn(2)
    with FlopCounterMode(display=False) if counted else nullcontext():
        assert torch.autograd.gradgradcheck(scan, inputs, fast_mode=True)


@pytest.mark.parametrize("kernels", KERNELS)
def test_third_derivatives_of_the_kernels(kernels):
    """Each step down is differentiable in its turn."""
    tensors, grad = inputs(5)
    sizes, results = {"headdim": 16, "state": 16, "groups": 1}, []
    for function, dtype in (
        (lambda x, *p: bidirectional_ssd(x, Directions(*p), **sizes, kernels=kernels), torch.float32),
        (lambda *a: reference(*a, **sizes), torch.float64),
    ):
        x, *parameters = [t.to(device(kernels), dtype).requires_grad_() for t in tensors]
        found = (function(x, *parameters) * grad.to(x)).sin().sum()
        for _ in range(2):
            found = torch.autograd.grad(found, x, create_graph=True)[0].square().sum()
        results.append(torch.autograd.grad(found, [x, *parameters]))
    assert all(near(a, b, 1e-3) for a, b in zip(*results, strict=True))


def test_of_mamba_ssm_they_are_refused(monkeypatch):
    """Its backward pass is kernels, which autograd would take for constants."""

    def kernel(x, dt, A, B, C, chunk_size, D):
        return _Opaque.apply(x)

    monkeypatch.setattr(ssd_module, "_mamba_ssm_kernel", lambda: kernel)
    x, dt, A, B = randn(1, 3, 2, 2), randn(1, 3, 2), randn(2), randn(1, 3, 1, 2)
    y = ssd(x, dt, A, B, B, backend="mamba_ssm").square().sum()
    torch.autograd.grad(y, x, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivatives .* set the backbone's backend to 'torch'"):
        torch.autograd.grad(y, x, create_graph=True)


class _Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad.detach() * 2


def test_no_function_of_ours_relies_on_once_differentiable():
    """It is no guard: torch.autograd.grad with inputs leaves its error out; see common/derivatives.py."""
    for folder in ("backbones", "lightning_modules", "heads", "metrics"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "once_differentiable" not in path.read_text(encoding="utf-8"), path
