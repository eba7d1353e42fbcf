"""The study's numbers are those of its runs, and its order is told as found."""

import csv
import json

import numpy as np
import pytest

from analysis import study
from experiments import spec
from tests.analysis.runs import head, map_row, write_run

(TARGET,) = spec.targets(["study"])
SCORES = {"vit_demo": 0.8, "vim_demo": 0.7, "linear_vit_demo": 0.6}


def seed_folder(runs, seed, scores):
    for model, score in scores.items():
        where = runs / f"seed{seed}"
        write_run(where, model, "probe", [head(1, last=score), head(2, last=score - 0.1)])
        write_run(where, model, "knn", [{"k": 20, "top1": score}, {"k": 10, "top1": 0.1}])
        maps = [
            map_row("block0/similarity", 0.9),
            map_row("block1/similarity", 1 - score),
            map_row("block1/mixing", score),
        ]
        write_run(where, model, "auc", [*maps, map_row("shuffled", 0.5)])
        ranks = [
            {"direction": d, "effective_rank_mean": r, "block_effective_rank_mean": r / 2, "block_rank_max": 16}
            for d, r in (("forward", 99.0), ("both", 10 * score), ("both", 20 * score))
        ]
        if model != "vim_demo":
            ranks = [row | {"direction": "attention"} for row in ranks[1:]]
        write_run(where, model, "ranks", ranks)


def test_means_spread_and_order(tmp_path):
    for seed, shift in ((0, 0.0), (1, 0.02), (2, 0.07)):
        seed_folder(tmp_path, seed, {m: s + shift for m, s in SCORES.items()})
    seed_folder(tmp_path, 2, SCORES | {"linear_vit_demo": 0.95})
    paths = study.draw(TARGET, tmp_path)
    found = json.loads((tmp_path / "study.json").read_text())
    values = found["values"]["vim_demo"]
    assert values["linear_top1"] == pytest.approx([70, 72, 70]) and values["knn_top1"] == pytest.approx([70, 72, 70])
    assert values["auc_similarity"] == pytest.approx([0.7, 0.72, 0.7])  # max(m, 1 - m) of the last block
    assert values["effective_rank"] == pytest.approx([10.5, 10.8, 10.5])  # of both directions together
    row = next(r for r in study.table_rows(found) if r["metric"].startswith("linear probe"))
    deviation = np.std([80, 82, 80], ddof=1)
    assert row["softmax"] == f"80.7 ± {deviation:.1f}"
    assert (
        row["order of means"] == "softmax > linear > Mamba" and row["seeds with softmax > Mamba ≥ linear"] == "2 of 3"
    )
    page = (tmp_path / "study.html").read_text()
    assert "129,600" in page and "12,000 validation images" in page and "data:image/png" in page
    with (tmp_path / "study.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3 * 7 * 3
    assert all(path.is_file() for path in paths) and (tmp_path / "study.pdf").read_bytes().startswith(b"%PDF")


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no seed folders"):
        study.draw(TARGET, tmp_path)
    seed_folder(tmp_path, 0, SCORES)
    (tmp_path / "seed0/vim_demo-knn/results.json").unlink()
    with pytest.raises(ValueError, match=r"seed0/vim_demo-knn/results.json is missing: run make study"):
        study.draw(TARGET, tmp_path)
