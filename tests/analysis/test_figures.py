"""Figures: the numbers on the page are the runs', the pictures are whole."""

import csv
import html
from dataclasses import replace

import numpy as np
import pytest
import yaml
from PIL import Image

import configs
from analysis import components, dino_drawing, maps, mixing_drawing, renderers
from analysis.runs import find_run
from experiments import spec
from tests.analysis.runs import auc_run, head, map_row, write_run

DRAWN = [target for target in spec.targets(["paper"], "demo") if target.tasks[:1] in (("auc",), ("tokens",))]


def draw(runs, name):
    return [renderers.draw(target, runs) for target in spec.targets([name], "demo")]


def once(runs, *names):
    """Draws what another test has not drawn yet."""
    for target in spec.targets(names, "demo"):
        if not (runs / f"{target.name}.csv").is_file():
            renderers.draw(target, runs)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    names = {model for target in DRAWN for model in target.models}
    for seed, name in enumerate(sorted(names)):
        auc_run(out, name, seed, registers=3 if name == "mambar_demo" else 0)
    auc_run(out, "vim_demo", 9, task="tokens")
    poolings = ("cls", "register0", "register1", "register2")
    probes = [
        head(1, p, last=first + 0.1 * i, stream=stream)
        for stream, first in (("branch", 0.5), ("residual", 0.3))
        for i, p in enumerate(poolings)
    ]
    write_run(out, "mambar_demo", "registers", probes)
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
    assert "w.pth (flat)" in page and "data:image/png;base64," in page and "Not run" not in page
    (drawn,) = spec.targets([target], "demo")
    assert html.escape(drawn.options["statement"]) in page and "nothing here compares with the paper" in page
    assert all(html.escape(remark) in page for remark in drawn.options.get("remarks", []))
    assert ("as stated" in page) == ("orders" in drawn.options)
    if target == "figure3":
        return
    rows = numbers(runs, target)
    assert rows and "12,000" in page
    for row in rows:
        assert row["images"] == "12000" and float(row["auc_of_mean_normalized"]) >= 0.5
        assert float(row["shuffled"]) == 0.6 and float(row["position_score"]) == 0.66 and " to " in row["interval"]
    if target != "figure4b":  # heads are rows of M, which read no stream
        assert {"branch (published)", "residual (other)"} <= {row["read"] for row in rows}


def numbers(runs, target):
    with (runs / f"{target}.csv").open() as file:
        return list(csv.DictReader(file))


def test_what_each_part_of_figure_4_shows(runs):
    once(runs, "figure4")
    last = ["block1/similarity", "block1/similarity/residual", "block1/mixing"]
    for part in ("figure4a", "figure4c", "figure4f"):
        assert {r["map"] for r in numbers(runs, part)} == set(last), part
    heads = [f"block{b}/head{h}/mixing" for b in (0, 1) for h in (0, 1)]
    assert [r["map"] for r in numbers(runs, "figure4b") if r["model"] == "ViT"] == heads
    registers = numbers(runs, "figure4d")
    names = [f"block1/register{r}/similarity" for r in range(3)]
    assert [r["map"] for r in registers] == [*names, *(f"{name}/residual" for name in names)]
    assert [float(r["probe"]) for r in registers] == pytest.approx([60, 70, 80, 40, 50, 60])
    layers = numbers(runs, "figure4e")
    assert [r["map"] for r in layers if r["model"] == "Vim"] == [
        f"block{b}/{k}" for k in ("similarity", "similarity/residual", "mixing") for b in (0, 1)
    ]


def test_which_maps_the_grids_show(runs):
    once(runs, "figure7")
    assert {r["map"].split("/")[1] for r in numbers(runs, "figure7")} == {"register0", "register1", "register2"}
    once(runs, "figure8")
    tokens = ["block1/similarity", "block1/first/similarity", "block1/patch3/similarity"]
    assert {r["map"] for r in numbers(runs, "figure8")} == {*tokens, *(f"{name}/residual" for name in tokens)}
    once(runs, "figure5")
    five = [(r["model"], r["training"]) for r in numbers(runs, "figure5") if r["read"].startswith("branch")]
    assert five == [(m, t) for m in ("Mamba-Reg", "Vim", "ViT") for t in ("supervised", "DINO")]
    once(runs, "figure6")
    six = [r["model"] for r in numbers(runs, "figure6") if r["read"].startswith("branch")]
    assert six == ["ViT", "Vim", "LinearViT", "Vim / 2"]


