"""DINO's loss: cross-entropy between balanced, sharpened teacher outputs and student outputs across views.

Shapes: G global views, V all views (global first), B images a device, K out_dim.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

CENTERINGS = ("mean", "sinkhorn")


def all_reduce(t: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """``t`` reduced in place over all devices."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(t, op)
    return t


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


class DINOLoss(nn.Module):
    """Caron et al. 2021, eq. 2, 3 and the centring of sec. 3.1.

    ``forward`` only reads the centre. Teacher outputs are gathered by ``observe`` in each micro-batch and enter the
    centre in ``update_center``, once per optimiser step, over all devices.

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

    def forward(self, student: Tensor, teacher: Tensor, views: int, teacher_temp: float) -> LossParts:
        """Student logits (V·B, K) and teacher logits (G·B, K), view by view. Computed in float32 at least."""
        student, teacher = (t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in (student, teacher))
        batch = student.shape[0] // views
        log_student = F.log_softmax(student / self.student_temp, -1).view(views, batch, -1)
        if self.centering == "sinkhorn":
            log_target = sinkhorn_knopp(teacher.detach() / teacher_temp)
        else:
            log_target = ((teacher.detach() - self.center) / teacher_temp).log_softmax(-1)
        log_target = log_target.view(-1, batch, teacher.shape[-1])
        target = log_target.exp()
        global_views = target.shape[0]
        # sum over pairs v != g of -target_g · log_student_v = all pairs less the diagonal
        everyone = (target.sum(0) * log_student.sum(0)).sum(-1)
        same = (target * log_student[:global_views]).sum((0, -1))
        pairs = global_views * (views - 1)
        loss = (same - everyone).mean() / pairs
        entropy = -(target * log_target).sum(-1).mean()
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
    def update_center(self) -> None:
        """centre <- m · centre + (1 - m) · mean of all teacher logits observed since the last update."""
        if self._sum is None:
            return
        packed = all_reduce(torch.cat([self._sum.flatten(), self._sum.new_tensor([self._count])]))
        mean = packed[:-1] / packed[-1]
        self.center.mul_(self.center_momentum).add_(mean, alpha=1 - self.center_momentum)
        self._sum, self._count = None, 0
