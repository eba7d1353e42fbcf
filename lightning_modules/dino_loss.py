"""DINO's loss: cross-entropy between balanced, sharpened teacher outputs and student outputs across views.

Shapes: G global views, V all views (global first), B images a device, K out_dim.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.collectives import all_reduce
from common.derivatives import differentiated_again, gradients
from common.precision import at_least_float32

CENTERINGS = ("mean", "sinkhorn")


@torch.no_grad()
def sinkhorn_knopp(logits: Tensor, iterations: int = 3) -> Tensor:
    """Log-probabilities (N, K) that use all K prototypes about equally over the N samples of all devices.

    The Sinkhorn-Knopp iteration of SwAV (Caron et al. 2020, algorithm 1), as in DINOv2: exp(logits) is normalised
    over samples, then over prototypes, ``iterations`` times. In the log domain, so no column underflows at small
    temperatures.

    Args:
        logits: (N, K), already divided by the temperature; N may differ between devices.
        iterations: pairs of normalisations.
    """
    for _ in range(iterations):
        top = all_reduce(logits.amax(0), dist.ReduceOp.MAX)
        total = all_reduce((logits - top).exp().sum(0))
        logits = (logits - top - total.log()).log_softmax(-1)
    return logits


class LossParts(NamedTuple):
    """The loss and what tells collapse from learning, all scalars."""

    loss: Tensor
    """Mean cross-entropy over pairs of different views."""
    teacher_entropy: Tensor
    """Mean entropy of the teacher's distributions; 0 or ln K in a collapse."""
    kl: Tensor
    """Mean KL(teacher ‖ student), the loss less the entropy."""


def _cross_entropy(student: Tensor, targets: Tensor, student_temp: float) -> Tensor:
    """Mean over images and pairs of different views: student logits (V, B, K), teacher distributions (G, B, K)."""
    log_student = (at_least_float32(student) / student_temp).log_softmax(-1)
    views, global_views = len(student), len(targets)
    # sum over pairs v != g of -target_g · log_student_v = all pairs less the diagonal
    everyone = (targets.sum(0) * log_student.sum(0)).sum(-1)
    same = (targets * log_student[:global_views]).sum((0, -1))
    return (same - everyone).mean() / (global_views * (views - 1))


ROWS = 64
"""Student outputs whose logits are held at a time, if a view has no more."""


