"""The bidirectional mixer's kernels, Triton's and C's, against float64 recurrences.

Triton's run on the CPU by its interpreter, which conftest.py asks for; TRITON_INTERPRET=0 runs them on a GPU.
"""

import os

import pytest
import torch
import torch.nn.functional as F

import backbones
from backbones.mixers import BidirectionalMamba2, mamba2
from backbones.ops import (
    Directions,
    bidirectional_ssd,
    c_kernels,
    causal_conv_reference,
    gated_rms_norm,
    ssd_recurrent,
)

try:
    import triton  # noqa: F401
except ImportError:  # torch brings it on Linux only
    KERNELS = ["c"]
else:
    KERNELS = ["c", "triton"]
if c_kernels() is None:
    KERNELS.remove("c")
DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
NAMES = ("zxBCdt", *Directions._fields)
every_kernel = pytest.mark.parametrize("kernels", KERNELS)
needs_c = pytest.mark.skipif("c" not in KERNELS, reason="no C compiler")


def device(kernels):
    return DEVICE if kernels == "triton" else "cpu"


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
    return list(tensors), randn(b, length, inner).to(dtype)


def both(kernels, length, **shape):
    """Output and gradients: ours, and the definition's in float64 of the same values."""
    tensors, grad = inputs(length, **shape)
    tensors, grad = [t.to(device(kernels)) for t in tensors], grad.to(device(kernels))
    sizes = {
        name: shape.get(name, {"headdim": 16, "state": 16, "groups": 1}[name])
        for name in ("headdim", "state", "groups")
    }
    results = []
    for function, cast in (
        (lambda zxBCdt, *p: bidirectional_ssd(zxBCdt, Directions(*p), **sizes, kernels=kernels), lambda t: t.clone()),
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


@every_kernel
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 37, 65, 70])
def test_lengths(kernels, length):
    close(*both(kernels, length), 1e-5)


@every_kernel
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
def test_shapes(kernels, shape):
    close(*both(kernels, 34, **shape), 1e-5)


@needs_c
@pytest.mark.parametrize("length", [64, 128, 129, 198, 300])
def test_many_blocks(length):
    """Strong and weak decays, too, and a state that is no multiple of the processor's vectors."""
    close(*both("c", length), 1e-5)
    for decay in (100.0, 0.001):
        close(*both("c", length, b=1, decay=decay, state=10, headdim=20), 1e-5)


@needs_c
def test_random_shapes():
    rng = torch.Generator().manual_seed(0)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=rng))

    for _ in range(150):
        groups = draw(1, 3)
        shape = {
            "b": draw(1, 3), "heads": groups * draw(1, 3), "groups": groups, "headdim": draw(1, 40), "state": draw(1, 40),
            "taps": draw(1, 5), "decay": 10.0 ** draw(-2, 2),
        }  # fmt: skip
        length = draw(1, 90)
        try:
            close(*both("c", length, **shape), 2e-5)
        except AssertionError as error:
            raise AssertionError(f"length {length}, {shape}") from error


@every_kernel
def test_repeatable(kernels):
    _, (y, grads), _ = both(kernels, 34)
    _, (again, grads_again), _ = both(kernels, 34)
    assert torch.equal(y, again) and all(map(torch.equal, grads, grads_again))


@needs_c
def test_threads_do_not_matter():
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            _, (y, grads), _ = both("c", 70, b=5)
            results.append((y, *grads))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@every_kernel
def test_mixer_and_all_its_parameters(kernels):
    torch.manual_seed(0)
    mixer = BidirectionalMamba2(16, d_state=16, headdim=16, backend="torch").to(device(kernels))
    u, dy = torch.randn(2, 2, 19, 16, device=device(kernels))
    results = []
    for backend in ("torch", kernels):
        mixer.backend = backend
        x = u.clone().requires_grad_()
        y = mixer(x)
        results.append((y, *torch.autograd.grad(y, [x, *mixer.parameters()], dy)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@every_kernel
def test_what_is_kept_for_the_backward_pass(kernels):
    """The inputs of both projections and of the kernels, and for C both scans' outputs: no gate, no flipped copy."""
    sizes = {}
    for backend in ("torch", kernels):
        mixer = BidirectionalMamba2(16, d_state=16, headdim=16, backend=backend).to(device(kernels))
        kept = {}
        own = {p.untyped_storage().data_ptr() for p in mixer.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t,
            lambda t: t,
        ):
            mixer(torch.randn(8, 37, 16, device=device(kernels)))
        sizes[backend] = sum(n for at, n in kept.items() if at not in own)
    tokens, inner = 8 * 37, 32
    parameters = 4 * 2 * (5 * (inner + 32) + 3 * 2 + inner)
    scans = 2 * inner if kernels == "c" else 0
    assert sizes[kernels] <= 4 * tokens * (16 + (2 * inner + 32 + 2) + inner + scans) + parameters
    assert sizes[kernels] < sizes["torch"] / 2


@every_kernel
@pytest.mark.parametrize("family", [backbones.VisionMamba, backbones.MambaReg])
def test_backbones(family, kernels):
    torch.manual_seed(0)
    sizes = {"img_size": 64, "embed_dim": 16, "depth": 2, "d_state": 16, "headdim": 16}
    model = family(**sizes, backend="torch").to(device(kernels))
    other = family(**sizes, backend=kernels).to(device(kernels))
    other.load_state_dict(model.state_dict())
    images = torch.randn(1, 3, 64, 64, device=device(kernels))
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
        ValueError, match="backend='tritn'; allowed: auto, torch, recurrent, mamba_ssm, triton, c, compiled"
    ):
        BidirectionalMamba2(16, headdim=16, backend="tritn")
    with pytest.raises(ValueError, match="kernels='cuda'; allowed: triton, c"):
        bidirectional_ssd(tensors[0], Directions(*tensors[1:]), **sizes, kernels="cuda")
    with pytest.raises(RuntimeError, match="backend='c' needs a CPU, found meta, and a C compiler"):
        bidirectional_ssd(*(tensors[0].to("meta"), Directions(*tensors[1:])), **sizes, kernels="c")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="backend='triton' needs a GPU, found cpu; use backend='auto' or 'torch'"):
        bidirectional_ssd(tensors[0].cpu(), Directions(*(t.cpu() for t in tensors[1:])), **sizes)


@needs_c
def test_auto_is_c_where_it_can_be(monkeypatch):
    taken = []
    monkeypatch.setattr(mamba2, "bidirectional_ssd", lambda x, *rest: taken.append(rest[-1]) or x[..., :32])
    mixer, u = BidirectionalMamba2(16, d_state=16, headdim=16), torch.randn(8, 5, 16)
    mixer(u)
    assert taken == ["c"]
    mixer.double()(u.double())
    with torch.autocast("cpu", torch.bfloat16):
        mixer.float()(u)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    mixer(u[:1])
    assert taken == ["c"]
    mixer(u[:2])
    assert taken == ["c", "c"]
    monkeypatch.setattr(mamba2, "c_kernels", lambda: None)
    mixer(u)
    assert taken == ["c", "c"]
