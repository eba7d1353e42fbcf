"""Binary-AUC of ImageNet-S validation's size (12,419 images x 24 maps of 14 x 14) against a loop over sklearn's."""

import torch
from measuring import Line, compare, in_turns
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

    assert abs(loop() / (LOOPED * MAPS) - binary_mean(scores[:LOOPED], masks[:LOOPED])) < 1e-9
    times = in_turns({"ours": ours, "loop": loop}, 3)
    whole = [t * IMAGES / LOOPED for t in times["loop"]]
    peer = f"sklearn's roc_auc_score in a loop ({LOOPED} images, scaled)"
    what = f"metrics.BinaryAUC, {IMAGES:,} images x {MAPS} maps, batches of 256"
    compare("binary_auc", [Line(what, times["ours"], peer, whole)])


def binary_mean(scores: torch.Tensor, masks: torch.Tensor) -> float:
    metric = BinaryAUC(MAPS)
    metric.update(scores, masks)
    return metric.compute()["auc"].mean().item()


if __name__ == "__main__":
    main()
