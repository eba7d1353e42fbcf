"""Binary-AUC of ImageNet-S validation's size (12,419 images x 24 maps of 14 x 14) against a loop over sklearn's."""

import torch
from common import report, seconds
from sklearn.metrics import roc_auc_score

from metrics import BinaryAUC

IMAGES, MAPS, GRID, LOOPED = 12419, 24, 14, 100


def main() -> None:
    torch.set_num_threads(2)
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(IMAGES, MAPS, GRID, GRID, generator=g)
    masks = torch.zeros(IMAGES, GRID, GRID, dtype=torch.int32)
    masks[:, 3:10, 4:11] = 7

    def ours() -> dict[str, torch.Tensor]:
        metric = BinaryAUC(MAPS)
        for part, mask in zip(scores.split(256), masks.split(256), strict=True):
            metric.update(part, mask)
        return metric.compute()

    def loop() -> float:
        total = 0.0
        for i in range(LOOPED):
            target = (masks[i].flatten() != 0).numpy()
            total += sum(roc_auc_score(target, scores[i, k].flatten().numpy()) for k in range(MAPS))
        return total

    mine, spread = seconds(ours, 3)
    theirs, their_spread = seconds(loop, 3)
    scale = IMAGES / LOOPED
    assert abs(loop() / (LOOPED * MAPS) - binary_mean(scores[:LOOPED], masks[:LOOPED])) < 1e-9
    whole, their_spread = theirs * scale, their_spread * scale
    rows = [
        [f"metrics.BinaryAUC, batches of 256, {IMAGES:,} x {MAPS} maps", f"{mine:.1f} ± {spread:.1f}", "1"],
        [
            f"sklearn roc_auc_score in a loop ({LOOPED} images, scaled)",
            f"{whole:.0f} ± {their_spread:.0f}",
            f"{whole / mine:.0f}",
        ],
    ]
    report("binary_auc", ["what", "seconds", "ratio"], rows)


def binary_mean(scores: torch.Tensor, masks: torch.Tensor) -> float:
    metric = BinaryAUC(MAPS)
    metric.update(scores, masks)
    return metric.compute()["auc"].mean().item()


if __name__ == "__main__":
    main()
