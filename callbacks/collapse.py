"""Tells a collapse from learning, early."""

import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

logger = logging.getLogger(__name__)


class CollapseMonitor(Callback):
    """Warns, once per kind and run, when outputs or features carry nothing.

    Reads what the module logs, as far as it does: ``train/loss``, ``train/teacher_entropy``, ``train/kl``,
    ``train/feature_std``, and its ``uniform_loss``, what a model scores that gives every image the same uniform answer.

    - The loss sits within ``tolerance`` of the uniform loss, and the KL below a twentieth of that: the student gives
      every image the uniform distribution, and the teacher is following it there.
    - The teacher's entropy is below ``tolerance``: every image gets the same prototype.
    - The embeddings' spread is below ``min_feature_std`` (1 is evenly spread over the sphere, 0 is one point).

    Args:
        patience: training batches in a row before it warns.
        tolerance: in nats.
        min_feature_std: see above.
    """

    def __init__(self, patience: int = 200, tolerance: float = 0.02, min_feature_std: float = 0.05) -> None:
        self.patience, self.tolerance, self.min_feature_std = patience, tolerance, min_feature_std
        self._run: dict[str, int] = {}
        self._warned: set[str] = set()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % 10 or "train/loss" not in trainer.callback_metrics:
            return  # a look every 10 steps keeps the device from waiting
        found = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("train/")}
        uniform = getattr(pl_module, "uniform_loss", None)
        signs: dict[str, bool] = {}
        if uniform is not None and "train/kl" in found:
            at_uniform = abs(found["train/loss"] - uniform) < self.tolerance and found["train/kl"] < uniform / 20
            signs[
                f"the loss sits at that of the uniform distribution, {uniform:.3f}, which every image gets; "
                "lower model.teacher_temp or model.lr, or try another seed"
            ] = at_uniform
        if "train/teacher_entropy" in found:
            signs[
                "the teacher's entropy is 0, all images fall on one prototype; "
                "raise model.teacher_temp or check the centre"
            ] = found["train/teacher_entropy"] < self.tolerance
        if "train/feature_std" in found:
            signs["the embeddings have collapsed to a point; lower model.lr"] = (
                found["train/feature_std"] < self.min_feature_std
            )
        for message, present in signs.items():
            self._run[message] = self._run.get(message, 0) + 10 if present else 0
            if self._run[message] >= self.patience and message not in self._warned:
                self._warned.add(message)
                logger.warning("collapse at step %d: %s", trainer.global_step, message)
