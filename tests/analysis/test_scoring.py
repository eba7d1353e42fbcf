"""The page that scores the same maps each way, from runs of the test's making."""

import csv
import json

import numpy as np
import pytest

from analysis import renderers
from analysis.readings import knn_top1
from analysis.runs import find_run
from experiments import spec
from metrics import paired_difference
from tests.analysis.runs import auc_run, map_row, write_run

MAPS = ("block0/similarity", "block1/similarity", "block1/similarity/residual", "block1/mixing", "shuffled", "position")
OWN = {"grid": 0.0, "area": 0.01, "mask": -0.04, "pooled": 0.1}
"""What a way adds to every map's m."""


def scoring_run(runs, model, m, seed=0, ways=tuple(OWN)):
    """A run whose published similarity has the mean AUC ``m`` on the grid; rows and arrays agree."""
    rng, rows, arrays = np.random.default_rng(seed), [], {"image_auc_names": np.array(MAPS)}
    noise = rng.normal(0, 0.02, (40, len(MAPS)))
    base = np.array([0.9, m, m - 0.1, 0.7, 0.5, 0.6]) + noise - noise.mean(0)
    for way in ways:
        values = base + OWN[way] + rng.normal(0, 0.001, base.shape)
        if way != "pooled":
            arrays["image_auc" if way == ways[0] else f"image_auc/{way}"] = values
        for name, column, first in zip(MAPS, values.T, base.T, strict=True):
            beside = paired_difference(column, first)
            fields = ("difference", "difference_low", "difference_high", "difference_p")
            numbers = dict(zip(fields, beside, strict=True)) | {"difference_images": 39}
            row = map_row(name, float(column.mean())) | {"compare": way, "images": 40 - (way == "mask"), "skipped": 3}
            row |= dict.fromkeys(numbers) if way == ways[0] else numbers
            rows.append(row | ({"auc_normalized": None} if way == "pooled" else {}))
    return write_run(runs, model, "scoring", rows, arrays=arrays)


@pytest.fixture
def runs(tmp_path):
    for number, (model, m) in enumerate((("vit_demo", 0.8), ("linear_vit_demo", 0.3), ("vim_demo", 0.7005))):
        scoring_run(tmp_path, model, m, number)
    return tmp_path


def lines(text, title):
    """Cells of the table under a heading, by the first and third column and the stream."""
    part = text.split(f"## {title}\n")[1].split("\n## ")[0]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("| ")]
    return cells[0], cells[2:]


