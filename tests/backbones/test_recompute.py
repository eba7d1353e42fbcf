"""What is computed again for the backward pass: the same bits, and far less kept."""

import pytest
import torch

from backbones import MambaReg, VisionMamba, VisionTransformer
from backbones.ops import recompute
from benchmarks.kept_memory import kept

SMALL = dict(img_size=32, patch_size=4, embed_dim=16, depth=2, d_state=4, headdim=8)


def gradients(backend, chunk_size, keeping, monkeypatch):
    monkeypatch.setattr(recompute, "KEEPING", keeping)
    torch.manual_seed(0)
    model = VisionMamba(**SMALL, backend=backend, chunk_size=chunk_size)
    images = torch.randn(3, 3, 32, 24, requires_grad=True)
    out = model(images)
    out.square().sum().backward()
    return [out.detach(), images.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("chunk_size", [7, 64])
@pytest.mark.parametrize("backend", ["torch", "recurrent"])
def test_the_same_bits(backend, chunk_size, monkeypatch):
    there = gradients(backend, chunk_size, ("cpu",), monkeypatch)
    again = gradients(backend, chunk_size, (), monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(there, again, strict=True))


def test_autocast_is_that_of_the_forward_pass(monkeypatch):
    def run(keeping):
        monkeypatch.setattr(recompute, "KEEPING", keeping)
        torch.manual_seed(0)
        model = VisionMamba(**SMALL, backend="torch")
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(2, 3, 32, 32)).float().square().sum()
        loss.backward()  # outside of it
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(("cpu",)), run(()), strict=True))


def test_nothing_is_recomputed_without_gradients(monkeypatch):
    monkeypatch.setattr(recompute, "KEEPING", ())
    monkeypatch.setattr(recompute, "checkpoint", None)
    with torch.no_grad():
        VisionMamba(**SMALL, backend="torch")(torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize("family", [VisionMamba, MambaReg])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_memory_kept_on_cuda(family, backend):
    """At the paper's widths, a few blocks: the parts that do not depend on depth count against it."""
    sides = [224] * 2 + [96] * 8
    vit, _ = kept(lambda: VisionTransformer(embed_dim=768, depth=1, num_heads=12), 8, sides)
    ours, places = kept(lambda: family(embed_dim=768, depth=2, backend=backend), 8, sides)
    assert ours < 2.5 * vit, places.most_common(5)
