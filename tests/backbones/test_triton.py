"""The Triton kernels against float64 recurrences.

They run on the CPU by Triton's interpreter, which conftest.py asks for; TRITON_INTERPRET=0 runs them on a GPU.
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import backbones
from backbones.mixers import BidirectionalMamba2
from backbones.ops import Directions, bidirectional_ssd, causal_conv_reference, gated_rms_norm, ssd_recurrent

pytest.importorskip("triton")  # torch brings it on Linux only
from backbones.ops import triton_conv, triton_norm, triton_ssd
from tests.tiny_runs import ROOT

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
NAMES = ("zxBCdt", *Directions._fields)


def reference(zxBCdt, *parameters, headdim, state, groups):
    """The definition, one token at a time."""
    p = Directions(*parameters)
    z, xBC, dt = p.parts(zxBCdt)
    total = 0
    for i, ends in enumerate((lambda t: t, lambda t: t.flip(1))):
        x, B, C = F.silu(causal_conv_reference(ends(xBC), p.conv_weight[i].t(), p.conv_bias[i])).split(
            [z.shape[2], groups * state, groups * state], -1
        )
        x, B, C = x.unflatten(-1, (-1, headdim)), B.unflatten(-1, (groups, state)), C.unflatten(-1, (groups, state))
        y = ssd_recurrent(x, F.softplus(ends(dt) + p.dt_bias[i]), -p.A_log[i].exp(), B, C, p.D[i]).flatten(2)
        total = total + gated_rms_norm(ends(y), z, p.norm_weight[i], 1e-5, groups)
    return total / 2


def inputs(length, b=2, heads=2, headdim=16, state=16, groups=1, taps=4, dtype=torch.float32, decay=1.0):
    g = torch.Generator().manual_seed(length + heads)

    def randn(*shape, mean=0.0, scale=1.0):
        return torch.randn(*shape, generator=g) * scale + mean

    inner = heads * headdim
    channels = inner + 2 * groups * state
    tensors = (
        randn(b, length, inner + channels + heads).to(dtype),
        randn(2, taps, channels, scale=0.5), randn(2, channels, scale=0.1), randn(2, heads, mean=-2),
        randn(2, heads, mean=1) + torch.tensor(decay).log(), randn(2, heads), randn(2, inner, mean=1, scale=0.2),
    )  # fmt: skip
    return [t.to(DEVICE) for t in tensors], randn(b, length, inner).to(DEVICE, dtype)


def both(length, **shape):
    """Output and gradients: ours, and the definition's in float64 of the same values."""
    tensors, grad = inputs(length, **shape)
    sizes = {
        name: shape.get(name, {"headdim": 16, "state": 16, "groups": 1}[name])
        for name in ("headdim", "state", "groups")
    }
    results = []
    for function, cast in (
        (lambda zxBCdt, *p: bidirectional_ssd(zxBCdt, Directions(*p), **sizes), lambda t: t.clone()),
        (lambda *a: reference(*a, **sizes), lambda t: t.double()),
    ):
        leaves = [cast(t).requires_grad_() for t in tensors]
        y = function(*leaves)
        results.append((y, torch.autograd.grad(y, leaves, cast(grad))))
    return tensors, *results


def close(tensors, ours, theirs, tolerance):
    (y, grads), (expected, expected_grads) = ours, theirs
    assert y.dtype == tensors[0].dtype
    assert (y.double() - expected).norm() <= tolerance * expected.norm()
    # what a change of an argument by its own size does: gradients of decays are differences of large sums
    effects = [(g * t).norm() for g, t in zip(expected_grads, tensors, strict=True)]
    for name, g, e, t in zip(NAMES, grads, expected_grads, tensors, strict=True):
        assert g.dtype == t.dtype and ((g.double() - e) * t).norm() <= tolerance * max(effects), name
    for part, expected in zip(
        Directions(*tensors[1:]).parts(grads[0]), Directions(*tensors[1:]).parts(expected_grads[0]), strict=True
    ):  # z, xBC and dt, each by its own measure
        assert (part.double() - expected).norm() <= 3 * tolerance * expected.norm()


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 37, 65, 70])
def test_lengths(length):
    close(*both(length), 1e-5)


@pytest.mark.parametrize(
    "shape",
    [
        {"groups": 2, "heads": 4},
        {"headdim": 12, "state": 10, "heads": 3},
        {"headdim": 32, "state": 8},
        {"taps": 1},
        {"taps": 2, "b": 3},
        {"decay": 100.0},
        {"decay": 0.001},
    ],
    ids=str,
)
def test_shapes(shape):
    close(*both(34, **shape), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)], ids=str)
@pytest.mark.parametrize("length", [23, 69])
def test_half_precision(length, dtype, tolerance):
    close(*both(length, dtype=dtype), tolerance)


def test_heads_one_by_one_or_together(monkeypatch):
    """How many heads a program takes is the device's matter, not the result's."""
    _, (y, together), _ = both(34, heads=4)
    monkeypatch.setattr(triton_ssd, "_heads_of_a_program", lambda *_: 1)
    _, (same, apart), _ = both(34, heads=4)
    assert torch.equal(y, same)
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_repeatable():
    _, (y, grads), _ = both(34)
    _, (again, grads_again), _ = both(34)
    assert torch.equal(y, again) and all(map(torch.equal, grads, grads_again))