def test_page(runs):
    (target,) = spec.targets(["scoring"], "demo")
    paths = renderers.draw(target, runs)
    assert {path.name for path in paths} == {"scoring.md", "scoring.html", "scoring.csv"}
    text = (runs / "scoring.md").read_text()
    assert "Not run: mambar_demo." in text and "500 of the pooled AUC" in text and "2,000 draws" in text
    assert text.count("This is the published way") == 1
    with open(runs / "scoring.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 5 * 4 and {row["map"] for row in rows} == {*MAPS[1:]}  # the last block's alone
    kept = find_run(runs / "vit_demo-scoring")
    for row in rows[:20]:
        (wanted,) = [r for r in kept.every_row if (r["map"], r["compare"]) == (row["map"], row["compare"])]
        for key in ("auc", "auc_low", "auc_of_mean_normalized", "images", "difference_p", "auc_normalized"):
            assert row[key] == ("" if wanted[key] is None else str(wanted[key]))


def test_a_column_for_each_way_and_the_differences(runs):
    renderers.draw(*spec.targets(["scoring"], "demo"), runs)
    text = (runs / "scoring.md").read_text()
    run = find_run(runs / "linear_vit_demo-scoring")
    m = {way: run.maps("similarity", way=way)[-1] for way in OWN}
    heading, cells = lines("## m\n" + text, "m")
    assert heading[4:] == ["grid (published)", "area", "mask", "pooled"]
    (own,) = [c for c in cells if c[0] == "LinearViT" and c[2].startswith("CLS–patch") and c[3] == "branch (published)"]
    assert own[4:] == [f"{row['auc']:.3f} ({row['auc_low']:.3f} to {row['auc_high']:.3f})" for row in m.values()]
    _, cells = lines(text, "max(m, 1−m)")
    assert [f"{row['auc_of_mean_normalized']:.3f}" for row in m.values()] in [
        c[4:] for c in cells if c[0] == "LinearViT"
    ]
    _, cells = lines(text, "Mean over images of max(AUC, 1−AUC)")
    assert all(c[7] == "–" and "–" not in c[4:7] for c in cells)
    _, cells = lines(text, "Images scored (and skipped)")
    assert all(c[4:] == ["40 (3)", "40 (3)", "39 (3)", "40 (3)"] for c in cells)
    heading, cells = lines(text, "Differences from grid")
    assert heading[4:] == ["way", "m by the first way", "m by this way", "difference", "95 % interval", "p", "images"]
    signs = {}  # below 0.5 a map scores higher where m falls
    for cell in cells:
        if cell[2].startswith("CLS–patch") and cell[3] == "branch (published)":
            signs[cell[0], cell[4]] = float(cell[7])
            low, high = map(float, cell[8].split(" to "))
            assert low <= float(cell[7]) <= high and cell[10] == "39" and float(cell[9]) == 0.0005
    assert len(signs) == 9
    for model, side in (("ViT", 1), ("LinearViT", -1), ("Vim", 1)):
        for way in ("area", "mask", "pooled"):
            assert signs[model, way] == pytest.approx(side * OWN[way], abs=2e-3)


def test_the_order_of_models_by_each_way(runs):
    """ViT 0.8, LinearViT 1 − 0.3 and Vim 0.7005: which of the last two is second hangs on the way."""
    renderers.draw(*spec.targets(["scoring"], "demo"), runs)
    text = (runs / "scoring.md").read_text()
    published = next(line for line in text.splitlines() if "similarity, published reading:" in line)
    assert "the order changes with the way" in published
    assert "grid: ViT > Vim ≈ LinearViT;" in published  # 0.0005 apart: the images do not tell
    assert "area: ViT > Vim > LinearViT" in published and "pooled: ViT > Vim > LinearViT" in published
    assert "mask: ViT > LinearViT > Vim" in published
    mixing = next(line for line in text.splitlines() if "- CLS row of M:" in line)
    assert all(mixing.split(f"{way}: ")[1].split(";")[0].count("≈") == 2 for way in ("grid", "area", "mask"))


def test_every_other_page_reads_the_first_way(tmp_path):
    run = find_run(scoring_run(tmp_path, "vim_demo", 0.7, ways=("mask", "grid", "pooled")))
    assert run.ways == ["mask", "grid", "pooled"] and len(run.every_row) == 3 * len(run.rows)
    assert {row["compare"] for row in run.rows} == {"mask"}
    assert [row["compare"] for row in run.maps("similarity")] == ["mask", "mask"]
    assert [row["compare"] for row in run.maps("similarity", way="pooled")] == ["pooled", "pooled"]
    old = find_run(auc_run(tmp_path, "vit_demo"))  # rows that do not say
    assert old.ways == ["grid"] and old.rows == old.every_row and old.maps("mixing", way="grid") == old.maps("mixing")


def test_a_figure_of_a_run_scored_each_way_shows_the_first(tmp_path):
    for model in ("vit_demo", "vim_demo", "linear_vit_demo"):
        folder = scoring_run(tmp_path, model, 0.8)
        folder.rename(tmp_path / f"{model}-auc")
    renderers.draw(*spec.targets(["figure4f"], "demo"), tmp_path)
    with open(tmp_path / "figure4f.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9  # three models; the similarity in both readings, the row of M
    first = {(r["map"], f"{r['auc']}") for r in find_run(tmp_path / "vit_demo-auc").rows}
    assert {(r["map"], r["auc"]) for r in rows[:3] if r["model"] == "ViT"} <= first


@pytest.mark.parametrize("published_first", [True, False])
def test_the_published_vote_is_read(tmp_path, published_first):
    published = [{"k": k, "top1": k / 100, "reading": "published", "stream": "residual"} for k in (20, 10)]
    other = [row | {"top1": 0.9, "reading": "other", "stream": "branch"} for row in published]
    write_run(tmp_path, "vim_demo", "knn", published + other if published_first else other + published)
    run = find_run(tmp_path / "vim_demo-knn")
    assert knn_top1(run) == 0.2 and knn_top1(run, 10) == 0.1
    content = json.loads((run.folder / "results.json").read_text())
    content["rows"] = [{"k": 20, "top1": 0.4}]  # of an old run
    (run.folder / "results.json").write_text(json.dumps(content))
    assert knn_top1(find_run(run.folder)) == 0.4
