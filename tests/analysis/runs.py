"""Run folders as evaluations leave them, made by hand."""

import json
import re

import numpy as np


def write_run(
    runs, model, task, rows, complete=True, epoch=0, counts=None, arrays=None, weights="w.pth (flat)", module="M"
):
    """RUNS/MODEL-TASK with results.json (or results.partial.json), run.json and, with ``arrays``, results.npz."""
    folder = runs / f"{model}-{task}"
    folder.mkdir(parents=True, exist_ok=True)
    table = {
        "module": module, "backbone": "B", "headline": {}, "weights": weights, "backbone_parameters": 129_600, "epoch": epoch, "complete": complete,
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


def head(n=1, pooling="cls", best=0.7, last=0.6, lr=0.001, wd=0.0, stream="branch"):
    """A row of LinearProbe."""
    return {
        "head": f"n{n}", "n_last_blocks": n, "pooling": pooling, "lr": lr, "weight_decay": wd, "batch_norm": False,
        "top1_best": best, "top5_best": 0.9, "best_epoch": 3, "top1_last": last, "top5_last": 0.9, "images": 50_000,
        "parameters": 1_000 * n, "stream": stream,
    }  # fmt: skip


def map_row(name, auc=0.6, fields=True):
    """A row of BinaryAUCEvaluation; without its fields as it was written before there were any."""
    where = name.split("/")
    other = where.pop() if where[-1] in ("branch", "residual") else None
    *where, kind = where
    block = int(where[0].removeprefix("block")) if where else 1
    part, index = (
        re.fullmatch(r"(head|register|patch|first)(\d*)", where[1]).groups() if len(where) > 1 else (None, None)
    )
    row = {"map": name, "block": block, "part": part, "index": int(index) if index else None, "kind": kind}
    stream = other or ("branch" if kind == "similarity" else "published")
    row |= {"stream": stream, "reading": "other" if other else "published"}
    return (row if fields else {"map": name}) | {
        "auc": auc, "auc_normalized": auc + 0.1, "auc_of_mean_normalized": max(auc, 1 - auc),
        "images": 12_000, "skipped": 419,
    } | ({"auc_low": auc - 0.02, "auc_high": auc + 0.02} if fields else {})  # fmt: skip


def auc_run(runs, model, seed=0, blocks=2, heads=2, registers=0, count=3, both=True, task="auc", **kwargs):
    """A Binary-AUC run with pictures: maps that follow the masks more closely in later blocks, the first on a finer
    grid, as in a pyramid; in both readings, unless told."""
    rng = np.random.default_rng(seed)
    masks = np.zeros((count, 16, 16), np.int32)
    for i in range(count):
        masks[i, 4 : 8 + i, 4:12] = 5
    arrays, rows = {}, []
    for block in range(blocks):
        step = 4 if block else 2
        inside = masks[:, step // 2 :: step, step // 2 :: step] != 0
        parts = ["similarity", "mixing", *(f"head{h}/mixing" for h in range(heads))]
        parts += [f"register{r}/{kind}" for kind in ("similarity", "mixing") for r in range(registers)]
        parts += ["first/similarity", "patch3/similarity"] if task == "tokens" else []
        parts += [f"{part}/residual" for part in parts if "similarity" in part] if both else []
        for number, part in enumerate(parts):
            name, sign = f"block{block}/{part}", -1 if part == "mixing" else 1
            values = sign * (inside * (block + 1.0) + rng.normal(0, 1 + 0.1 * number, inside.shape))
            arrays[f"maps/{name}"] = values.astype(np.float32)
            rows.append(map_row(name, 0.5 + sign * (0.1 + 0.1 * block + 0.01 * number)))
    for control, auc in (("shuffled", 0.5), ("position", 0.66)):
        arrays[f"maps/{control}"] = rng.normal(size=inside.shape)
        rows.append(map_row(control, auc))
    features = rng.normal(size=(count, 6, 4, 4)) + 4 * inside[:, None]
    arrays |= {
        "keys": np.array([f"k{i}" for i in range(count)]),
        "images": rng.integers(0, 255, (count, 16, 16, 3), dtype=np.uint8),
        "masks": masks, "map_names": np.array([row["map"] for row in rows]),
        "patches": features.astype(np.float32), "ignore_index": np.array(1000),
        "image_keys": np.array([f"k{i}" for i in range(9)]), "image_auc_names": np.array([row["map"] for row in rows]),
        "image_auc": np.array([row["auc"] for row in rows]) + rng.normal(0, 0.02, (9, len(rows))),
    }  # fmt: skip
    arrays |= {"patches_other": -arrays["patches"]} if both else {}
    return write_run(runs, model, task, rows, arrays=arrays, **kwargs)
