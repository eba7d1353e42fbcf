"""Tables beside the paper's numbers."""

import csv
import json

import pytest

from analysis import renderers
from experiments import spec
from tests.analysis.runs import head, write_run


def table(runs, target="table1", data="imagenet", models=()):
    renderers.draw(spec.target(target, data, models), runs)
    return json.loads((runs / f"{target}.json").read_text())["rows"]


def test_ours_beside_the_papers(tmp_path):
    counts = {"backbone_passes_per_training_image": 1.0}
    write_run(tmp_path, "vim_small", "table1", [head(3, best=0.75), head(4, best=0.781, last=0.78)], counts=counts)
    rows = table(tmp_path)
    assert len(rows) == 9
    by = {(r["name"], r["what"].split(" of the ")[-1].split(",")[0]): r for r in rows}
    ours = by["vim_small", "last 4 blocks"]
    assert ours["ours"] == pytest.approx(78.1) and ours["published"] == 77.4
    assert ours["difference"] == pytest.approx(0.7) and ours["last"] == pytest.approx(78.0)
    assert ours["images"] == 50_000 and ours["weights"] == "w.pth (flat)" and ours["date"] == "2026-11-28"
    assert ours["config"] == "vim_small-table1/config.yaml" and ours["parameters"] == 4_000
    assert (
        by["vim_small", "last 3 blocks"]["published"] is None and "difference" not in by["vim_small", "last 3 blocks"]
    )
    assert sum(r["state"] == "not run" for r in rows) == 7
    assert by["mambar_base", "last 8 blocks"]["published"] == 78.5
    page = (tmp_path / "table1.html").read_text()
    assert "78.1" in page and "+0.7" in page and "not run" in page and "50,000" in page and "not known here" in page
    assert "backbone once per epoch" in page and "01234567" in page
    with (tmp_path / "table1.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 9
    assert "| Vim-S | DINO |" in (tmp_path / "table1.md").read_text()


def test_a_complete_row_outlives_partial_and_missing_runs(tmp_path):
    write_run(tmp_path, "vim_tiny", "table1", [head(8, best=0.737)])
    write_run(tmp_path, "vim_base", "table1", [head(2, best=0.5)], complete=False, epoch=4)
    first = {r["name"]: r for r in table(tmp_path)}
    assert first["vim_tiny"]["state"] == "complete" and first["vim_tiny"]["difference"] == pytest.approx(0)
    assert any(r["state"] == "partial, epoch 5" for r in table(tmp_path) if r["name"] == "vim_base")
    write_run(tmp_path, "vim_tiny", "table1", [head(8, best=0.1)], complete=False)  # started again
    write_run(tmp_path, "vim_base", "table1", [head(2, best=0.78), head(8, best=0.79)])
    rows = table(tmp_path)
    assert [r["ours"] for r in rows if r["name"] == "vim_tiny"] == [pytest.approx(73.7)]
    assert [r["ours"] for r in rows if r["name"] == "vim_base"] == [pytest.approx(78.0), pytest.approx(79.0)]
    write_run(tmp_path, "mine", "table1", [head(1, best=0.6)])
    rows = table(tmp_path, models=["mine"])  # another model alone does not take the others away
    assert rows[0]["name"] == "mine" and {r["name"] for r in rows} == {"mine", "vim_tiny", "vim_base"}
    write_run(tmp_path, "vim_tiny", "table1", [head(8, best=0.74)])
    assert [r["ours"] for r in table(tmp_path) if r["name"] == "vim_tiny"] == [pytest.approx(74.0)]


def test_robustness_and_embedded_data(tmp_path):
    rows = [{"set": "a", "top1": 0.25, "images": 7_500, "classes": 200, "head": "n4", "probe": "last.ckpt"}]
    write_run(tmp_path, "vim_demo", "table4", rows)
    found = table(tmp_path, "table4", "demo")
    ours = next(r for r in found if r["name"] == "vim_demo")
    assert ours["what"] == "a, among 200 classes, probe n4" and ours["ours"] == 25.0 and ours["images"] == 7_500
    assert [r["name"] for r in found if r["state"] == "not run"] == ["vit_demo", "linear_vit_demo", "mambar_demo"]
    assert "nothing here compares with the paper" in (tmp_path / "table4.html").read_text()


def test_a_probe_on_a_held_out_split(tmp_path):
    folder = write_run(tmp_path, "vim_small", "test", [head(4, best=0.9, last=0.77)])
    (folder / "config.yaml").write_text("{ckpt_path: probe.ckpt, data: {init_args: {val_shards: test-*.tar}}}")
    (row,) = table(tmp_path, "evaluate")
    assert row["ours"] == pytest.approx(77) and row["weights"] == "probe.ckpt" and row["what"].endswith("on test-*.tar")
    page = (tmp_path / "evaluate.html").read_text()
    assert "trained before" in page and "paper, %" not in page
