"""Figures: the numbers on the page are the runs', the pictures are whole."""

import csv

import numpy as np
import pytest
from PIL import Image

from analysis import maps, paper
from tests.analysis.runs import auc_run, head, write_run

DRAWN = [
    n for n, t in paper.spec()["targets"].items() if t["kind"] in ("bars", "heads", "registers", "layers", "maps", "components")
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    names = {m for n in DRAWN for m in paper.spec()["targets"][n]["models"]["demo"]}
    for seed, name in enumerate(sorted(names)):
        auc_run(out, name, seed, registers=3 if name == "mambar_demo" else 0)
    poolings = ("cls", "register0", "register1", "register2")
    write_run(out, "mambar_demo", "registers", [head(1, p, last=0.5 + 0.1 * i) for i, p in enumerate(poolings)])
    return out


@pytest.mark.parametrize("target", DRAWN)
def test_every_figure(target, runs):
    paper.main(["draw", target, "--data", "demo", "--runs", str(runs)])
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
    paper.main(["draw", "figure4", "--data", "demo", "--runs", str(runs)])
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
    paper.main(["draw", "figure4d", "--data", "demo", "--runs", str(tmp_path / "d")])
    assert "Not run: MODEL-registers, the linear probes." in (tmp_path / "d/figure4d.html").read_text()
    assert "probe" not in numbers(tmp_path / "d", "figure4d")[0]
    auc_run(tmp_path, "vim_demo", complete=True)
    paper.main(["draw", "figure4f", "--data", "demo", "--runs", str(tmp_path)])
    assert "Not run: vit_demo, linear_vit_demo" in (tmp_path / "figure4f.html").read_text()
    with pytest.raises(ValueError, match=r"figure10: none of its runs is under .*: mambar_demo-auc"):
        paper.main(["draw", "figure10", "--data", "demo", "--runs", str(tmp_path)])
    auc_run(tmp_path, "mambar_demo")
    with pytest.raises(ValueError, match=r"figure10: none of mambar_demo-auc has a map register"):
        paper.main(["draw", "figure10", "--data", "demo", "--runs", str(tmp_path)])
    (tmp_path / "vim_demo-auc/results.npz").unlink()
    with pytest.raises(ValueError, match=r"results.npz is missing: run it again with --model.init_args.pictures 8"):
        paper.main(["draw", "figure11", "--data", "demo", "--runs", str(tmp_path)])


def test_maps_below_chance_are_shown_negated(runs):
    target = paper.targets("figure1", "demo", ["vim_demo"])[0]
    target.spec = target.spec | {"maps": ["similarity", "mixing"]}
    shown = maps.chosen(target, target.found(runs))
    data = maps.pictures(shown[0].run)
    kept = dict(zip(data["map_names"].tolist(), data["maps"].swapaxes(0, 1), strict=True))
    assert np.array_equal(shown[0].values, kept["block1/similarity"]) and shown[0].row["auc"] > 0.5
    assert np.array_equal(shown[1].values, -kept["block1/mixing"]) and shown[1].row["auc"] < 0.5


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
