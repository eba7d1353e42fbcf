"""Values over a run, as pure functions of the step or epoch. They follow DINO's (Caron et al. 2021)."""

import math


def cosine_schedule(step: int, total_steps: int, start: float, end: float, warmup_steps: int = 0) -> float:
    """Linear from 0 to ``start`` over ``warmup_steps`` (both ends included), then a cosine from ``start`` to ``end``.

    A run shorter than its warm-up simply ends inside it.
    """
    if step < warmup_steps:
        return start * step / (warmup_steps - 1) if warmup_steps > 1 else 0.0
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * progress))


def linear_warmup(epoch: int, warmup_epochs: int, start: float, end: float) -> float:
    """Linear from ``start`` at epoch 0 to ``end`` at epoch ``warmup_epochs - 1``, constant afterwards."""
    if epoch >= warmup_epochs:
        return end
    return start + (end - start) * epoch / (warmup_epochs - 1) if warmup_epochs > 1 else start
