"""SSD, convolution and norm: fast paths against their slow references, forward and gradient."""

import sys
import types
import warnings

import pytest
import torch
import torch.nn.functional as F

from backbones.mixers import BidirectionalMamba1, BidirectionalMamba2
from backbones.ops import (
    causal_conv,
    causal_conv_reference,
    gated_rms_norm,
    rms_norm,
    selective_scan,
    selective_scan_matrix,
    selective_scan_recurrent,
    ssd,
    ssd_matrix,
    ssd_recurrent,
)

ssd_module = sys.modules["backbones.ops.ssd"]
LENGTHS = (1, 2, 15, 16, 17, 197, 198, 208, 1025)


def inputs(length, groups=1, b=2, h=4, p=3, n=5, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    x, B, C = randn(b, length, h, p), randn(b, length, groups, n), randn(b, length, groups, n)
    dt = F.softplus(randn(b, length, h) - 2)
    A = -torch.rand(h, generator=g, dtype=torch.float64).to(dtype) * 15 - 1
    return [t.requires_grad_() for t in (x, dt, A, B, C, randn(h))]


def run(function, arguments, weight, **kwargs):
    y = function(*arguments, **kwargs)
    return y, torch.autograd.grad((y * weight).sum(), arguments)


@pytest.mark.parametrize("length", [n if n < 1000 else pytest.param(n, marks=pytest.mark.slow) for n in LENGTHS])
@pytest.mark.parametrize("groups", [1, 2])
def test_ssd_equals_the_recurrence(length, groups):
    arguments = inputs(length, groups)
    weight = torch.randn(2, length, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y, grads = run(ssd_recurrent, arguments, weight)
    for chunk in (16, 64, 256, 2048):  # several chunks, ragged ones, and the whole sequence as one
        fast, fast_grads = run(ssd, arguments, weight, chunk_size=chunk)
        torch.testing.assert_close(fast, y, atol=1e-10, rtol=0)
        for a, b in zip(fast_grads, grads, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_ssd_of_many_shapes(count):
    """Any shape, chunk and strength of the decay, in float64, and in float32 and bfloat16 against that."""
    rng = torch.Generator().manual_seed(0)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=rng))]

    for seed in range(count):
        groups, length = pick(1, 1, 2, 3), int(torch.randint(1, pick(4, 40, 150), (), generator=rng))
        shape = {"b": pick(1, 2, 3), "h": groups * pick(1, 2, 4), "p": pick(1, 3, 8), "n": pick(1, 5, 16)}
        arguments, chunk = inputs(length, groups, seed=seed, **shape), pick(1, 7, 16, 64, 256)
        with torch.no_grad():
            arguments[2].mul_(pick(0.01, 1, 30))
        weight = torch.randn(shape["b"], length, shape["h"], shape["p"], dtype=torch.float64, generator=rng)
        y, grads = run(ssd_recurrent, arguments, weight)
        fast, fast_grads = run(ssd, arguments, weight, chunk_size=chunk)
        torch.testing.assert_close(fast, y, atol=1e-10, rtol=1e-10, msg=str((seed, length, shape, chunk)))
        for ours, reference in zip(fast_grads, grads, strict=True):
            assert (ours - reference).norm() <= 1e-10 * max(1.0, reference.norm()), (seed, length, shape, chunk)
        for dtype, tolerance in ((torch.float32, 3e-4), (torch.bfloat16, 1.5e-2)):
            low = [
                t.detach().to(dtype if i in (0, 3, 4) else torch.float32).requires_grad_()
                for i, t in enumerate(arguments)
            ]
            wide = [
                t.detach().double().requires_grad_() for t in low
            ]  # the same values, so that only arithmetic counts
            weight = weight.to(dtype)
            y, grads = run(ssd_recurrent, wide, weight.double())
            fast, fast_grads = run(ssd, low, weight, chunk_size=chunk)
            assert (fast.double() - y).norm() <= tolerance * y.norm()
            # what a change of an argument by its own size does: gradients of decays are differences of large sums
            effects = [(g * t).norm() for g, t in zip(grads, wide, strict=True)]
            for ours, reference, t in zip(fast_grads, grads, wide, strict=True):
                error = ((ours.double() - reference) * t).norm()
                assert error <= tolerance * max(effects), (dtype, seed, length, shape, chunk)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("chunk", [4, 256])
def test_ssd_gradcheck(groups, chunk):
    assert torch.autograd.gradcheck(lambda *a: ssd(*a, chunk_size=chunk), inputs(7, groups, b=1, p=2, n=2))


