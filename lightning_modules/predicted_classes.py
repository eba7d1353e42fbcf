"""Says in predictions which class a trained classifier takes an image for, by the names of the data it learned from."""

from typing import Any

import numpy as np
from torch import Tensor

KEY = "class_names"
"""Where checkpoints keep the names."""


class PredictsClasses:
    """Mixed into a LightningModule with a classifier, before what it shares with others."""

    _class_names: list[str] | None = None

    @property
    def has_learned(self) -> bool:
        """Whether a prediction goes on from a checkpoint; else its classifier has learned nothing."""
        return getattr(getattr(self, "_trainer", None), "ckpt_path", None) is not None

    def predicted(self, logits: Tensor) -> dict[str, Any]:
        """Of (B, C): ``logits``, ``predicted`` (B) class numbers, and ``predicted_name`` (B) where names are known."""
        numbers = logits.argmax(1)
        found: dict[str, Any] = {"logits": logits, "predicted": numbers}
        if self._class_names:
            names = self._class_names
            found["predicted_name"] = np.array([names[i] if i < len(names) else "" for i in numbers.tolist()], np.str_)
        return found

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)  # type: ignore[misc]
        names = getattr(getattr(getattr(self, "_trainer", None), "datamodule", None), "class_names", None)
        if (names := names or self._class_names) is not None:
            checkpoint[KEY] = list(names)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]
        self._class_names = checkpoint.get(KEY)
