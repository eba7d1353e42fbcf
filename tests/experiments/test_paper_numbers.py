"""paper.yaml holds every number of the paper's Tables 1 to 6, typed here once more, and each has a run that it is of."""

import pytest
import yaml

import configs
from analysis.published import PAPER, cells, read
from experiments import plan, spec
from heads import HeadSpec

TABLE1 = {  # model, blocks -> width, backbone M, head M, top-1
    ("vit_small", 4): (384, 21, 1.5, 77.0),
    ("vit_base", 1): (768, 85, 1.5, 78.2),
    ("linear_vit_base", 1): (768, 85, 1.5, 74.7),
    ("linear_vit_base", 2): (768, 85, 1.5, 74.7),  # the same row: its head is one of these
    ("vim_small", 3): (512, 40, 1.5, 76.7),
    ("vim_base", 2): (768, 88, 1.5, 78.1),
    ("vim_tiny", 8): (256, 10, 2.0, 73.7),
    ("vim_small", 4): (512, 40, 2.0, 77.4),
    ("vim_base", 8): (768, 88, 6.2, 78.3),
    ("mambar_base", 8): (768, 88, 6.2, 78.5),
}
TABLE2 = {"linear_vit_base": (29.2, 38.7), "vim_base": (38.0, 47.1), "vit_base": (43.2, 52.5)}
TABLE3 = {
    "linear_vit_base": (37.1, 54.7, 39.9, 20.3, 39.8, 50.3, 32.6, 52.1, 34.8, 15.0, 34.5, 48.9),
    "vim_base": (42.8, 60.3, 46.4, 25.4, 46.0, 57.0, 37.4, 58.0, 40.3, 18.2, 40.1, 55.0),
    "vit_base": (44.8, 63.7, 48.4, 25.8, 47.8, 61.0, 39.1, 61.0, 41.9, 18.9, 41.0, 58.1),
}
COCO = [f"{kind}{size}" for kind in ("APb", "APm") for size in ("", "50", "75", "_small", "_medium", "_large")]
TABLE4 = {  # v2 matched-frequency, threshold-0.7, top-images, Sketch, A, R, ReaL
    "linear_vit_base": (62.5, 71.0, 76.9, 21.6, 9.6, 32.7, 81.3),
    "vim_base": (66.6, 75.0, 80.2, 27.6, 14.2, 33.1, 84.3),
    "vit_base": (66.6, 75.4, 80.7, 25.5, 15.4, 38.0, 84.6),
}
SETS = ("v2_matched_frequency", "v2_threshold", "v2_top_images", "sketch", "a", "r", "real")
TABLE5 = {  # part -> blocks, lr, weight decay -> top-1
    "blocks": {
        (n, *at): v for n, v in {1: 71.8, 2: 75.6, 3: 76.7, 4: 77.2}.items() for at in ((1e-3, 0), (5e-4, 1e-3))
    },
    "weight decay": {(4, 1e-3, 0): 77.2, (4, 1e-3, 1e-2): 75.7, (4, 1e-3, 5e-3): 76.4, (4, 1e-3, 1e-3): 77.3},
    "learning rate": {(4, 2.5e-4, 1e-3): 77.1, (4, 5e-4, 1e-3): 77.2, (4, 1e-3, 1e-3): 77.3, (4, 2e-3, 1e-3): 77.4},
}
TABLE6 = {"mean": 75.9, "max": 74.6, "cls+mean": 76.5, "cls+max": 76.3, "cls": 77.2}
PROBES = ("table1", "table5", "table6")


def numbers(table):
    return [n for n in read(spec.target(table, "imagenet").options["published"]) if n.source == PAPER]


def test_table_1():
    found = numbers("table1")
    assert len(found) == len(TABLE1) == 10  # nine rows, one of them with two heads
    for number in found:
        sizes = number.sizes["width"], number.sizes["backbone"], number.sizes["head"], number.value
        assert sizes == TABLE1[number.model, number.fields["n_last_blocks"]] and number.inferred
    (best,) = (n for n in found if n.value == 77.4)
    assert (best.fields["lr"], best.fields["weight_decay"]) == (2e-3, 1e-3)
    others = [n for n in read(spec.target("table1").options["published"]) if n.source != PAPER]
    assert [(n.model, n.fields["n_last_blocks"], n.value) for n in others] == [("vim_base", 8, 78.1)]
    (cell,) = (cell for cell in cells(read(spec.target("table1").options["published"])) if cell.others)
    assert cell.first.value == 78.3 and cell.columns()["remark"] == "Dino-Mamba's README: 78.1"


