"""What a module tells whoever keeps its results."""

from typing import Any

import numpy as np


class Evaluation:
    """Mixed into a LightningModule: what it found, for tables, arrays and checkpoints.

    Nothing has to be overridden: a module without rows leaves no table, one without a headline no best checkpoint.
    """

    headline = ""
    """The logged metric that runs and checkpoints are compared by; higher is better."""
    trained_part = ""
    """What only training gives and scores hang on, in words; it is then not evaluated without a checkpoint."""
    needs_labels = False
    """Whether samples without a class are of no use; data without any are then refused before the first step."""

    @property
    def label_count(self) -> int | None:
        """Classes that labels may name, 0 to label_count - 1; None for any."""
        return None

    def rows(self) -> list[dict[str, Any]]:
        """The table of what was evaluated last, a dict for each line, all with the same keys."""
        return []

    def arrays(self) -> dict[str, np.ndarray]:
        """What figures need beside the table."""
        return {}

    def counts(self) -> dict[str, float]:
        """What the evaluation took: images, passes of the backbone."""
        return {}

    def complete(self) -> bool:
        """Whether what was evaluated last is all that was asked for: the run's last epoch, over all of the data."""
        return self._over_all_of("train", "val", "test")

    def _over_all_of(self, *stages: str) -> bool:
        """No ``limit_*_batches`` of those stages cuts the run short, and it is at its end."""
        trainer: Any = getattr(self, "trainer", None)
        assert trainer is not None
        fitting = trainer.state.fn == "fit"
        if fitting and trainer.max_epochs is not None and 0 <= trainer.current_epoch + 1 < trainer.max_epochs:
            return False
        limits = [getattr(trainer, f"limit_{stage}_batches") for stage in stages if fitting or stage != "train"]
        # the number 1 is one batch, 1.0 is all of them
        return not trainer.fast_dev_run and all(isinstance(limit, float) and limit == 1.0 for limit in limits)
