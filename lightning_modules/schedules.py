"""Values over a run, as pure functions of the step or epoch. They follow DINO's (Caron et al. 2021)."""

import math
from collections.abc import Sequence


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


def warmed_up(step: int, peak: float, warmup_steps: int, start_factor: float) -> float | None:
    """Linear from ``peak * start_factor`` at step 0 to ``peak`` at the last of ``warmup_steps``; None after them.

    mmengine's LinearLR.
    """
    if step >= warmup_steps:
        return None
    return peak * (start_factor + (1 - start_factor) * step / max(1, warmup_steps - 1))


def poly_schedule(step: int, total_steps: int, peak: float, warmup_steps: int, power: float = 1.0) -> float:
    """``peak`` at step ``warmup_steps``, 0 at the last step, as (1 - progress) ** power. mmengine's PolyLR."""
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps - 1)
    return peak * (1 - min(progress, 1.0)) ** power


def step_schedule(progress: float, peak: float, milestones: Sequence[float], gamma: float = 0.1) -> float:
    """``peak`` times ``gamma`` for each milestone that is reached."""
    return peak * gamma ** sum(progress >= milestone for milestone in milestones)
