"""DINO's loss, its centre and Sinkhorn-Knopp, against their definitions."""

import pytest
import torch
import torch.nn.functional as F

from lightning_modules import DINOLoss
from lightning_modules.dino_loss import sinkhorn_knopp
from tests.processes import run_ranks


def loss_by_pairs(student, teacher, center, views, temp, student_temp):
    """The double loop of the definition."""
    s = (student / student_temp).log_softmax(-1).chunk(views)
    t = ((teacher - center) / temp).softmax(-1).chunk(2)
    terms = [-(q * s[v]).sum(-1).mean() for i, q in enumerate(t) for v in range(views) if v != i]
    return sum(terms) / len(terms)


@pytest.mark.parametrize("views", [2, 3, 7])
def test_loss_is_its_definition(views):
    torch.manual_seed(0)
    student = torch.randn(views * 5, 11, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(10, 11, dtype=torch.float64)
    loss = DINOLoss(11).double()
    loss.center.normal_()
    parts = loss(student, teacher, views, 0.05)
    expected = loss_by_pairs(student, teacher, loss.center, views, 0.05, 0.1)
    torch.testing.assert_close(parts.loss, expected, atol=1e-12, rtol=0)
    for a, b in zip(torch.autograd.grad(parts.loss, student), torch.autograd.grad(expected, student), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    t = ((teacher - loss.center) / 0.05).softmax(-1)
    torch.testing.assert_close(parts.teacher_entropy, -(t * t.log()).sum(-1).mean())
    assert parts.kl >= 0


@pytest.mark.parametrize(
    ("views", "global_views", "batch"),
    [(2, 2, 1), (3, 2, 5), (10, 2, 3), (5, 1, 4), (7, 2, 20), (7, 3, 40), (3, 2, 70)],
)
@pytest.mark.parametrize("centering", ["mean", "sinkhorn"])
def test_loss_view_by_view_is_the_loss(views, global_views, batch, centering):
    """Value, entropy and both gradients, scaled by what comes from above, against the logits all at once."""
    torch.manual_seed(0)
    z = F.normalize(torch.randn(views * batch, 6, dtype=torch.float64), dim=-1).requires_grad_()
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(global_views * batch, 11, dtype=torch.float64)
    loss = DINOLoss(11, centering=centering).double()
    loss.center.normal_()
    at_once = loss(z @ weight.T, teacher, views, 0.05)
    by_view = loss.of_prototypes(z, weight, teacher, views, 0.05)
    for ours, reference in zip(by_view, at_once, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-13, rtol=0)
    expected = torch.autograd.grad(3 * at_once.loss, (z, weight))
    for ours, reference in zip(torch.autograd.grad(3 * by_view.loss, (z, weight)), expected, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-13, rtol=1e-11)
    seconds = []
    for parts in (loss(z @ weight.T, teacher, views, 0.05), loss.of_prototypes(z, weight, teacher, views, 0.05)):
        first = torch.autograd.grad(3 * parts.loss, (z, weight), create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in first), (z, weight)))
    for ours, reference in zip(*seconds, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-13, rtol=1e-10)