@pytest.mark.parametrize(
    ("table", "columns", "typed", "field"),
    [
        ("table2", ("mIoU", "mAcc"), TABLE2, "metric"),
        ("table3", COCO, TABLE3, "metric"),
        ("table4", SETS, TABLE4, "set"),
    ],
)
def test_tables_by_model(table, columns, typed, field):
    found = {(n.model, n.fields[field]): n.value for n in numbers(table)}
    assert found == {(m, c): v for m, row in typed.items() for c, v in zip(columns, row, strict=True)}
    assert set(spec.target(table, "imagenet").models) == set(typed)
    assert len(numbers(table)) == len(found)  # none is there twice


def test_table_5():
    assert spec.target("table5", "imagenet").models == ("vim_small",)
    found = {}
    for n in numbers("table5"):
        part = next(name for name in TABLE5 if n.part.startswith(name))
        where = n.fields["n_last_blocks"], n.fields["lr"], n.fields["weight_decay"]
        assert where not in found.setdefault(part, {}) and n.inferred == (part == "blocks")
        found[part][where] = n.value
    assert found == TABLE5
    assert {n.part for n in numbers("table5")} == set(spec.content()["targets"]["table5"]["parts"]["imagenet"])


def test_table_6():
    found = numbers("table6")
    assert {n.fields["pooling"]: n.value for n in found} == TABLE6 and len(found) == len(TABLE6)
    assert all(n.model == "vim_small" and n.fields["n_last_blocks"] == 4 and n.inferred for n in found)


def heads(table, model):
    """What the configuration of a run trains, as its rows say it."""
    (run,) = (r for r in plan.requested([table], plan.Settings(data="imagenet")) if r.name == f"{model}-{table}")
    found = None
    for name in run.configs:
        found = yaml.safe_load(configs.find(name).read_text()).get("model", {}).get("init_args", {}).get("heads", found)
    return [HeadSpec(**head) for head in found]


@pytest.mark.parametrize("table", PROBES)
def test_every_number_has_one_head(table):
    numbered = read(spec.target(table, "imagenet").options["published"])
    for number in numbered:
        fitting = [head for head in heads(table, number.model) if number.fits(vars(head))]
        assert len(fitting) == 1, (number, fitting)
    for model in spec.target(table, "imagenet").models:  # and no head is trained for nothing
        for head in heads(table, model):
            assert any(n.model == model and n.fits(vars(head)) for n in numbered), (model, head)


def test_every_number_of_table_4_has_its_set():
    sets = yaml.safe_load(configs.find("data/robustness.yaml").read_text())["data"]["init_args"]["sets"]
    assert {n.fields["set"] for n in numbers("table4")} == set(sets) == set(SETS)


def test_sizes_are_the_heads():
    """Width times blocks times what is read of each times a thousand classes is the size that the paper prints."""
    for number in numbers("table1"):
        inputs = number.sizes["width"] * number.fields["n_last_blocks"] * len(number.fields["pooling"].split("+"))
        assert inputs / 1000 == pytest.approx(number.sizes["head"], abs=0.07)


def test_what_the_paper_disagrees_with_itself_in_is_said():
    said = {name: " ".join(spec.target(name).options.get("remarks", [])) for name in spec.content()["targets"]}
    words = {
        "table1": ["78.3", "78.1"], "table4": ["Sketch", "25.5", "27.6", "66.6"], "figure4a": ["Figure 9", "Mamba-1"],
        "figure9": ["Figure 4a"], "figure5": ["Mamba-1", "192"], "figure11": ["Mamba-1"], "figure2": ["exactly 1", "198"],
        "figure4b": ["lazy"], "figure4c": ["norm"], "figure4d": ["correlate"], "figure7": ["distant"], "table5": ["77.2"],
        "figure1": ["rank"],
    }  # fmt: skip
    for name, wanted in words.items():
        assert all(word in said[name] for word in wanted), name


def test_every_figure_states_what_it_shows():
    for name, entry in spec.content()["targets"].items():
        if not name.startswith("figure"):
            continue
        assert entry["statement"], name
        known = {m for models in entry["models"].values() for m in models}
        for data, orders in entry.get("orders", {}).items():
            for side in (side for order in orders for side in order):
                assert isinstance(side, dict) or side in entry["models"][data], (name, side, known)
