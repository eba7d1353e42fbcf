"""What traces, transforms or counts a model sees what eager computes, or refuses."""

import copy
import io
import warnings

import pytest
import timm
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from backbones import ops, tokens
from backbones.ops import traceable
from tests.backbones.test_backbones import FAMILIES, build

MAMBA = ["vim", "mambar", "vim_mamba1", "mambar_mamba1"]
OURS = [name for name in FAMILIES if name != "timm"]


def small(name, **kwargs):
    """Of one block, with positions and steps that matter."""
    model = build(name, depth=1, **kwargs)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2 or parameter.shape[0] == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def images(batch=2, height=32, width=32):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(batch))


# ---- operations ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["fixed", "free"])
def free(request, monkeypatch):
    """Whether the operations are told that sizes are free."""
    monkeypatch.setattr(traceable, "is_free", lambda *sizes: request.param)


def compare(function, reference, inputs):
    inputs = [t.double().requires_grad_() for t in inputs]
    found, wanted = function(*inputs), reference(*inputs)
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    both = (torch.autograd.grad((y * weights).sum(), inputs, materialize_grads=True) for y in (found, wanted))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("length", [1, 31, 33, 70])
def test_ssd_that_can_be_traced_equals_the_recurrence(free, length):
    torch.manual_seed(0)
    x, B, C = torch.randn(2, length, 4, 3), torch.randn(2, length, 2, 5), torch.randn(2, length, 2, 5)
    dt, A, D = torch.rand(2, length, 4), -torch.rand(4) - 0.1, torch.randn(4)
    compare(lambda *t: traceable.ssd(*t, 16), ops.ssd_recurrent, (x, dt, A, B, C, D))


@pytest.mark.parametrize("length", [1, 31, 33, 150])
def test_selective_scan_that_can_be_traced_equals_the_recurrence(free, length):
    torch.manual_seed(0)
    x, B, C = torch.randn(2, length, 3), torch.randn(2, length, 4), torch.randn(2, length, 4)
    dt, A, D = torch.rand(2, length, 3), -torch.rand(3, 4) - 0.1, torch.randn(3)
    compare(lambda *t: traceable.selective_scan(*t, 32), ops.selective_scan_recurrent, (x, dt, A, B, C, D))


@pytest.mark.parametrize("length", [1, 3, 9])
def test_convolution_that_can_be_traced(length):
    x, weight, bias = torch.randn(2, length, 5), torch.randn(5, 4), torch.randn(5)
    compare(traceable.causal_conv, ops.causal_conv_reference, (x, weight, bias))


@pytest.mark.parametrize("new", [(4, 5), (7, 3), (4, 3), (1, 9), (30, 31)])
def test_positions_of_a_free_grid(new):
    """As of a fixed one; exactly as learned on the learned grid."""
    pos, old = torch.randn(1, 20, 6), (4, 5)
    found, wanted = tokens._resample_to_any(pos, old, new), tokens.resample_pos_embed(pos, old, new)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert new != old or torch.equal(found, pos)


@pytest.mark.parametrize("taken", [[0], [3], [0, 5], [2, 3, 7], [9]])
def test_other_positions(taken):
    found = tokens.other_positions(10, torch.tensor(taken))
    assert found.tolist() == [i for i in range(10) if i not in taken]


# ---- tracers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_jit_trace_holds_for_other_batches_and_sizes(name):
    """Saved and loaded; nothing in it is a constant of what it was traced with, so tracing warns of nothing."""
    model = small(name, num_classes=5)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(model, images(), check_trace=False)
        buffer = io.BytesIO()
        torch.jit.save(traced, buffer)
        buffer.seek(0)
        loaded = torch.jit.load(buffer)
        for other in (images(1), images(5), images(3, 40, 56)):
            torch.testing.assert_close(loaded(other), model(other), atol=1e-5, rtol=1e-4)
        with pytest.raises(Exception, match=r"shape|reshape|size"):
            loaded(images(1, 36, 32))  # no multiple of the patch


SOME = [name if name in ("mambar", "vim_mamba1") else pytest.param(name, marks=pytest.mark.slow) for name in MAMBA]


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SOME)
def test_export_of_a_free_batch(name, strict):
    model = small(name)
    program = torch.export.export(model, (images(),), dynamic_shapes=({0: Dim("batch")},), strict=strict)
    for batch in (1, 5):
        torch.testing.assert_close(program.module()(images(batch)), model(images(batch)), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAMBA)
def test_export_of_a_free_size(name):
    model = small(name)
    size = {0: Dim("batch"), 2: 8 * Dim("h", min=2), 3: 8 * Dim("w", min=2)}
    program = torch.export.export(model, (images(),), dynamic_shapes=(size,)).module()
    for other in (images(1, 16, 24), images(3, 96, 80)):
        torch.testing.assert_close(program(other), model(other), atol=1e-5, rtol=1e-4)
    with pytest.raises(Exception, match="images"):
        program(images(1, 36, 32))


