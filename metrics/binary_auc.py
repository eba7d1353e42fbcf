"""Binary-AUC as a metric over a data set."""

import torch
from torch import Tensor
from torchmetrics import Metric

from common.precision import exact
from metrics.functional import Comparison, binary_auc

UNITS = 2.0**42
"""Of the state's sums in 1; two million images have room."""


def _in_units(auc: Tensor) -> Tensor:
    return (auc * UNITS).round().long()


class BinaryAUC(Metric):
    """:func:`binary_auc` of several maps an image, summed over images.

    Images whose mask is all one class where it meets the maps have no AUC: they are skipped and counted. The state is a
    few integers a map, AUCs in units of 2^-42, so neither batching nor the number of processes (empty ones included)
    changes the result by a bit, and a device needs no float64.

    ``compute`` returns, each (num_maps):

    - ``auc``: mean of AUC over images,
    - ``auc_normalized``: mean of max(AUC, 1 - AUC); above 0.5 even for random maps, read it beside a shuffled map's,
    - ``auc_of_mean_normalized``: max(m, 1 - m) of the mean m,

    and the counts ``images`` and ``skipped``. Without a scored image the values are NaN.

    Args:
        num_maps: K, maps an image.
        ignore_index: id in the masks that takes no part.
        compare: where maps and masks meet, as in :func:`binary_auc`.
    """

    full_state_update = False
    higher_is_better = True
    sum_auc: Tensor
    sum_normalized: Tensor
    images: Tensor
    skipped: Tensor

    def __init__(self, num_maps: int = 1, ignore_index: int = 1000, compare: Comparison = "grid") -> None:
        super().__init__()
        self.num_maps, self.ignore_index, self.compare = num_maps, ignore_index, compare
        self.last = torch.zeros(0, num_maps, dtype=torch.float64)
        """(B, K) of the images of the latest update, NaN where skipped; what intervals over images are made of."""
        self.add_state("sum_auc", torch.zeros(num_maps, dtype=torch.int64), "sum")
        self.add_state("sum_normalized", torch.zeros(num_maps, dtype=torch.int64), "sum")
        self.add_state("images", torch.tensor(0), "sum")
        self.add_state("skipped", torch.tensor(0), "sum")

    def update(self, scores: Tensor, masks: Tensor) -> None:
        """Scores (B, K, h, w) and masks (B, H, W), as :func:`binary_auc`."""
        if scores.ndim != 4 or scores.shape[1] != self.num_maps:
            raise ValueError(f"BinaryAUC(num_maps={self.num_maps}) got scores of shape {tuple(scores.shape)}")
        self.last = auc = binary_auc(scores, masks, self.ignore_index, self.compare)
        scored = ~auc[:, 0].isnan()
        auc = auc[scored]
        self.sum_auc += _in_units(auc).sum(0).to(self.sum_auc.device)
        self.sum_normalized += _in_units(torch.maximum(auc, 1 - auc)).sum(0).to(self.sum_normalized.device)
        self.images += scored.sum().to(self.images.device)
        self.skipped += (~scored).sum().to(self.skipped.device)

    def compute(self) -> dict[str, Tensor]:
        mean, normalized = (exact(total) / UNITS / exact(self.images) for total in (self.sum_auc, self.sum_normalized))
        return {
            "auc": mean,
            "auc_normalized": normalized,
            "auc_of_mean_normalized": torch.maximum(mean, 1 - mean),
            "images": self.images,
            "skipped": self.skipped,
        }