class _PrototypeCrossEntropy(torch.autograd.Function):
    """The cross-entropies of all pairs of different views, the student's logits made and used up a few views at a time.

    With logits s_v = z_v Wᵀ / τ, their log-sum-exp and T = Σ_g t_g, the loss is

        Σ_v [ n_v lse(s_v) - q_v · s_v ] / (pairs · B),      q_v = T - t_v and n_v = G - 1 for v < G, else T and G,

    since each t_g sums to 1; so its gradient by s_v is n_v softmax(s_v) - q_v over the same divisor. It is formed at
    once and multiplied into the gradients of z and W, so that nothing of size V·B·K is ever there, or made twice.
    """

    @staticmethod
    def forward(ctx, z: Tensor, weight: Tensor, targets: Tensor, student_temp: float) -> Tensor:  # type: ignore[override]
        """z (V, B, d), weight (K, d), targets (G, B, K)."""
        views, batch, _ = z.shape
        global_views = len(targets)
        divisor = global_views * (views - 1) * batch
        autocast = torch.is_autocast_enabled(z.device.type)
        low = torch.get_autocast_dtype(z.device.type) if autocast else z.dtype
        back = torch.float32 if low == torch.float16 else low  # gradients of a loss not scaled yet would underflow
        wanted = any(ctx.needs_input_grad[:2])
        dz, dw = (torch.empty_like(z), torch.zeros_like(weight)) if wanted else (None, None)
        with torch.autocast(z.device.type, enabled=False):
            w, w_back = weight.to(low), weight.to(back)
            total, loss, at_once = targets.sum(0), targets.new_zeros(()), max(1, ROWS // batch)
            for first in range(0, views, at_once):
                last = min(first + at_once, views)
                own = targets[first:last]  # of the global views among these
                s = at_least_float32(z[first:last].to(low) @ w.T).div_(student_temp)
                lse = s.logsumexp(-1, keepdim=True)
                loss += global_views * lse.sum() - lse[: len(own)].sum()
                loss -= torch.linalg.vecdot(total, s).sum() - torch.linalg.vecdot(own, s[: len(own)]).sum()
                if wanted:
                    ds = s.sub_(lse).exp_()
                    ds[len(own) :] *= global_views
                    ds[: len(own)].mul_(global_views - 1).add_(own)
                    ds = ds.sub_(total).div_(divisor * student_temp).to(back)
                    dz[first:last] = ds @ w_back
                    ds, part = ds.flatten(0, 1), z[first:last].flatten(0, 1).to(back)
                    if back == dw.dtype:
                        dw.addmm_(ds.T, part)
                    else:
                        dw += ds.T @ part
        ctx.save_for_backward(dz, dw, z, weight, targets)
        ctx.low, ctx.student_temp = low, student_temp
        return loss / divisor

    @staticmethod
    def backward(ctx, upstream: Tensor):  # type: ignore[override]
        dz, dw, z, weight, targets = ctx.saved_tensors
        if differentiated_again(upstream):

            def whole(z: Tensor, weight: Tensor) -> Tensor:
                return _cross_entropy(z.to(ctx.low) @ weight.to(ctx.low).T, targets, ctx.student_temp)

            return *gradients(whole, (z, weight), upstream), None, None
        return dz * upstream, dw * upstream, None, None


class DINOLoss(nn.Module):
    """Caron et al. 2021, eq. 2, 3 and the centring of sec. 3.1.

    ``forward`` and ``of_prototypes`` only read the centre. Teacher outputs are gathered by ``observe`` in each
    micro-batch and enter the centre in ``update_center``, once per optimiser step, over all devices.

    With ``centering="sinkhorn"`` the teacher's outputs are balanced within each micro-batch by
    :func:`sinkhorn_knopp`, over all devices, in place of the running centre (DINOv2).

    Args:
        out_dim: K.
        student_temp: the student's temperature.
        center_momentum: the share of the old centre that stays.
        centering: "mean" (the running centre) or "sinkhorn".

    Raises:
        ValueError: for another ``centering``.
    """

    center: Tensor

    def __init__(
        self, out_dim: int, student_temp: float = 0.1, center_momentum: float = 0.9, centering: str = "mean"
    ) -> None:
        super().__init__()
        if centering not in CENTERINGS:
            raise ValueError(f"centering={centering!r}; allowed: {', '.join(CENTERINGS)}")
        self.student_temp, self.center_momentum, self.centering = student_temp, center_momentum, centering
        self.register_buffer("center", torch.zeros(1, out_dim))
        self._sum: Tensor | None = None
        self._count = 0

    @torch.no_grad()
    def targets(self, teacher: Tensor, teacher_temp: float) -> tuple[Tensor, Tensor]:
        """Teacher logits (G·B, K) to distributions (G·B, K), in float32 at least, and their mean entropy."""
        teacher = at_least_float32(teacher)
        if self.centering == "sinkhorn":
            logits = sinkhorn_knopp(teacher / teacher_temp)
        else:
            logits = (teacher - self.center).div_(teacher_temp)
        target = logits.softmax(-1)
        return target, (logits.logsumexp(-1) - torch.linalg.vecdot(target, logits)).mean()

    def forward(self, student: Tensor, teacher: Tensor, views: int, teacher_temp: float) -> LossParts:
        """Student logits (V·B, K) and teacher logits (G·B, K), view by view. Computed in float32 at least."""
        student = student.unflatten(0, (views, -1))
        target, entropy = self.targets(teacher, teacher_temp)
        loss = _cross_entropy(student, target.view(-1, *student.shape[1:]), self.student_temp)
        return LossParts(loss, entropy, loss.detach() - entropy)

    def of_prototypes(self, z: Tensor, weight: Tensor, teacher: Tensor, views: int, teacher_temp: float) -> LossParts:
        """``forward`` for the student logits z @ weightᵀ, of which those of a view or a few are held at a time.

        Args:
            z: (V·B, d) the student's bottleneck, view by view.
            weight: (K, d) the prototypes.
            teacher: (G·B, K) logits.
            views: V.
            teacher_temp: the teacher's temperature.
        """
        target, entropy = self.targets(teacher, teacher_temp)
        z = z.unflatten(0, (views, -1))
        target = target.view(-1, z.shape[1], target.shape[-1])
        loss = _PrototypeCrossEntropy.apply(z, weight, target, self.student_temp)
        return LossParts(loss, entropy, loss.detach() - entropy)

    @torch.no_grad()
    def observe(self, teacher: Tensor) -> None:
        """Gathers teacher logits (G·B, K) for the next update of the centre; nothing to do for Sinkhorn-Knopp."""
        if self.centering == "sinkhorn":
            return
        total = teacher.to(self.center.dtype).sum(0, keepdim=True)
        self._sum = total if self._sum is None else self._sum + total
        self._count += teacher.shape[0]

    @torch.no_grad()
    def update_center(self, skip_update: Tensor | None = None) -> None:
        """centre <- m · centre + (1 - m) · mean of all teacher logits observed since the last update.

        Args:
            skip_update: a boolean scalar on the device; where it is true the centre stays as it is.
        """
        if self._sum is None:
            return
        packed = all_reduce(torch.cat([self._sum.flatten(), self._sum.new_tensor([self._count])]))
        mean = packed[:-1] / packed[-1]
        moved = (self.center * self.center_momentum).add_(mean, alpha=1 - self.center_momentum)
        self.center.copy_(moved if skip_update is None else torch.where(skip_update, self.center, moved))
        self._sum, self._count = None, 0