@pytest.mark.parametrize("name", SOME)
def test_make_fx_and_autocast(name):
    model = small(name)
    graph = make_fx(model)(images())
    assert not [node for node in graph.graph.nodes if "dinomamba" in str(node.target)]
    torch.testing.assert_close(graph(images()), model(images()), atol=1e-5, rtol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        program = torch.export.export(model, (images(),)).module()
        torch.testing.assert_close(program(images()).float(), model(images()).float(), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", SOME)
def test_functional_transforms(name):
    model = small(name).double()
    x, t = images().double(), images(2).double().flip(0)
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(lambda image: model(image[None])[0])(x), model(x))
        value, change = torch.func.jvp(model, (x,), (t,))
        torch.testing.assert_close(value, model(x))
        torch.testing.assert_close(change, (model(x + 1e-5 * t) - model(x - 1e-5 * t)) / 2e-5, atol=1e-6, rtol=1e-6)
    parameters = {key: p.detach() for key, p in model.named_parameters()}
    found = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().sum())(parameters)
    model(x).square().sum().backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad)


def test_tensors_without_memory():
    with FakeTensorMode():
        model = small("vim")
        assert model(torch.randn(8, 3, 32, 40)).shape == (8, 16)
    for name in MAMBA:
        with torch.device("meta"):
            assert small(name)(torch.empty(8, 3, 32, 40)).shape == (8, 16)


@pytest.mark.parametrize("name", FAMILIES)
def test_script_is_refused(name):
    with pytest.raises(RuntimeError, match=r"cannot be scripted.*torch\.jit\.trace"):
        torch.jit.script(FAMILIES[name]())


def test_a_compiled_model_has_no_break():
    model = small("mambar")
    torch.testing.assert_close(
        torch.compile(model, fullgraph=True, backend="eager")(images()), model(images()), atol=1e-5, rtol=1e-4
    )


def test_checkpointing_and_drop_path_can_be_traced():
    model = build("vim", depth=2, drop_path=0.2).train()
    model.set_grad_checkpointing()
    program = torch.export.export(model, (images(),))
    found = [str(node.target) for node in program.graph.nodes]
    assert any("bernoulli" in name for name in found) and not any("checkpoint" in name for name in found)


# ---- FLOPs ------------------------------------------------------------------------------------------------------------


def vim_small_flops(patches=196, patch=3 * 16 * 16, dim=512, depth=24, state=64, headdim=64, taps=4):
    """Two for each multiplication with its addition, by hand.

    Patches: one product. Of a block, for each token: both projections; and of each direction the convolution over x, B
    and C, and in the scan, for each of the inner channels' states, one for S += (dt x) B and one for y = S C. The decay
    of S, norms, gates and other operations on single elements count for nothing, as PyTorch's counter has it.
    """
    length, inner = patches + 2, 2 * dim  # the class token stands twice
    convolved = inner + 2 * state
    projections = dim * (inner + convolved + inner // headdim) + inner * dim
    direction = taps * convolved + 2 * inner * state
    return 2 * (patches * patch * dim + depth * length * (projections + 2 * direction))


def flops(model, *inputs, backward=False):
    with FlopCounterMode(display=False) as counter:
        y = model(*inputs)
        if backward:
            y.sum().backward()
    return counter.get_total_flops()


def test_flops_of_vim_small():
    x = torch.randn(1, 3, 224, 224)
    model = timm.create_model("vim_small_patch16_224")
    with torch.no_grad():
        assert flops(model, x) == vim_small_flops()
    with torch.device("meta"):
        model = timm.create_model("vim_small_patch16_224", depth=2)
    inputs = torch.empty(3, 3, 224, 224, device="meta", requires_grad=True)
    assert flops(model, inputs) == 3 * vim_small_flops(depth=2)
    assert flops(model, inputs, backward=True) == 9 * vim_small_flops(depth=2)


@pytest.mark.parametrize("name", MAMBA)
def test_flops_do_not_hang_on_the_path(name):
    """Nor do values and gradients on whether they are counted, but for the order in which gradients are added."""
    model, x = small(name), images(4)
    counted = copy.deepcopy(model)
    paths = [flops(m, t) for m, t in ((model, x), (copy.deepcopy(model).double(), x.double()))]
    with FakeTensorMode(allow_non_fake_inputs=True):
        paths.append(flops(small(name), torch.randn(4, 3, 32, 32)))
    assert len(set(paths)) == 1
    y = model(x)
    F.mse_loss(y, torch.zeros_like(y)).backward()
    with FlopCounterMode(display=False):
        z = counted(x)
        F.mse_loss(z, torch.zeros_like(z)).backward()
    assert torch.equal(y, z)
    for ours, theirs in zip(model.parameters(), counted.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)