@pytest.mark.parametrize(("low", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_loss_view_by_view_under_autocast(low, tolerance):
    torch.manual_seed(0)
    z = F.normalize(torch.randn(4 * 8, 32), dim=-1).requires_grad_()
    weight = F.normalize(torch.randn(3000, 32), dim=-1).requires_grad_()
    teacher, loss = torch.randn(16, 3000), DINOLoss(3000)
    exact = loss.of_prototypes(z, weight, teacher, 4, 0.07).loss
    expected = torch.autograd.grad(exact, (z, weight))
    with torch.autocast("cpu", low):
        ours = loss.of_prototypes(z, weight, teacher, 4, 0.07).loss
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, exact, atol=0, rtol=1e-3)
    for got, wanted in zip(torch.autograd.grad(ours, (z, weight)), expected, strict=True):
        assert got.dtype == torch.float32 and (got - wanted).norm() < tolerance * wanted.norm()


def test_loss_never_holds_all_logits():
    """The memory of one view's logits a few times over, not of all ten views'."""
    k, batch = 5_000, 64
    z = F.normalize(torch.randn(10 * batch, 8), dim=-1).requires_grad_()
    weight, teacher, loss = torch.randn(k, 8, requires_grad=True), torch.randn(2 * batch, k), DINOLoss(k)
    for function, all_views in ((loss.of_prototypes, False), (lambda z, w, *rest: loss(z @ w.T, *rest), True)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            function(z, weight, teacher, 10, 0.05).loss.backward()
        held = most = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        views = most / (4 * batch * k)  # in logits of one view
        assert (views > 20) == all_views and (views < 12) == (not all_views), views


def sinkhorn_by_definition(logits, iterations=3):
    """SwAV's algorithm 1 in plain numbers, float64."""
    q = logits.double().exp()
    for _ in range(iterations):
        q = q / q.sum(0, keepdim=True)
        q = q / q.sum(1, keepdim=True)
    return q


@pytest.mark.parametrize(("samples", "prototypes"), [(2, 3), (16, 5), (7, 64)])
def test_sinkhorn_is_its_definition(samples, prototypes):
    torch.manual_seed(0)
    logits = torch.randn(samples, prototypes, dtype=torch.float64) * 5
    torch.testing.assert_close(sinkhorn_knopp(logits).exp(), sinkhorn_by_definition(logits), atol=1e-12, rtol=0)
    balanced = sinkhorn_knopp(logits, iterations=500).exp()
    torch.testing.assert_close(balanced.sum(1), torch.ones(samples, dtype=torch.float64))
    torch.testing.assert_close(balanced.sum(0), torch.full((prototypes,), samples / prototypes, dtype=torch.float64))


def test_sinkhorn_holds_where_exponentials_underflow():
    """One prototype nobody likes, at a temperature where exp(logit) is 0 in float32."""
    logits = torch.tensor([[1.0, 0.9, -1.0], [0.9, 1.0, -1.0]]) / 0.005
    assert not logits[:, 2].exp().any()
    q = sinkhorn_knopp(logits, iterations=200).exp()
    torch.testing.assert_close(q.sum(0), torch.full((3,), 2 / 3), atol=1e-3, rtol=0)


def _balanced_share(rank, logits, sizes):
    return sinkhorn_knopp(logits.split(sizes)[rank]).numpy()


def test_sinkhorn_balances_over_ranks():
    torch.manual_seed(0)
    logits = torch.randn(9, 4, dtype=torch.float64) * 5
    shares = run_ranks(_balanced_share, 2, logits, [6, 3])
    torch.testing.assert_close(torch.cat([torch.from_numpy(s) for s in shares]), sinkhorn_knopp(logits))


def test_sinkhorn_loss_is_its_definition():
    torch.manual_seed(0)
    student = torch.randn(3 * 5, 11, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(10, 11, dtype=torch.float64)
    loss = DINOLoss(11, centering="sinkhorn").double()
    parts = loss(student, teacher, 3, 0.05)
    targets, log_student = sinkhorn_by_definition(teacher / 0.05).view(2, 5, 11), (student / 0.1).log_softmax(-1)
    pairs = [(g, v) for g in range(2) for v in range(3) if g != v]
    expected = sum(-(targets[g] * log_student.view(3, 5, 11)[v]).sum(-1).mean() for g, v in pairs) / len(pairs)
    torch.testing.assert_close(parts.loss, expected, atol=1e-12, rtol=0)
    for a, b in zip(torch.autograd.grad(parts.loss, student), torch.autograd.grad(expected, student), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    loss.observe(teacher)
    loss.update_center()
    assert not loss.center.any()


def test_unknown_centering_is_refused():
    with pytest.raises(ValueError, match="centering='none'; allowed: mean, sinkhorn"):
        DINOLoss(4, centering="none")


def test_center_is_the_mean_over_micro_batches():
    loss = DINOLoss(3, center_momentum=0.9)
    a, b = torch.randn(4, 3), torch.randn(2, 3)
    loss.observe(a)
    loss.observe(b)
    assert not loss.center.any()
    loss.update_center()
    torch.testing.assert_close(loss.center, 0.1 * torch.cat([a, b]).mean(0, keepdim=True))
    once = loss.center.clone()
    loss.update_center()  # nothing new was seen
    assert torch.equal(loss.center, once)
