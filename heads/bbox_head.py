"""The box head: two shared layers, classes and deltas; parameter names are mmdet's Shared2FCBBoxHead.

Shapes: n boxes, K classes (the last logit, number K, is background).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.precision import at_least_float32
from heads.boxes import DeltaCoder, smooth_l1


class BBoxHead(nn.Module):
    """Classes and deltas of boxes from their features.

    Shared layers start Xavier-uniform, classes from N(0, 0.01), deltas from N(0, 0.001), biases at 0, as mmdet's.

    Args:
        num_classes: K.
        in_channels: of the features.
        fc_channels: of the shared layers.
        size: bins of the features on each side.
        stds: of :class:`heads.boxes.DeltaCoder`.
        class_agnostic: one set of deltas for all classes rather than one for each.
        beta: of the smooth L1 loss; 0 is L1.
    """

    def __init__(
        self, num_classes: int, in_channels: int = 256, fc_channels: int = 1024, size: int = 7,
        stds: Sequence[float] = (0.1, 0.1, 0.2, 0.2), class_agnostic: bool = False, beta: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_classes, self.size, self.class_agnostic, self.beta = num_classes, size, class_agnostic, beta
        self.coder = DeltaCoder(tuple(stds))
        self.shared_fcs = nn.ModuleList(
            [nn.Linear(in_channels * size**2, fc_channels), nn.Linear(fc_channels, fc_channels)]
        )
        self.fc_cls = nn.Linear(fc_channels, num_classes + 1)
        self.fc_reg = nn.Linear(fc_channels, 4 if class_agnostic else 4 * num_classes)
        for layer in self.shared_fcs:
            nn.init.xavier_uniform_(layer.weight)
        nn.init.normal_(self.fc_cls.weight, std=0.01)
        nn.init.normal_(self.fc_reg.weight, std=0.001)
        for layer in (*self.shared_fcs, self.fc_cls, self.fc_reg):
            nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(n, in_channels, size, size) to logits (n, K + 1) and deltas (n, 4) or (n, 4·K), at least in float32."""
        x = features.flatten(1)
        for layer in self.shared_fcs:
            x = F.relu(layer(x))
        return at_least_float32(self.fc_cls(x)), at_least_float32(self.fc_reg(x))

    def of_class(self, deltas: Tensor, labels: Tensor) -> Tensor:
        """(n, 4) deltas of the class of each box; labels (n) below K."""
        if self.class_agnostic:
            return deltas
        return deltas.unflatten(1, (self.num_classes, 4))[torch.arange(len(labels), device=labels.device), labels]

    def loss(self, logits: Tensor, deltas: Tensor, labels: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """``loss_cls``, ``loss_bbox`` and the accuracy ``acc`` in percent; zeros of a graph without boxes.

        The regression is a sum over the positives, divided by the number of all boxes.

        Args:
            logits, deltas: what forward gave.
            labels: (n), K for background.
            targets: (n, 4) encoded boxes; those of background are not read.
        """
        number, positive = max(len(labels), 1), labels < self.num_classes
        chosen = self.of_class(deltas[positive], labels[positive])
        right = (logits.argmax(1) == labels).sum()
        return {
            "loss_cls": F.cross_entropy(logits, labels, reduction="sum") / number,
            "loss_bbox": smooth_l1(chosen, targets[positive].to(chosen), self.beta) / number,
            "acc": right.to(logits) * 100 / number,
        }
