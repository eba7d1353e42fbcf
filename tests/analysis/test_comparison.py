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
    mine = [head(3, best=0.75), head(4, best=0.781, last=0.78, lr=0.002, wd=0.001), head(4, best=0.7, lr=0.001)]
    write_run(tmp_path, "vim_small", "table1", mine, counts=counts)
    rows = table(tmp_path)
    assert len(rows) == 11  # the paper's nine, one of them with two heads, and ours that it has no number for
    three, four, own = (row for row in rows if row["name"] == "vim_small")
    assert (
        four["ours"] == pytest.approx(78.1) and four["published"] == 77.4 and four["difference"] == pytest.approx(0.7)
    )
    assert four["last"] == pytest.approx(78.0) and four["images"] == 50_000 and four["weights"] == "w.pth (flat)"
    assert four["config"] == "vim_small-table1/config.yaml" and four["parameters"] == 4_000
    assert four["date"] == "2026-11-28" and four["paper_head"] == 2.0 and four["paper_width"] == 512
    assert three["published"] == 76.7 and three["difference"] == pytest.approx(-1.7)
    assert own["published"] is None and "difference" not in own and own["ours"] == pytest.approx(70)
    assert sum(r["state"] == "not run" for r in rows) == 8
    (vim,) = (row for row in rows if row["name"] == "vim_base" and row["n_last_blocks"] == 8)
    assert vim["published"] == 78.3 and vim["remark"] == "Dino-Mamba's README: 78.1"
    page = (tmp_path / "table1.html").read_text()
    for text in (
        "78.1",
        "+0.7",
        "not run",
        "50,000",
        "none",
        "77.4 [?]",
        "is our inference",
        "78.3, the authors",
        "01234567",
    ):
        assert text in page, text
    assert "backbone once per epoch" in page
    with (tmp_path / "table1.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 11
    assert "| Vim-S | DINO |" in (tmp_path / "table1.md").read_text()
    assert "- For Vim-B with 8 blocks" in (tmp_path / "table1.md").read_text()


def test_a_cell_of_table_5_stands_in_each_of_its_parts(tmp_path):
    write_run(tmp_path, "vim_small", "table5", [head(4, best=0.78, lr=0.001, wd=0.001), head(1, best=0.7, lr=0.001)])
    rows = table(tmp_path, "table5")
    assert [row["part"].split(",")[0] for row in rows] == ["blocks read"] * 8 + ["weight decay"] * 4 + [
        "learning rate"
    ] * 4
    ours = [(row["part"].split(",")[0], row["published"], row["inferred"]) for row in rows if row.get("ours")]
    assert ours == [("blocks read", 71.8, True), ("weight decay", 77.3, False), ("learning rate", 77.3, False)]
    assert "last 2 blocks, lr 0.0005, wd 0.001" in {row["what"] for row in rows if row["state"] == "not run"}


def test_each_set_of_table_4_has_its_number(tmp_path):
    rows = [{"set": s, "top1": 0.25, "images": 9, "classes": "all", "head": "n4"} for s in ("sketch", "a")]
    write_run(tmp_path, "vit_base", "table4", rows)
    found = {row["set"]: row for row in table(tmp_path, "table4") if row["name"] == "vit_base"}
    assert found["sketch"]["published"] == 25.5 and found["sketch"]["difference"] == pytest.approx(-0.5)
    assert "below Vim-B's 27.6" in found["sketch"]["remark"]
    assert found["a"]["published"] == 15.4 and found["r"]["published"] == 38.0 and found["r"]["state"] == "not run"
    assert len(table(tmp_path, "table4")) == 21


def test_tables_without_runs_show_the_papers_numbers(tmp_path):
    rows = table(tmp_path, "table2")
    assert [(r["model"], r["what"], r["published"], r["state"]) for r in rows[:2]] == [
        ("LinearViT-B", "mIoU", 29.2, "not run"), ("LinearViT-B", "mAcc", 38.7, "not run"),
    ]  # fmt: skip
    assert len(table(tmp_path, "table3")) == 36
    demo = table(tmp_path / "demo", "table2", "demo")
    assert [row["state"] for row in demo] == ["not run"] * 3 and "published" not in demo[0]


def test_a_dense_score_stands_beside_its_own(tmp_path):
    target = spec.target("table2", "imagenet")
    write_run(tmp_path, "vim_base", "segmentation", [{"metric": "mIoU", "value": 0.39, "images": 2_000}])
    renderers.draw(target, tmp_path)
    rows = json.loads((tmp_path / "table2.json").read_text())["rows"]
    (mine,) = (row for row in rows if row.get("ours"))
    assert (mine["name"], mine["metric"], mine["published"]) == ("vim_base", "mIoU", 38.0)
    assert mine["difference"] == pytest.approx(1.0) and mine["images"] == 2_000


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
    assert [r["name"] for r in found if r["state"] == "not run"] == ["linear_vit_demo", "vit_demo", "mambar_demo"]
    assert "nothing here compares with the paper" in (tmp_path / "table4.html").read_text()


def test_a_probe_on_a_held_out_split(tmp_path):
    folder = write_run(tmp_path, "vim_small", "test", [head(4, best=0.9, last=0.77)])
    (folder / "config.yaml").write_text("{ckpt_path: probe.ckpt, data: {init_args: {val_shards: test-*.tar}}}")
    (row,) = table(tmp_path, "evaluate")
    assert row["ours"] == pytest.approx(77) and row["weights"] == "probe.ckpt" and row["what"].endswith("on test-*.tar")
    page = (tmp_path / "evaluate.html").read_text()
    assert "trained before" in page and "paper, %" not in page
