"""Run folders as evaluations leave them, made by hand."""

import json

import numpy as np


def write_run(runs, model, task, rows, complete=True, epoch=0, counts=None, arrays=None, weights="w.pth (flat)"):
    """RUNS/MODEL-TASK with results.json (or results.partial.json), run.json and, with ``arrays``, results.npz."""
    folder = runs / f"{model}-{task}"
    folder.mkdir(parents=True, exist_ok=True)
    table = {
        "module": "M", "backbone": "B", "headline": {}, "weights": weights, "backbone_parameters": 129_600, "epoch": epoch, "complete": complete,
        "counts": counts or {}, "rows": rows,
    }  # fmt: skip
    for name in ("results.json", "results.partial.json"):
        (folder / name).unlink(missing_ok=True)
    (folder / ("results.json" if complete else "results.partial.json")).write_text(json.dumps(table))
    record = {"started": "2026-11-28T10:00:00+0000", "revision": "0123456789abcdef", "config": "config.yaml"}
    (folder / "run.json").write_text(json.dumps(record))
    if arrays:
        np.savez(folder / "results.npz", **arrays)
    return folder


def head(n=1, pooling="cls", best=0.7, last=0.6, lr=0.001, wd=0.0):
    """A row of LinearProbe."""
    return {
        "head": f"n{n}", "n_last_blocks": n, "pooling": pooling, "lr": lr, "weight_decay": wd, "batch_norm": False,
        "top1_best": best, "top5_best": 0.9, "best_epoch": 3, "top1_last": last, "top5_last": 0.9, "images": 50_000,
        "parameters": 1_000 * n,
    }  # fmt: skip


def map_row(name, auc=0.6):
    """A row of BinaryAUCEvaluation."""
    return {
        "map": name, "auc": auc, "auc_normalized": auc + 0.1, "auc_of_mean_normalized": max(auc, 1 - auc),
        "images": 12_000, "skipped": 419,
    }  # fmt: skip


def auc_run(runs, model, seed=0, blocks=2, heads=2, registers=0, count=3, **kwargs):
    """A Binary-AUC run with pictures: maps that follow the masks more closely in later blocks."""
    rng = np.random.default_rng(seed)
    masks = np.zeros((count, 16, 16), np.int32)
    for i in range(count):
        masks[i, 4 : 8 + i, 4:12] = 5
    coarse = masks[:, 2::4, 2::4] != 0
    names, values, rows = [], [], []
    for block in range(blocks):
        parts = ["similarity", "mixing", *(f"head{h}/mixing" for h in range(heads))]
        parts += [f"register{r}/{kind}" for kind in ("similarity", "mixing") for r in range(registers)]
        for number, part in enumerate(parts):
            sign = -1 if part == "mixing" else 1
            values.append(sign * (coarse * (block + 1.0) + rng.normal(0, 1 + 0.1 * number, coarse.shape)))
            names.append(f"block{block}/{part}")
            rows.append(map_row(names[-1], 0.5 + sign * (0.1 + 0.1 * block + 0.01 * number)))
    names.append("shuffled")
    values.append(rng.normal(size=coarse.shape))
    rows.append(map_row("shuffled", 0.5))
    features = rng.normal(size=(count, 6, 4, 4)) + 4 * coarse[:, None]
    arrays = {
        "keys": np.array([f"k{i}" for i in range(count)]),
        "images": rng.integers(0, 255, (count, 16, 16, 3), dtype=np.uint8),
        "masks": masks, "maps": np.stack(values, 1).astype(np.float32), "map_names": np.array(names),
        "patches": features.astype(np.float32), "ignore_index": np.array(1000),
    }  # fmt: skip
    return write_run(runs, model, "auc", rows, arrays=arrays, **kwargs)
