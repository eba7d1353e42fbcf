"""The page of claims, from runs of the test's making."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from analysis import claims
from experiments import spec
from tests.analysis.runs import auc_run, head, write_run

PAPER = spec.target("claims", "demo")
TARGET = replace(PAPER, models=("vim_demo", "mambar_demo"), options=PAPER.options | {"seeds": [0, 1, 2]})
BLOCKS, HEADS, REGISTERS = 5, 4, 5


def places(folder, model, registers, rng):
    rows = []
    parts = [(block, "cls", stream) for block in range(BLOCKS) for stream in ("branch", "residual")]
    parts += [(-1, f"head{h}", "branch") for h in range(HEADS)]
    parts += [(-1, f"register{r}", stream) for r in range(registers) for stream in ("branch", "residual")]
    for block, pooling, stream in parts:
        for lr in (0.1, 0.3):  # the better one counts
            read = {"block": block, "stream": stream, "reading": "published" if stream == "branch" else "other"}
            rows.append(head(1, pooling, last=round(rng.uniform(0.2, 0.9), 3), lr=lr) | read)
    rows.append(head(4, last=0.99) | {"block": None, "stream": "branch", "reading": "published"})  # of several blocks
    write_run(folder, model, "places", rows)
    return rows


def statistics(folder, model, lazy):
    rows = []
    empty = dict.fromkeys((*claims.NORMS, *claims.DISTANCES, "lazy_uniform", "lazy_elsewhere"))
    for block in range(BLOCKS):
        for stream, reading in (("branch", "published"), ("residual", "other")):
            norms = {"patch_norm_median": 2.0 + block, "patch_norm_q99": 3.0, "patch_norm_max": 40.0 + block}
            share = 0.03 if block == 2 else 0.01
            rows.append(empty | norms | {"block": block, "head": None, "stream": stream, "reading": reading,
                        "outlier_share": share, "cls_norm": 5.0, "background_share": 0.7})  # fmt: skip
    for block in range(BLOCKS):
        for h in range(HEADS):
            distance = {"distance": 1.0 + block + h / 10, "distance_of_diagonal": 0.1, "uniform_distance": 3.0,
                        "uniform_of_diagonal": 0.37}  # fmt: skip
            told = {"lazy_uniform": (block, h) in lazy, "lazy_elsewhere": block == 4 and h == 0}
            rows.append(empty | distance | told | {"block": block, "head": h, "stream": None, "reading": None})
    counts = {"outlier_factor": 4.0, "lazy_entropy": 0.95, "lazy_share": 0.9}
    write_run(folder, model, "token_statistics", rows, counts=counts)


def make(tmp_path, seeds=(0, 1, 2)):
    rng = np.random.default_rng(0)
    for seed in seeds:
        for model, registers in (("vim_demo", 0), ("mambar_demo", REGISTERS)):
            folder = tmp_path / f"seed{seed}"
            auc_run(folder, model, seed, blocks=BLOCKS, heads=HEADS, registers=registers)
            places(folder, model, registers, rng)
            statistics(folder, model, {(0, 1), (4, 0)} if model == "vim_demo" else set())


def test_points_are_the_same_place_read_twice(tmp_path):
    make(tmp_path)
    found, missing = claims.collect(TARGET, tmp_path)
    assert [(one.model, one.seed) for one in found] == [
        (model, seed) for seed in (0, 1, 2) for model in ("vim_demo", "mambar_demo")
    ] and not missing
    every = claims.points(found)
    count = {over: sum(p["over"] == over for p in every) for over in claims.OVER}
    assert count == {"layers": 6 * 2 * BLOCKS, "heads": 6 * HEADS, "registers": 3 * 2 * REGISTERS, "models": 6 * 2}
    for one in found:
        aucs = {(row["map"]): row["auc"] for row in one.auc.rows}
        for point in every:
            if (point["model"], point["seed"]) != (one.model, one.seed):
                continue
            block, part = point["place"].split("/")
            middle = "" if part == "cls" else f"{part}/"
            kind = "mixing" if part.startswith("head") else "similarity"
            end = "/residual" if point["stream"] == "residual" else ""
            assert point["auc"] == aucs[f"{block}/{middle}{kind}{end}"]
            wanted = [
                row["top1_last"] for row in one.places.rows
                if row["block"] is not None and row["pooling"] == part
                and row["block"] % BLOCKS == int(block.removeprefix("block"))
                and point["stream"] in (None, row["stream"])
            ]  # fmt: skip
            assert len(wanted) == 2 and point["top1"] == pytest.approx(100 * max(wanted))


def test_page(tmp_path):
    make(tmp_path)
    paths = claims.draw(TARGET, tmp_path)
    assert {path.name for path in paths} == {f"claims.{end}" for end in ("md", "csv", "html", "json", "png", "pdf")}
    every = json.loads((tmp_path / "claims.json").read_text())["points"]
    with open(tmp_path / "claims.csv") as file:
        rows = list(csv.DictReader(file))
    (raw,) = (r for r in rows if r["over"] == claims.OVER["layers"] and "published" in r["read"] and r["score"] == "m"
              and r["points"] == "raw")  # fmt: skip
    mine = [p for p in every if p["over"] == "layers" and p["reading"] == "published"]
    of_seed = [[p for p in mine if p["seed"] == seed] for seed in (0, 1, 2)]
    wanted = [stats.spearmanr([p["auc"] for p in some], [p["top1"] for p in some]).statistic for some in of_seed]
    assert (int(raw["n"]), int(raw["seeds"])) == (30, 3) and float(raw["spearman"]) == pytest.approx(np.mean(wanted))
    low, high = stats.ttest_1samp(wanted, 0).confidence_interval(0.95)
    assert raw["spearman_interval"] == f"{max(low, -1):+.2f} to {min(high, 1):+.2f}"
    (within,) = (r for r in rows if r["over"] == claims.OVER["layers"] and "published" in r["read"]
                 and r["score"] == "m" and r["points"] == "within models")  # fmt: skip
    inside = []
    for some in of_seed:
        centred = [
            [p[key] - np.mean([q[key] for q in some if q["model"] == p["model"]]) for p in some]
            for key in ("auc", "top1")
        ]
        inside.append(stats.pearsonr(*centred).statistic)
    assert float(within["pearson"]) == pytest.approx(np.mean(inside))
    assert {r["points"] for r in rows if r["over"] == claims.OVER["models"]} == {"raw"}
    text = (tmp_path / "claims.md").read_text()
    assert "Seeds: 0, 1, 2." in text and "Not run" not in text
    # of 20 heads a seed (0, 1) and (4, 0) are uniform, and (4, 0) looks elsewhere; AUCs are far from 0.5 but in block 0
    assert "| Vim | 60 | 0.100 | 0.050 | " in text
    assert "| branch (published) | 6.000 | 3.000 | 44.000 | 0.010 |" in text and "| 0.030 | 2 |" in text
    assert "| Vim | 3 | 4.150 | 0.100 | 4.000 | 4.300 | 3.000 | 0.370 |" in text


def test_what_cannot_be_told(tmp_path):
    """One seed of three registers: a coefficient without an interval."""
    target = replace(TARGET, models=("mambar_demo",), options=TARGET.options | {"seeds": None})
    auc_run(tmp_path, "mambar_demo", blocks=BLOCKS, heads=HEADS, registers=3)
    places(tmp_path, "mambar_demo", 3, np.random.default_rng(0))
    statistics(tmp_path, "mambar_demo", set())
    found, _ = claims.collect(target, tmp_path)
    rows = claims.correlations(target, claims.points(found))
    registers = [row for row in rows if row["over"] == claims.OVER["registers"]]
    assert {(row["n"], row["points"], row["verdict"]) for row in registers} == {(3, "raw", "cannot be told")}
    assert all(row["spearman"] is not None and row["spearman_interval"] == "cannot be told" for row in registers)
    models = [row for row in rows if row["over"] == claims.OVER["models"]]
    assert {(row["n"], row["pearson"]) for row in models} == {(1, None)}
    claims.draw(target, tmp_path)


def test_missing_runs_are_named(tmp_path):
    make(tmp_path, seeds=(0,))
    _, missing = claims.collect(TARGET, tmp_path)
    assert missing == [f"seed{s}/{m}-{t}" for s in (1, 2) for m in TARGET.models for t in TARGET.tasks]
    with pytest.raises(ValueError, match=r"claims: no model has all of its runs under .*: seed0/vim_demo-auc"):
        claims.collect(TARGET, tmp_path / "nothing")