def test_ssd_matrix():
    x, dt, A, B, C, _ = (t.detach() for t in inputs(19, 2))
    M = ssd_matrix(dt, A, B, C)
    torch.testing.assert_close(torch.einsum("bhij,bjhp->bihp", M, x), ssd_recurrent(x, dt, A, B, C), atol=1e-10, rtol=0)
    rows = torch.tensor([0, 7, 18])
    torch.testing.assert_close(ssd_matrix(dt, A, B, C, rows), M[:, :, rows], atol=1e-14, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("length", [198, 1025])
def test_ssd_precision(dtype, tolerance, length):
    arguments = [t.detach() for t in inputs(length, p=16, n=16)]
    y = ssd(*arguments)
    low = [t.to(dtype) if i in (0, 3, 4) else t.float() for i, t in enumerate(arguments)]
    ours = ssd(*low)
    assert ours.dtype == dtype
    assert (ours.double() - y).norm() / y.norm() < tolerance


def test_strong_decay_gives_finite_gradients():
    x, dt, A, B, C, D = inputs(50, dtype=torch.float32)
    strong = (A * 1000).detach().requires_grad_()
    grads = torch.autograd.grad(ssd(x, dt, strong, B, C, D).sum(), (x, dt, strong, B, C))
    assert all(g.isfinite().all() for g in grads)


def test_zero_steps_pass_the_state_on():
    """dt = 0 at some tokens: no input, no decay, and the gradient of dt itself as in the recurrence."""
    arguments = inputs(21)
    with torch.no_grad():
        arguments[1][:, 5:9] = 0
    weight = torch.randn(2, 21, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (y, grads), (fast, fast_grads) = run(ssd_recurrent, arguments, weight), run(ssd, arguments, weight)
    torch.testing.assert_close(fast, y, atol=1e-10, rtol=0)
    for a, b in zip(fast_grads, grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


def test_autocast_keeps_decays_in_float32():
    arguments = [t.detach().float() for t in inputs(64)]
    with torch.autocast("cpu", torch.bfloat16):
        y = ssd(*arguments)
    torch.testing.assert_close(y, ssd(*arguments))


def test_ssd_errors():
    x, dt, A, B, C, D = (t.detach() for t in inputs(5))
    with pytest.raises(ValueError, match="dt has shape"):
        ssd(x, dt[:, :3], A, B, C)
    with pytest.raises(ValueError, match=r"4 heads cannot share 3 groups"):
        ssd(x, dt, A, B.expand(2, 5, 3, 5), C.expand(2, 5, 3, 5))
    with pytest.raises(ValueError, match="backend='fast'"):
        ssd(x, dt, A, B, C, D, backend="fast")
    with pytest.raises(ValueError, match="chunk_size=0"):
        ssd(x, dt, A, B, C, D, chunk_size=0)


@pytest.fixture
def mamba_ssm(monkeypatch):
    """Puts a mamba_ssm of the test's making in the place of the package."""

    def install(kernel=None, error=None):
        ssd_module._mamba_ssm_kernel.cache_clear()
        monkeypatch.setattr(ssd_module, "_kernel_failed", False)
        name = "mamba_ssm.ops.triton.ssd_combined"

        class Broken(types.ModuleType):
            def __getattr__(self, attribute):
                raise error

        for i in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:i])
            monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
        last = types.ModuleType(name) if error is None else Broken(name)
        if kernel:
            last.mamba_chunk_scan_combined = kernel
        monkeypatch.setitem(sys.modules, name, last)

    yield install
    ssd_module._mamba_ssm_kernel.cache_clear()


def test_broken_mamba_ssm_warns_once_and_falls_back(mamba_ssm):
    arguments = [t.detach().float() for t in inputs(5)]
    mamba_ssm(error=OSError("undefined symbol: _ZN2at4_ops"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert ssd_module._mamba_ssm(*arguments, 256, strict=False) is None
    assert len(caught) == 1 and "undefined symbol" in str(caught[0].message)
    with pytest.raises(RuntimeError, match="dinomamba"):
        ssd(*arguments, backend="mamba_ssm")


def test_failing_kernel_warns_once_and_falls_back(mamba_ssm):
    calls = []

    def kernel(*a, **k):
        calls.append(1)
        raise RuntimeError("Triton error: invalid device function")

    mamba_ssm(kernel=kernel)
    arguments = [t.detach().float() for t in inputs(5)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert ssd_module._mamba_ssm(*arguments, 256, strict=False) is None
    assert len(calls) == len(caught) == 1


def test_working_kernel_is_called_by_its_signature(mamba_ssm):
    def kernel(x, dt, A, B, C, chunk_size, D=None):
        assert chunk_size == 256 and dt.dtype == A.dtype == torch.float32  # whatever the images' dtype is
        return ssd_recurrent(x, dt, A, B, C, D)

    mamba_ssm(kernel=kernel)
    arguments = [t.detach().float() for t in inputs(9)]
    torch.testing.assert_close(ssd(*arguments, backend="mamba_ssm"), ssd(*arguments, backend="torch"))
    half = [t if i in (1, 2, 5) else t.bfloat16() for i, t in enumerate(arguments)]
    assert ssd(*half, backend="mamba_ssm").dtype == torch.bfloat16


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 37, 198])
@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@pytest.mark.parametrize("bias", [True, False])
def test_causal_conv(length, taps, bias):
    g = torch.Generator().manual_seed(0)
    x, w, b, dy = (
        torch.randn(*s, generator=g, dtype=torch.float64, requires_grad=True)
        for s in ((2, length, 6), (6, taps), (6,), (2, length, 6))
    )
    arguments = (x, w, b) if bias else (x, w)
    y, ref = causal_conv(*arguments), causal_conv_reference(*arguments)
    torch.testing.assert_close(y, ref, atol=1e-12, rtol=0)
    for a, e in zip(torch.autograd.grad(y, arguments, dy), torch.autograd.grad(ref, arguments, dy), strict=True):
        torch.testing.assert_close(a, e, atol=1e-11, rtol=0)


def test_causal_conv_is_causal():
    x = torch.randn(1, 20, 3)
    changed = x.clone()
    changed[:, 11] += 1
    w = torch.randn(3, 4)
    same = (causal_conv(x, w) == causal_conv(changed, w)).all(-1)[0]
    assert same[:11].all() and not same[11:15].any() and same[15:].all()


def test_norms():
    x, z, w = torch.randn(3, 5, 8), torch.randn(3, 5, 8), torch.rand(8)
    torch.testing.assert_close(rms_norm(x, w, 1e-5), F.rms_norm(x, (8,), w, 1e-5))
    gated = x * F.silu(z)
    torch.testing.assert_close(gated_rms_norm(x, z, w, 1e-5), F.rms_norm(gated, (8,), w, 1e-5))
    halves = torch.cat([F.rms_norm(part, (4,), None, 1e-5) for part in gated.split(4, -1)], -1) * w
    torch.testing.assert_close(gated_rms_norm(x, z, w, 1e-5, groups=2), halves)
    low = rms_norm((x * 3e4).bfloat16(), w, 1e-5)  # squares would overflow half precision
    assert low.isfinite().all() and low.dtype == w.dtype


def selective_inputs(length, b=2, d=5, n=3, seed=0):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    dt = F.softplus(randn(b, length, d) - 2)
    A = -torch.rand(d, n, generator=g, dtype=torch.float64) * 15 - 1
    both = (randn(b, length, n), randn(b, length, n))
    return [t.requires_grad_() for t in (randn(b, length, d), dt, A, *both, randn(d))]


@pytest.mark.parametrize("length", [1, 2, 16, 17, 197])
def test_selective_scan_equals_the_recurrence(length):
    arguments = selective_inputs(length)
    weight = torch.randn(2, length, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y, grads = run(selective_scan_recurrent, arguments, weight)
    for chunk in (1, 16, 32, 256):
        fast, fast_grads = run(selective_scan, arguments, weight, chunk_size=chunk)
        torch.testing.assert_close(fast, y, atol=1e-10, rtol=0)
        for a, b in zip(fast_grads, grads, strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-12)


def test_selective_scan_gradcheck():
    assert torch.autograd.gradcheck(lambda *a: selective_scan(*a, chunk_size=3), selective_inputs(7, b=1, d=2, n=2))


def test_selective_scan_matrix():
    x, dt, A, B, C, D = (t.detach() for t in selective_inputs(19))
    M = selective_scan_matrix(dt, A, B, C)
    y = torch.einsum("bdij,bjd->bid", M, x) + D * x
    torch.testing.assert_close(y, selective_scan_recurrent(x, dt, A, B, C, D), atol=1e-10, rtol=0)
    rows = torch.tensor([0, 7, 18])
    torch.testing.assert_close(selective_scan_matrix(dt, A, B, C, rows), M[:, :, rows], atol=1e-14, rtol=0)


def test_selective_scan_with_strong_decay_and_in_bf16():
    x, dt, A, B, C, D = (t.detach().float() for t in selective_inputs(50))
    strong = (A * 1000).requires_grad_()
    (gradient,) = torch.autograd.grad(selective_scan(x, dt, strong, B, C, D).sum(), strong)
    assert gradient.isfinite().all()
    low = selective_scan(x.bfloat16(), dt, A, B.bfloat16(), C.bfloat16(), D)
    exact = selective_scan(x, dt, A, B, C, D)
    assert low.dtype == torch.bfloat16 and (low - exact).norm() / exact.norm() < 2e-2


def test_selective_scan_errors():
    x, dt, A, B, C, D = (t.detach() for t in selective_inputs(5))
    with pytest.raises(ValueError, match="dt has shape"):
        selective_scan(x, dt[:, :3], A, B, C)
    with pytest.raises(ValueError, match=r"x \(b,l,d\)"):
        selective_scan(x[0], dt, A, B, C)
    with pytest.raises(ValueError, match="chunk_size=0"):
        selective_scan(x, dt, A, B, C, D, chunk_size=0)


MIXERS = {
    "mamba2": lambda: BidirectionalMamba2(16, d_state=8, headdim=8, chunk_size=64),
    "mamba1": lambda: BidirectionalMamba1(16, d_state=4),
}


@pytest.mark.parametrize("length", [1, 2, 38, 300])
@pytest.mark.parametrize("name", MIXERS)
def test_mixer_directions(name, length):
    """A changed token leaves earlier outputs of the forward scan and later ones of the backward scan untouched."""
    torch.manual_seed(0)
    mixer = MIXERS[name]()
    u = torch.randn(2, length, 16)
    at = length // 2
    changed = u.clone()
    changed[:, at] += 1
    (_, f0, b0), (_, f1, b1) = mixer.scan(u), mixer.scan(changed)
    assert torch.equal(f0[:, :at], f1[:, :at]) and not torch.equal(f0[:, at:], f1[:, at:])
    assert torch.equal(b0[:, at + 1 :], b1[:, at + 1 :]) and not torch.equal(b0[:, : at + 1], b1[:, : at + 1])


@pytest.mark.parametrize("name", MIXERS)
def test_mixer_mixing_is_what_it_does(name):
    """M applied to the convolved inputs is the mean of both scans' outputs where the inputs are the same."""
    torch.manual_seed(0)
    mixer = MIXERS[name]().double()
    with torch.no_grad():
        mixer.conv1d.weight[..., :-1] = 0  # only the present token, so both directions see the same x
        mixer.conv1d_b.weight.copy_(mixer.conv1d.weight)
        mixer.conv1d_b.bias.copy_(mixer.conv1d.bias)
    u = torch.randn(2, 23, 16, dtype=torch.float64)
    x = mixer._scan_inputs(u)[1].x
    _, forward, backward = mixer.scan(u)
    M = mixer.mixing(u)
    x = x if x.ndim == 4 else x[..., None]  # a Mamba-1 channel is a head of width 1
    y = torch.einsum("bhij,bjhp->bihp", M, x).flatten(2)
    torch.testing.assert_close(y, (forward + backward) / 2, atol=1e-10, rtol=0)


@pytest.mark.parametrize("size", [dict(dim=20, headdim=64), dict(dim=24, headdim=9, expand=2)])
def test_mixer_size_error(size):
    with pytest.raises(ValueError, match=r"embed_dim=\d+, expand=\d+, headdim=\d+"):
        BidirectionalMamba2(**size)
    with pytest.raises(ValueError, match="multiple of 8: embed_dim=64"):
        BidirectionalMamba2(64, backend="mamba_ssm")


@pytest.mark.slow
def test_a_compiled_mixer():
    """The same to rounding, gradients too; mixers alike share a compilation."""
    torch.manual_seed(0)
    plain = BidirectionalMamba2(16, d_state=4, headdim=8, backend="torch")
    graphs = []
    for _ in range(2):
        compiled = BidirectionalMamba2(16, d_state=4, headdim=8, backend="compiled")
        plain.load_state_dict(compiled.state_dict())
        u = torch.randn(2, 9, 16, requires_grad=True)
        results = [
            (y, *torch.autograd.grad(y.square().sum(), [u, *m.parameters()])) for m in (plain, compiled) for y in [m(u)]
        ]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0


def test_gradients_of_the_skip_in_half_precision():
    """Summed in float32 even where D is of half precision: as near to float64 as the reference's, one rounding off."""
    for seed in range(5):
        torch.manual_seed(seed)
        x, B, C = torch.randn(3, 37, 2, 64), torch.randn(3, 37, 1, 16), torch.randn(3, 37, 1, 16)
        dt, A, D = torch.rand(3, 37, 2), -torch.rand(2), torch.randn(2)
        inputs, dy = [t.bfloat16() for t in (x, dt, A, B, C, D)], torch.randn_like(x).bfloat16()
        found = []
        for backend, dtype in (("torch", torch.bfloat16), ("recurrent", torch.float64)):
            leaves = [t.to(dtype).requires_grad_() for t in inputs]
            y = ssd(*leaves, backend=backend)
            found.append(torch.autograd.grad(y, leaves[-1], dy.to(dtype))[0])
        torch.testing.assert_close(found[0].double(), found[1], atol=0, rtol=2**-8)
