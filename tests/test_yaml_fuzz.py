"""Whatever is changed in a configuration, a run is right or says in its last line what to change; tests/yaml_fuzz.py."""

import pytest

import configs
from common import ranges
from tests.yaml_fuzz import fuzz


@pytest.mark.parametrize("count", [24, pytest.param(150, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
def test_a_mutated_configuration(count, shards, tmp_path):
    counts, short = fuzz(count, count + 1, shards, tmp_path)
    assert not short, "\n".join(short)
    assert counts["right"] >= count / 10 and counts["refused"] >= count / 4


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"trainer": {"max_epochs": -2}}, r"trainer.max_epochs=-2; allowed: \[-1, inf\)"),
        ({"trainer": {"callbacks": [{"class_path": "callbacks.Checkpoints", "init_args": {"check_every": 0}}]}}, r"callbacks.0.init_args.check_every=0"),
        ({"model": {"class_path": "lightning_modules.DINO", "init_args": {"lr": float("nan")}}}, r"model.init_args.lr=nan; allowed: \[0, inf\)"),
        ({"model": {"class_path": "lightning_modules.LinearProbe", "init_args": {"heads": [{"lr": 1.0}, {"lr": -1.0}]}}}, r"model.init_args.heads.1.lr=-1.0"),
        ({"model": {"class_path": "lightning_modules.LinearProbe", "init_args": {"heads": [{"pooling": None}]}}}, r"model.init_args.heads.0.pooling: null; allowed: str"),
        ({"data": {"class_path": "datamodules.ImageNetDataModule", "init_args": {"multicrop": {"local_scale": [0.1, 1.5]}}}}, r"multicrop.local_scale=\[0.1, 1.5\]; allowed: each in \(0, 1\]"),
        ({"data": {"class_path": "datamodules.ImageNetDataModule", "init_args": {"multicrop": [3]}}}, "multicrop=.* a list"),
        ({"data": {"class_path": "datamodules.ImageNetDataModule", "init_args": {"crop": None}}}, "data.init_args.crop: null"),
    ],
)  # fmt: skip
def test_ranges(config, said):
    with pytest.raises(ValueError, match=said):
        ranges.check_config(config)


def test_what_is_no_number_of_ours_is_left_alone():
    """Another's class may mean something else by a name."""
    other = {"class_path": "somebody.Model", "init_args": {"momentum": 7, "backbone": {"class_path": "x.Y"}}}
    ranges.check_config({"model": other, "data": None, "trainer": {"max_epochs": None}})
    nothing = {"class_path": "lightning_modules.DINO", "init_args": {"clip_grad": None, "global_batch_size": None}}
    ranges.check_config({"model": nothing})


def test_the_page_of_ranges():
    page = configs.ROOT.parent / "docs/settings.md"
    assert page.read_text() == ranges.as_markdown(), "python -m common.ranges > docs/settings.md"