def test_an_order_is_measured(runs):
    """A stated order is compared pair by pair, kind by kind, in each reading, with a paired interval."""
    once(runs, "figure4f")
    (statement,) = (s for s in (runs / "figure4f.md").read_text().split("\n## ") if s.startswith("What the paper"))
    lines = [line for line in statement.splitlines() if line.startswith("| ") and ">" in line]
    assert len(lines) == 2 * 3  # two pairs; two readings of the similarity, and the CLS row of M
    assert all(" to " in line and line.endswith(("| yes |", "| no |", "| cannot be told |")) for line in lines)
    assert sum("branch (published)" in line for line in lines) == sum("residual (other)" in line for line in lines) == 2


def test_pictures_that_are_shown(runs):
    (target,) = spec.targets(["figure10"], "demo")
    found = target.found(runs)
    assert maps.pictures(target, found) == [0, 1, 2]  # three were kept: less than asked for
    few = replace(target, options=target.options | {"pictures": 2})
    assert maps.pictures(few, found) == [1, 2]  # the last ones, as figure 1 shows the first
    first = replace(target, options=target.options | {"pictures": 1, "first_picture": 1})
    assert maps.pictures(first, found) == [1]


def test_one_reading_alone_is_drawn_and_said(tmp_path):
    for name in ("vit_demo", "vim_demo", "linear_vit_demo"):
        auc_run(tmp_path, name, both=False)
    for name in ("figure1", "figure4f", "figure12"):
        draw(tmp_path, name)
        assert "These runs read one stream alone" in (tmp_path / f"{name}.html").read_text()


def test_another_reading_alone_stands_for_the_run(tmp_path):
    rows = [map_row("block0/similarity/residual"), map_row("block0/mixing")]
    run = find_run(write_run(tmp_path, "vim_demo", "auc", rows))
    assert [r["map"] for r in run.maps("similarity")] == ["block0/similarity/residual"]
    assert run.maps("similarity", reading="published") == [] and len(run.maps("mixing")) == 1


def test_figure_2_measures_its_blocks():
    """The numbers in the drawing are those of algebra: C on the diagonal, and n off it but for softmax attention."""
    for panel in mixing_drawing.panels():
        for row in mixing_drawing.measure(panel):
            causal, off = panel.form not in ("as used", "both directions"), row["where"] != "diagonal"
            assert causal <= (row["where"] != "above the diagonal")
            wanted = 2 if panel.mixer != "softmax attention" and (off or panel.form == "as used") else 3
            assert row["ours"] == str(wanted) and row["bound"] >= wanted, row
            assert row["decay"] == (1 if panel.form == "forward scan" and off else None)


def test_figure_13_is_drawn_from_a_configuration(tmp_path):
    (target,) = spec.targets(["figure13"], "demo")
    with pytest.raises(ValueError, match=r"vim_demo-outline/config.yaml is missing"):
        renderers.draw(target, tmp_path)
    folder = tmp_path / "vim_demo-outline"
    folder.mkdir()
    (folder / "config.yaml").write_text("a: 1\n")
    with pytest.raises(ValueError, match="is no configuration of lightning_modules"):
        renderers.draw(target, tmp_path)
    backbone = yaml.safe_load(configs.find("backbone/vim_demo.yaml").read_text())["model"]["init_args"]["backbone"]
    model = {
        "backbone": backbone, "out_dim": 77, "hidden_dim": 33, "bottleneck_dim": 11, "head_layers": 3, "momentum": 0.9,
        "momentum_end": 1.0, "warmup_teacher_temp": 0.04, "teacher_temp": 0.05, "warmup_teacher_temp_epochs": 2,
        "student_temp": 0.1, "center_momentum": 0.9, "centering": "mean", "num_global_crops": 2, "lr": 0.001,
    }  # fmt: skip
    crops = {"global_size": 48, "local_size": 24, "num_local": 4, "global_scale": [0.5, 1], "local_scale": [0.1, 0.5]}
    content = {
        "seed_everything": 0, "model": {"class_path": "lightning_modules.DINO", "init_args": model},
        "data": {"init_args": {"batch_size": 1000, "multicrop": crops}},
    }  # fmt: skip
    (folder / "config.yaml").write_text("a warning\n" + yaml.safe_dump(content, sort_keys=False))
    renderers.draw(target, tmp_path)
    rows = {row["what"]: row for row in numbers(tmp_path, "figure13")}
    assert (rows["batch size"]["paper"], rows["batch size"]["ours"]) == ("1024", "1000")
    assert rows["min lr"]["ours"] == "" and float(rows["lr"]["difference"]) == pytest.approx(0.0005)
    found = dino_drawing.outline(content)
    assert [view.tokens for view in found.views] == [38, 11]  # 36 and 9 patches with both of Vim's class tokens


