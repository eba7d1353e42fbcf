"""The planner's commands are ones that dinomamba understands."""

import pytest
import yaml

import cli
import configs
from experiments import plan, spec
from tests.test_configs import holds

TARGETS = {
    "imagenet": ["paper", "evaluate", "ranks512", "claims"],
    "demo": ["paper", "evaluate", "study", "demo", "ranks512", "states", "sizes", "claims"],
}
EVERY = [
    run for data, names in TARGETS.items() for run in plan.plan(names, plan.Settings(data=data)) if run.program == "cli"
]
ONE_EACH = {(run.configs[1:3], run.configs[4:5], run.verb, run.name.rpartition("-")[2]): run for run in EVERY}.values()


@pytest.mark.parametrize("run", ONE_EACH, ids=lambda run: f"{run.configs[2][5:-5]}-{run.name}")
def test_one_run_of_each_kind_parses(run, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*run.arguments(launched=True), "--print_config"])
    assert stop.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)
    said = {}
    for name in run.configs:
        if name.startswith("paper/"):  # what a later one says of an argument is said in place of the earlier's
            said |= yaml.safe_load(configs.find(name).read_text()).get("model", {}).get("init_args", {})
    assert holds(config["model"]["init_args"], said)
    assert config["trainer"]["logger"]["init_args"]["name"] == run.name
    assert config["ckpt_path"] == {"fit": "auto", "test": run.flags[-1]}.get(run.verb)


def test_all_kinds_are_there():
    verbs = {(run.verb, run.configs[1]) for run in ONE_EACH}
    assert verbs == {
        ("fit", "task/dino.yaml"), ("fit", "task/supervised.yaml"), ("fit", "task/linear_probe.yaml"),
        ("test", "task/linear_probe.yaml"), ("validate", "task/knn.yaml"), ("validate", "task/binary_auc.yaml"),
        ("validate", "task/ranks.yaml"), ("validate", "task/robustness.yaml"),
        ("validate", "task/token_statistics.yaml"), ("fit", "task/segmentation.yaml"), ("fit", "task/detection.yaml"),
    }  # fmt: skip
    assert {method for method in spec.content()["methods"]} == {"dino", "supervised"}