def test_convolution():
    tensors, _ = inputs(21)
    _, xBC, _ = Directions(*tensors[1:]).parts(tensors[0])
    weight, bias = tensors[1:3]
    out = triton_conv.conv_silu(xBC, weight, bias)
    for i, ends in enumerate((lambda t: t, lambda t: t.flip(1))):
        expected = ends(F.silu(causal_conv_reference(ends(xBC), weight[i].t(), bias[i])))
        torch.testing.assert_close(out[i], expected, atol=1e-5, rtol=1e-5)


def test_norm():
    tensors, _ = inputs(21, groups=2)
    z, *_ = Directions(*tensors[1:]).parts(tensors[0])
    y, weight = torch.randn(2, *z.shape, device=DEVICE), tensors[6]
    expected = sum(gated_rms_norm(y[i], z, weight[i], 1e-5, 2) for i in range(2)) / 2
    torch.testing.assert_close(triton_norm.mean_gated_norm(y, z, weight, 1e-5, 2), expected, atol=1e-5, rtol=1e-5)


def test_mixer_and_all_its_parameters():
    torch.manual_seed(0)
    mixer = BidirectionalMamba2(16, d_state=16, headdim=16, backend="torch").to(DEVICE)
    u, dy = torch.randn(2, 2, 19, 16, device=DEVICE)
    results = []
    for backend in ("torch", "triton"):
        mixer.backend = backend
        x = u.clone().requires_grad_()
        y = mixer(x)
        results.append((y, *torch.autograd.grad(y, [x, *mixer.parameters()], dy)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_what_is_kept_for_the_backward_pass():
    """The inputs of both projections and the input of the kernels: no scan, no gate, no flipped copy."""
    sizes = {}
    for backend in ("torch", "triton"):
        mixer = BidirectionalMamba2(16, d_state=16, headdim=16, backend=backend).to(DEVICE)
        kept = {}
        own = {p.untyped_storage().data_ptr() for p in mixer.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t,
            lambda t: t,
        ):
            mixer(torch.randn(8, 37, 16, device=DEVICE))
        sizes[backend] = sum(n for at, n in kept.items() if at not in own)
    tokens, inner = 8 * 37, 32
    parameters = 4 * 2 * (5 * (inner + 32) + 3 * 2 + inner)
    assert sizes["triton"] <= 4 * tokens * (16 + (2 * inner + 32 + 2) + inner) + parameters
    assert sizes["triton"] < sizes["torch"] / 2


@pytest.mark.parametrize("family", [backbones.VisionMamba, backbones.MambaReg])
def test_backbones(family):
    torch.manual_seed(0)
    sizes = {"img_size": 64, "embed_dim": 16, "depth": 2, "d_state": 16, "headdim": 16}
    model = family(**sizes, backend="torch").to(DEVICE)
    other = family(**sizes, backend="triton").to(DEVICE)
    other.load_state_dict(model.state_dict())
    images = torch.randn(1, 3, 64, 64, device=DEVICE)
    torch.testing.assert_close(other(images), model(images), atol=1e-4, rtol=1e-4)
    ours, theirs = (m.cls_mixing(images) for m in (other, model))  # what looks inside takes the other paths
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_wrong_input(monkeypatch):
    tensors, _ = inputs(5)
    sizes = {"headdim": 16, "state": 16}
    with pytest.raises(ValueError, match=r"torch\.float64 is not among torch\.float32"):
        bidirectional_ssd(tensors[0].double(), Directions(*tensors[1:]), **sizes)
    with pytest.raises(ValueError, match=r"zxBCdt has shape \(2, 5, 97\), wants \(b, l, 98\)"):
        bidirectional_ssd(tensors[0][..., 1:], Directions(*tensors[1:]), **sizes)
    with pytest.raises(ValueError, match=r"D has shape \(3, 2\), wants \(2, 2\)"):
        bidirectional_ssd(tensors[0], Directions(*tensors[1:])._replace(D=torch.ones(3, 2)), **sizes)
    with pytest.raises(
        ValueError, match="backend='tritn'; allowed: auto, torch, recurrent, mamba_ssm, triton, compiled"
    ):
        BidirectionalMamba2(16, headdim=16, backend="tritn")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="backend='triton' needs a GPU, found cpu; use backend='auto' or 'torch'"):
        bidirectional_ssd(tensors[0].cpu(), Directions(*(t.cpu() for t in tensors[1:])), **sizes)


@pytest.mark.slow
def test_kernels_compile_for_an_h100_and_keep_to_its_registers():
    """By Triton's own compiler and ptxas, which need no GPU: at most 64 bytes a thread are spilled."""
    script = (
        "import sys; sys.path.insert(0, 'benchmarks'); import kernel_registers as k\n"
        "for name, *kernel in k.kernels(): print(*k.usage(k.compiled(*kernel).asm['cubin']), name)"
    )
    env = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    found = [line.split(maxsplit=2) for line in run.stdout.splitlines()]
    assert len(found) == 9 and all(int(stack) <= 64 for _, stack, _ in found), run.stdout