def test_missing_and_partial_runs_are_named(tmp_path):
    auc_run(tmp_path / "d", "mambar_demo", registers=3)  # without its probes
    draw(tmp_path / "d", "figure4d")
    assert "Not run: MODEL-registers, the linear probes." in (tmp_path / "d/figure4d.html").read_text()
    assert "probe" not in numbers(tmp_path / "d", "figure4d")[0]
    auc_run(tmp_path, "vim_demo", complete=True)
    draw(tmp_path, "figure4f")
    assert "Not run: vit_demo, linear_vit_demo" in (tmp_path / "figure4f.html").read_text()
    with pytest.raises(ValueError, match=r"figure7: none of its runs is under .*: mambar_demo-auc"):
        draw(tmp_path, "figure7")
    auc_run(tmp_path, "mambar_demo")
    with pytest.raises(ValueError, match=r"figure7: none of mambar_demo-auc has a map register similarity"):
        draw(tmp_path, "figure7")
    (tmp_path / "vim_demo-auc/results.npz").unlink()
    with pytest.raises(ValueError, match=r"results.npz is missing: run it again with --model.init_args.pictures 8"):
        draw(tmp_path, "figure9")


def test_maps_below_chance_are_shown_negated(runs):
    (target,) = spec.targets(["figure1"], "demo", ["vim_demo"])
    target = replace(target, options={"maps": [{"kind": "similarity"}, {"kind": "mixing"}]})
    similarity, mixing = maps.chosen(target, target.found(runs))
    kept = similarity.run.arrays
    assert list(similarity.rows) == ["published", "other"] and list(mixing.rows) == ["published"]
    assert np.array_equal(similarity.values["published"], kept["maps/block1/similarity"])
    assert np.array_equal(similarity.values["other"], kept["maps/block1/similarity/residual"])
    assert similarity.rows["published"]["auc"] > 0.5 > mixing.rows["published"]["auc"]
    assert np.array_equal(mixing.values["published"], -kept["maps/block1/mixing"])


def test_rows_without_fields_are_read(tmp_path):
    names = ("block0/similarity", "block1/similarity", "block1/head3/mixing", "block1/register2/similarity", "shuffled")
    new = [map_row(name) for name in names]
    write_run(tmp_path, "new", "auc", new)
    write_run(tmp_path, "old", "auc", [map_row(name, fields=False) for name in names])
    (target,) = spec.targets(["figure4f"], "demo", ["new", "old"])
    after, before = target.found(tmp_path)
    assert after.rows == new
    fields = ("map", "part", "index", "kind", "auc")
    assert [[row[k] for k in fields] for row in before.rows] == [[row[k] for k in fields] for row in new]
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
    colours = components.component_colours(patches, inside, everywhere)
    assert colours.shape == (4, 6, 6, 3) and colours.min() >= 0 and colours.max() <= 1
    assert np.array_equal(colours.any(-1), inside)
    negated = components.component_colours(-patches, inside, everywhere)
    assert np.array_equal(negated.any(-1), inside)
    # another scale and offset of the features changes nothing
    np.testing.assert_allclose(components.component_colours(7 * patches + 2, inside, everywhere), colours, atol=1e-8)
