"""Pages of models against one thing that is varied, from runs of the test's making."""

import csv
import json

import pytest

from analysis import sweeps
from experiments import spec
from tests.analysis.runs import head, map_row, write_run


def runs_of(folder, model, n):
    rows = [
        {
            "block": block, "direction": direction, "tokens": 20, "chunk": 8, "inner_size": n, "rank_min": 18 + block,
            "rank_max": 20, "effective_rank_mean": 9.0 + block, "block_rank_min": block + 1, "block_rank_max": min(8, n),
            "block_rank_bound": min(8, n), "block_effective_rank_mean": 2.0 + block, "bound_holds": n != 32,
        }
        for block in range(2)
        for direction in ("forward", "both")
    ]  # fmt: skip
    write_run(folder, model, "ranks512", rows)
    scores = [
        map_row(f"block{block}/{kind}", 0.6 + block / 10) for block in (0, 1) for kind in ("similarity", "mixing")
    ]
    other = [row | {"reading": "other", "auc_of_mean_normalized": 0.9} for row in scores if row["kind"] == "similarity"]
    write_run(folder, model, "auc_both", [*scores, *other])
    write_run(folder, model, "probe", [head(last=0.4), head(n=2, last=0.5)])
    write_run(folder, model, "knn", [{"k": k, "top1": k / 100} for k in (10, 20)])


@pytest.mark.parametrize("costs", [False, True])
def test_page(tmp_path, costs):
    target = spec.target("states")
    for model in target.models:
        runs_of(tmp_path, model, int(model.rpartition("_n")[2]))
    if costs:
        times = {"step_seconds": 0.25, "step_ratio": 1.5, "forward_seconds": 0.01, "forward_ratio": 1.25}
        rows = [{"series": "Vim", "x": n, "peak_mib": 500.0, **times} for n in (16, 32, 64, 128, 256)]
        (tmp_path / "states-cost.json").write_text(json.dumps({"machine": "a CPU", "date": "2026-11-29", "rows": rows}))
    paths = sweeps.draw(target, tmp_path)
    assert {path.name for path in paths} == {f"states.{end}" for end in ("md", "csv", "html", "png", "pdf")}
    with open(tmp_path / "states.csv") as file:
        found = {row["x"]: row for row in csv.DictReader(file)}
    assert list(found) == ["16", "32", "64", "128", "256"]
    for row in found.values():
        assert (row["block_rank"], row["block_bound"], row["rank"]) == ("1 to 8", "8", "18 to 20")
        assert (float(row["block_effective_rank"]), float(row["effective_rank"])) == (2.5, 9.5)
        assert [float(row[k]) for k in ("similarity", "similarity_other", "mixing")] == [0.7, 0.9, 0.7]
        assert (float(row["linear_top1"]), float(row["knn_top1"])) == (50, 20)
        assert (float(row["step"]), float(row["forward_ratio"])) == (250, 1.25) if costs else "step" not in row
    text = (tmp_path / "states.md").read_text()
    assert ("Cost was not measured: python benchmarks/state_size.py --out" in text) != costs
    assert "A bound does not hold for Vim 32." in text and ("Cost: a CPU." in text) == costs


def test_a_missing_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"vim_demo_n16-ranks512/results.json is missing: run make states"):
        sweeps.draw(spec.target("states"), tmp_path)


def test_several_series(tmp_path):
    target = spec.target("sizes")
    for number, model in enumerate(target.models):
        runs_of(tmp_path, model, 16)
        write_run(tmp_path, model, "knn", [{"k": 20, "top1": number / 100}])
    sweeps.draw(target, tmp_path)
    with open(tmp_path / "sizes.csv") as file:
        found = {(row["series"], row["x"]): row["knn_top1"] for row in csv.DictReader(file)}
    assert list(found) == [(name, side) for name in ("ViT", "LinearViT", "Vim") for side in ("48", "96", "192")]
    assert [float(v) for v in found.values()] == pytest.approx(list(range(9)))
    assert "side of an image, px" in (tmp_path / "sizes.md").read_text()
