"""Figures: the numbers on the page are the runs', the pictures are whole."""

import csv
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from analysis import maps, renderers
from experiments import spec
from tests.analysis.runs import auc_run, head, map_row, write_run

DRAWN = [
    target for target in spec.targets(["paper"], "demo") if target.kind in ("bars", "heads", "registers", "layers", "maps", "components")
]  # fmt: skip


def draw(runs, name):
    return [renderers.draw(target, runs) for target in spec.targets([name], "demo")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    names = {model for target in DRAWN for model in target.models}
    for seed, name in enumerate(sorted(names)):
        auc_run(out, name, seed, registers=3 if name == "mambar_demo" else 0)
    poolings = ("cls", "register0", "register1", "register2")
    write_run(out, "mambar_demo", "registers", [head(1, p, last=0.5 + 0.1 * i) for i, p in enumerate(poolings)])
    return out


@pytest.mark.parametrize("target", [target.name for target in DRAWN])
def test_every_figure(target, runs):
    (paths,) = draw(runs, target)
    assert {path.suffix for path in paths} == {".png", ".pdf", ".md", ".csv", ".html"}
    assert all(path.stem == target and path.is_file() for path in paths)
    with Image.open(runs / f"{target}.png") as picture:
        pixels = np.asarray(picture.convert("L"))
        assert min(pixels.shape) > 200 and pixels.std() > 10
    assert (runs / f"{target}.pdf").read_bytes().startswith(b"%PDF")
    page = (runs / f"{target}.html").read_text()
    assert "12,000" in page and "w.pth (flat)" in page and "data:image/png;base64," in page and "Not run" not in page
    with (runs / f"{target}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        assert row["images"] == "12000" and float(row["auc_of_mean_normalized"]) >= 0.5


def numbers(runs, target):
    with (runs / f"{target}.csv").open() as file:
        return list(csv.DictReader(file))


def test_what_each_part_of_figure_4_shows(runs):
    draw(runs, "figure4")
    assert {r["map"] for r in numbers(runs, "figure4a")} == {"block1/similarity", "block1/mixing"}
    heads = [f"block{b}/head{h}/mixing" for b in (0, 1) for h in (0, 1)]
    assert [r["map"] for r in numbers(runs, "figure4b") if r["model"] == "ViT"] == heads
    registers = numbers(runs, "figure4d")
    assert [r["map"] for r in registers] == [f"block1/register{r}/similarity" for r in range(3)]
    assert [float(r["probe"]) for r in registers] == pytest.approx([60, 70, 80])
    layers = numbers(runs, "figure4e")
    assert [r["map"] for r in layers if r["model"] == "Vim"] == [
        f"block{b}/{k}" for k in ("similarity", "mixing") for b in (0, 1)
    ]


def test_missing_and_partial_runs_are_named(tmp_path):
    auc_run(tmp_path / "d", "mambar_demo", registers=3)  # without its probes
    draw(tmp_path / "d", "figure4d")
    assert "Not run: MODEL-registers, the linear probes." in (tmp_path / "d/figure4d.html").read_text()
    assert "probe" not in numbers(tmp_path / "d", "figure4d")[0]
    auc_run(tmp_path, "vim_demo", complete=True)
    draw(tmp_path, "figure4f")
    assert "Not run: vit_demo, linear_vit_demo" in (tmp_path / "figure4f.html").read_text()
    with pytest.raises(ValueError, match=r"figure10: none of its runs is under .*: mambar_demo-auc"):
        draw(tmp_path, "figure10")
    auc_run(tmp_path, "mambar_demo")
    with pytest.raises(ValueError, match=r"figure10: none of mambar_demo-auc has a map register similarity"):
        draw(tmp_path, "figure10")
    (tmp_path / "vim_demo-auc/results.npz").unlink()
    with pytest.raises(ValueError, match=r"results.npz is missing: run it again with --model.init_args.pictures 8"):
        draw(tmp_path, "figure11")


def test_maps_below_chance_are_shown_negated(runs):
    (target,) = spec.targets(["figure1"], "demo", ["vim_demo"])
    target = replace(target, options={"maps": [{"kind": "similarity"}, {"kind": "mixing"}]})
    similarity, mixing = maps.chosen(target, target.found(runs))
    kept = similarity.run.arrays
    assert np.array_equal(similarity.values, kept["maps/block1/similarity"]) and similarity.row["auc"] > 0.5
    assert np.array_equal(mixing.values, -kept["maps/block1/mixing"]) and mixing.row["auc"] < 0.5


def test_rows_without_fields_are_read(tmp_path):
    names = ("block0/similarity", "block1/similarity", "block1/head3/mixing", "block1/register2/similarity", "shuffled")
    new = [map_row(name) for name in names]
    write_run(tmp_path, "new", "auc", new)
    write_run(tmp_path, "old", "auc", [map_row(name, fields=False) for name in names])
    (target,) = spec.targets(["figure4f"], "demo", ["new", "old"])
    after, before = target.found(tmp_path)
    assert after.rows == new
    assert before.rows == [row | {"block": None} if row["map"] == "shuffled" else row for row in new]
    assert [row["block"] for row in before.maps("similarity")] == [0, 1]
    assert [row["index"] for row in before.maps("mixing", "head")] == [3]


def test_components_find_a_planted_object_and_do_not_mind_the_sign():
    rng = np.random.default_rng(0)
    inside = np.zeros((4, 6, 6), bool)
    inside[:, 1:4, 2:5] = True
    parts = rng.normal(size=(3, 8))
    features = rng.normal(0, 0.05, (4, 6, 6, 8)) + np.where(inside[..., None], 3 * np.ones(8), 0.0)
    features[:, 1:4, 2:5] += rng.integers(0, 2, (4, 3, 3, 3)) @ parts
    patches = features.transpose(0, 3, 1, 2)
    everywhere = np.ones_like(inside)
    colours = maps.component_colours(patches, inside, everywhere)
    assert colours.shape == (4, 6, 6, 3) and colours.min() >= 0 and colours.max() <= 1
    assert np.array_equal(colours.any(-1), inside)
    negated = maps.component_colours(-patches, inside, everywhere)
    assert np.array_equal(negated.any(-1), inside)
    # another scale and offset of the features changes nothing
    np.testing.assert_allclose(maps.component_colours(7 * patches + 2, inside, everywhere), colours, atol=1e-8)
