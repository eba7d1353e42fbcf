"""Every YAML parses in the company it is made for, and wrong input says what to change."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import cli
from experiments import plan, spec

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
BACKBONES = sorted(p.stem for p in (CONFIGS / "backbone").glob("*.yaml"))
DEMO = {
    "dino": "demo", "linear_probe": "demo", "knn": "demo", "binary_auc": "demo_s", "ranks": "demo",
    "token_statistics": "demo_s", "robustness": "demo_robustness", "supervised": "demo",
    "segmentation": "demo_segmentation", "linear_segmentation": "demo_segmentation",
    "patch_knn": "demo_segmentation", "detection": "demo_detection",
}  # fmt: skip
TASKS = {  # task files in order -> data file
    ("dino",): "imagenet",
    ("dino", "dino_released"): "imagenet",
    ("linear_probe",): "imagenet",
    ("knn",): "imagenet",
    ("binary_auc",): "imagenet_s",
    ("ranks",): "imagenet",
    ("token_statistics",): "imagenet_s",
    ("robustness",): "robustness",
    ("supervised",): "imagenet",
    ("segmentation",): "ade20k",
    ("linear_segmentation",): "ade20k",
    ("patch_knn",): "ade20k",
    ("detection",): "coco",
    **{(task, f"{task}_demo"): data for task, data in DEMO.items()},
}


NEEDED = {"robustness": ["--model.init_args.probe", "probe.ckpt"]}


def arguments(tasks, data, backbone):
    files = [f"task/{tasks[0]}", f"data/{data}", f"backbone/{backbone}", *(f"task/{t}" for t in tasks[1:])]
    return [a for f in ["base", *files] for a in ("-c", str(CONFIGS / f"{f}.yaml"))]


def holds(whole, part):
    """Whether ``whole`` says all that ``part`` says; it may add defaults."""
    if isinstance(part, dict):
        return all(key in whole and holds(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(holds, whole, part))
    return whole == part


def print_config(args, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", *args, "--print_config"])
    assert stop.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


HEADS = sorted(p.stem for p in (CONFIGS / "head").glob("*.yaml"))


@pytest.mark.parametrize("head", HEADS)
def test_every_head_goes_behind_its_task(head, capsys):
    task, data = ("segmentation", "ade20k") if head.startswith("upernet") else ("detection", "coco")
    path = CONFIGS / f"head/{head}.yaml"
    config = print_config([*arguments((task,), data, "vim_small"), "-c", str(path)], capsys)
    assert holds(config, yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("tasks", TASKS, ids="+".join)
def test_every_task(tasks, capsys):
    config = print_config([*arguments(tasks, TASKS[tasks], "vim_small"), *NEEDED.get(tasks[0], [])], capsys)
    said = {}
    for task in tasks:  # what a task file says arrives
        content = yaml.safe_load((CONFIGS / "task" / f"{task}.yaml").read_text())
        said |= content.get("model", {}).get("init_args", {})
    assert holds(config["model"]["init_args"], said)
    first = yaml.safe_load((CONFIGS / "task" / f"{tasks[0]}.yaml").read_text())
    assert config["data"]["class_path"] == first["data"]["class_path"]
    if (view := first["data"].get("init_args", {}).get("view")) is not None:
        assert config["data"]["init_args"]["view"] == view
    assert config["model"]["init_args"]["backbone"]["init_args"]["embed_dim"] == 512


def test_a_cluster_is_added_to_what_base_says(capsys):
    args = [*arguments(("dino",), "imagenet", "vim_small"), "-c", str(CONFIGS / "cluster/slurm.yaml")]
    plugins = print_config(args, capsys)["trainer"]["plugins"]
    assert [p["class_path"].rpartition(".")[2] for p in plugins] == ["AtomicCheckpointIO", "SLURMEnvironment"]
    assert plugins[1]["init_args"]["auto_requeue"] is False
    assert [p.name for p in (CONFIGS / "cluster").iterdir()] == ["slurm.yaml"]


@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_backbone_overlay_is_complete(backbone, capsys):
    import inspect

    import backbones

    content = yaml.safe_load((CONFIGS / "backbone" / f"{backbone}.yaml").read_text())["model"]["init_args"]["backbone"]
    family = getattr(backbones, content["class_path"].split(".")[-1])
    assert set(content["init_args"]) == set(inspect.signature(family).parameters)
    config = print_config(arguments(("dino",), "imagenet", backbone), capsys)
    assert config["model"]["init_args"]["backbone"] == content


def test_nothing_but_overlays_names_a_backbone_and_only_base_lists_callbacks():
    for path in CONFIGS.rglob("*.yaml"):
        content = yaml.safe_load(path.read_text())
        if path.parent.name != "backbone":
            assert "backbone" not in content.get("model", {}).get("init_args", {}), path
        if path != CONFIGS / "base.yaml":
            assert "callbacks" not in content.get("trainer", {}), path


def _targets(data):
    """Every target that is made of a data set."""
    return [name for name, entry in spec.content()["targets"].items() if data in entry["models"]]


def test_every_file_is_covered():
    used = {f"task/{t}" for tasks in TASKS for t in tasks} | {f"data/{d}" for d in TASKS.values()}
    used |= {f"backbone/{b}" for b in BACKBONES} | {f"head/{h}" for h in HEADS} | {"base"}
    used |= {"data/unlabelled", "data/channels", "data/photos"}  # by test_unlabelled.py and test_channels.py
    there = {str(p.relative_to(CONFIGS).with_suffix("")) for p in CONFIGS.rglob("*.yaml")}
    planned = [run for data in spec.datasets() for run in plan.plan(_targets(data), plan.Settings(data=data))]
    used |= {name.removesuffix(".yaml") for run in planned for name in run.configs}
    unused = {f for f in there if not f.startswith("cluster/")} - used
    assert unused <= {"paper/imagenet/mambar_large_mamba1-weights"}  # for people's own figures


def fails(args, tmp_path, capsys, yaml_text=None):
    """The last line of a command that must fail."""
    if yaml_text:
        (tmp_path / "x.yaml").write_text(yaml_text)
        args = [*args, "-c", str(tmp_path / "x.yaml")]
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", *args, "--trainer.default_root_dir", str(tmp_path)])
    assert stop.value.code not in (0, None)
    return capsys.readouterr().err.strip().splitlines()[-1]


RECIPE = arguments(("dino",), "imagenet", "vim_small")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--model.init_args.lrr", "3"], ["lrr", "did you mean 'lr'"]),
        (["--trainer.maximum", "3"], ["maximum"]),
        (["--model.init_args.lr", "fast"], ["lr", "float", "fast"]),
        (["--data.init_args.root", "/nowhere"], ["/nowhere", "data.init_args.root"]),
        (["--data.init_args.policy", "ignore"], ["policy", "strict", "skip"]),
        (["--model.centering", "meann"], ["error: centering='meann'; allowed: mean, sinkhorn"]),
        (["--model.backbone", "backbones.VisionMmba"], ["model.backbone (backbones.VisionMmba)", "no attribute"]),
        (["--trainer.max_epoch", "3"], ["--trainer.max_epoch"]),  # no abbreviation of max_epochs
        (["--model.init_args.teacher_temp", "0.3"], ["teacher_temp=0.3", "student_temp=0.1"]),
        ("model:\n  init_args:\n    lr: 1e-5\n    lr: 2e-5\n", ["'lr'", "line 3", "line 4"]),
        ("model:\n  dict_kwargs:\n    anything: 1\n", ["dict_kwargs"]),
        ("optimiser: adam\n", ["optimiser"]),
    ],
)
def test_wrong_input(change, words, tmp_path, capsys):
    if isinstance(change, list):
        last = fails([*RECIPE, *change], tmp_path, capsys)
    else:
        last = fails(RECIPE, tmp_path, capsys, change)
    for word in words:
        assert word in last, last


def test_missing_backbone(tmp_path, capsys):
    last = fails(RECIPE[:6], tmp_path, capsys)
    assert "backbone" in last and "-c configs/backbone/" in last


def test_the_command_itself():
    """The console script fails with the same last line, and a non-zero exit code."""
    command = [
        str(Path(sys.executable).parent / "dinomamba"),
        "fit",
        *RECIPE,
        "--data.init_args.root",
        "/nowhere",
    ]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last == "error: no folder /nowhere: set data.init_args.root to the folder that holds the shards"


def test_numbers_are_numbers(tmp_path, capsys):
    (tmp_path / "x.yaml").write_text("model:\n  init_args:\n    lr: 1e-5\n")
    config = print_config([*RECIPE, "-c", str(tmp_path / "x.yaml")], capsys)
    assert config["model"]["init_args"]["lr"] == 1e-5
