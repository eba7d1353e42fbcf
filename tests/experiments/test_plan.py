"""What targets are made of: names, order, needs, files, weights and data."""

import shlex
import subprocess
from pathlib import Path

import pytest

import configs
from analysis.published import read
from experiments import plan, spec
from experiments.plan import DEMO_DATA, DEMO_DENSE, DEMO_ROBUSTNESS, Settings

PAPER = [
    *(f"table{n}" for n in range(1, 7)), "figure1", "figure2", "figure3",
    "figure4a", "figure4b", "figure4c", "figure4d", "figure4e", "figure4f", *(f"figure{n}" for n in range(5, 14)), "ranks",
    "scoring",
]  # fmt: skip
EVERY = [(name, data) for name, entry in spec.content()["targets"].items() for data in entry["models"]]
SIZES = {  # runs of a target's own, and with what they need
    "imagenet": {
        "table1": (7, 7), "table2": (3, 3), "table3": (3, 3), "table4": (3, 6), "table5": (1, 1), "table6": (1, 1),
        "figure1": (3, 3), "figure2": (0, 0), "figure3": (1, 1), "figure4": (21, 21), "figure4a": (13, 13),
        "figure4b": (2, 2), "figure4c": (6, 6), "figure4d": (2, 2), "figure4e": (4, 4), "figure4f": (3, 3),
        "figure5": (6, 6), "figure6": (5, 5), "figure7": (1, 1), "figure8": (1, 1), "figure9": (3, 3), "figure10": (3, 3),
        "figure11": (6, 6), "figure12": (3, 3), "figure13": (1, 1), "ranks": (3, 3), "scoring": (4, 4), "paper": (48, 48),
        "evaluate": (1, 2), "ranks512": (6, 6), "claims": (12, 12),
    },
    "demo": {
        "table1": (4, 9), "table2": (3, 8), "table3": (3, 8), "table4": (4, 14), "table5": (1, 3), "table6": (1, 3),
        "figure1": (3, 7), "figure2": (0, 0), "figure3": (1, 3), "figure4": (10, 20), "figure4a": (7, 15),
        "figure4b": (2, 5), "figure4c": (2, 5), "figure4d": (2, 4), "figure4e": (4, 9), "figure4f": (3, 7),
        "figure5": (6, 13), "figure6": (4, 9), "figure7": (1, 3), "figure8": (1, 3), "figure9": (2, 5), "figure10": (3, 7),
        "figure11": (6, 13), "figure12": (3, 7), "figure13": (1, 1), "ranks": (3, 7), "scoring": (4, 9), "paper": (35, 47),
        "demo": (6, 8), "study": (160, 181), "evaluate": (1, 4), "ranks512": (6, 10), "states": (20, 26),
        "sizes": (27, 37), "claims": (60, 81),
    },
}  # fmt: skip


def made(target, **settings):
    return plan.plan([target], Settings(**settings))


def names(runs):
    return [run.name for run in runs]


def flag(run, name):
    """The values of a flag."""
    return [run.flags[i + 1] for i, word in enumerate(run.flags) if word == name]


@pytest.mark.parametrize(("target", "data"), [(t, d) for d, sizes in SIZES.items() for t in sizes])
def test_size_and_order(target, data):
    runs = made(target, data=data)
    assert (len(plan.requested([target], Settings(data=data))), len(runs)) == SIZES[data][target]
    assert len({run.folder for run in runs}) == len(runs)
    for at, run in enumerate(runs):
        assert set(run.needs) <= set(runs[:at])


def test_a_folder_is_of_one_run():
    """Targets that share a folder share its run: what one of them left is what another one asks for."""
    found = {}
    for name, data in EVERY:
        for run in made(name, data=data):
            assert found.setdefault(run.folder, run) == run


def test_every_target_is_whole():
    assert {name for name, _ in EVERY} == set(PAPER) | {
        "demo",
        "study",
        "evaluate",
        "ranks512",
        "states",
        "sizes",
        "claims",
    } and spec.names("paper") == PAPER
    assert {(t, d) for d, sizes in SIZES.items() for t in sizes} == {*EVERY} | {
        (t, d) for t in ("paper", "figure4") for d in SIZES
    }
    models = spec.content()["models"]
    for name, data in EVERY:
        target = spec.target(name, data)
        assert set(target.models) <= set(models), name
        for number in read(target.options.get("published", [])):
            assert number.model in spec.target(name, "imagenet").models, name


DRAWN = {"table4": DEMO_ROBUSTNESS, "segmentation": DEMO_DENSE, "detection": DEMO_DENSE}


@pytest.mark.parametrize("data", SIZES)
@pytest.mark.parametrize("target", [*PAPER, "evaluate"])
def test_files_flags_and_needs(target, data):
    """Each run has its model's backbone and weights, and reads what is written for data, task and model."""
    for run in made(target, data=data, runs=Path("x"), seed=3):
        if run.program != "cli":
            continue
        model, _, task = run.name.rpartition("-")
        if task == "outline":  # says its settings, and needs nothing
            assert run.flags[-1] == "--print_config" and not run.needs and run.log == "config.yaml"
            assert run.command(["srun"])[0] != "srun" and "--ckpt_path" not in run.command(["srun"])
            continue
        supervised = model.endswith("_supervised")
        assert f"backbone/{model.removesuffix('_supervised')}.yaml" == run.configs[3]
        assert run.configs[:3] == ("base.yaml", run.configs[1], run.configs[2])
        if task == "pretrain":
            assert run.configs[1] == ("task/supervised.yaml" if supervised else "task/dino.yaml")
        for own in (f"paper/{data}/{run.name}.yaml", f"paper/{data}/{task}.yaml"):
            wanted = configs.find(own).is_file() and not (task == "pretrain" and supervised)
            assert (own in run.configs) == wanted, (run.name, own)
        assert (f"paper/{data}/supervised.yaml" in run.configs) == (task == "pretrain" and supervised)
        assert all(configs.find(name).is_file() for name in run.configs)
        assert run.folder == Path("x") / run.name and run.done == run.folder / ".done" and run.log == "log.txt"
        assert flag(run, "--trainer.logger.init_args.save_dir") == ["x"] and flag(run, "--seed_everything") == ["3"]
        assert flag(run, "--trainer.logger.init_args.name") == [run.name]
        assert run.verb == {
            "pretrain": "fit",
            "auc": "validate",
            "tokens": "validate",
            "scoring": "validate",
            "ranks": "validate",
            "table4": "validate",
            "test": "test",
        }.get(task, "fit")
        assert run.threads == (data == "demo")
        weights = f"paper/{data}/{model}-weights.yaml"
        assert (weights in run.configs) == (configs.find(weights).is_file() and task != "test")
        given = flag(run, "--model.init_args.backbone_weights")
        assert given == (
            [f"x/{model}-pretrain/checkpoints/last.ckpt"] if data == "demo" and task not in ("pretrain", "test") else []
        )
        others = [need.name for need in run.needs if need.program == "cli"]
        wanted = [f"{model}-pretrain"] if data == "demo" and task not in ("pretrain", "test") else []
        wanted += {"table4": [f"{model}-table1"], "test": [f"{model}-probe"]}.get(task, [])
        assert others == wanted
        assert [need for need in run.needs if need.program != "cli"] == (
            [] if data == "imagenet" else [DRAWN.get(task, DEMO_DATA)]
        )
        probe = flag(run, "--model.init_args.probe")
        assert probe == ([f"x/{model}-table1/checkpoints/last.ckpt"] if task == "table4" else [])
        assert bool(run.lacks) == (model == "linear_vit_base")


def test_shared_runs_are_there_once():
    table1, table4 = made("table1", data="demo"), made("table4", data="demo")
    both = plan.plan(["table1", "table4"], Settings(data="demo"))
    assert names(both)[:3] == ["demo", "vit_demo-pretrain", "vit_demo-table1"]
    assert set(both) == {*table1, *table4} and len(both) == 14


def test_what_the_user_gives():
    """Checkpoint, models, data, flags and threads reach the runs that they are for."""
    settings = Settings(
        models=("vim_small",), checkpoint="w.pth", args=("--trainer.devices", "8"), threads=2,
        roots={"imagenet": "/i", "imagenet_s": "/s", "robustness": "/r"},
    )  # fmt: skip
    probe, sets, maps = plan.plan(["table4", "figure1"], settings)
    assert names([probe, sets, maps]) == ["vim_small-table1", "vim_small-table4", "vim_small-auc"]
    assert [flag(run, "--data.init_args.root") for run in (probe, sets, maps)] == [["/i"], ["/r"], ["/s"]]
    for run in (probe, sets, maps):
        assert flag(run, "--model.init_args.backbone_weights") == ["w.pth"] and run.flags[-2:] == settings.args
        assert run.threads == 2 and run.folder.parent == Path("runs/paper-imagenet")
    data, ranks = made("ranks", data="demo", models=("vit_demo",), checkpoint="w.pth")
    assert data == DEMO_DATA and ranks.needs == (DEMO_DATA,)


def test_arrays_that_are_documented_are_whole():
    last = len(plan.requested(["table1"], Settings())) - 1
    for name in ("README.md", "slurm/table.sbatch"):
        text = (configs.ROOT.parent / name).read_text()
        assert f"--array=0-{last} slurm/table.sbatch table1" in text, name


def test_demo():
    data, pretrain, *evaluations = made("demo", seed=2)
    folder = Path("runs/demo-2")
    assert data == DEMO_DATA and pretrain.folder == folder / "pretrain" and pretrain.needs == (DEMO_DATA,)
    assert pretrain.log is None and pretrain.threads == 0  # people watch it, and it has both cores
    assert names(evaluations) == [f"{m}-{t}" for m in ("untrained", "pretrained") for t in ("probe", "knn", "auc")]
    for run in evaluations:
        assert run.needs == (DEMO_DATA, pretrain) and run.threads == 1 and run.log == "log.txt"
        weights = [str(folder / "pretrain/checkpoints/last.ckpt")] if run.name.startswith("pretrained") else []
        assert flag(run, "--model.init_args.backbone_weights") == weights
    assert not [file for run in evaluations for file in run.configs if file.startswith("paper/")]
    assert made("demo")[1].folder == Path("runs/demo/pretrain")
    with pytest.raises(ValueError, match="demo: models=vit_demo vim_demo: name one model"):
        made("demo", models=("vit_demo", "vim_demo"))


def test_study():
    """Each seed trains four models by the demo's whole recipe, and evaluates them and their untrained twins."""
    runs = made("study")[1:]
    assert [run.folder.parent.name for run in runs] == [f"seed{seed}" for seed in range(5) for _ in range(4 + 8 * 4)]
    assert all(flag(run, "--seed_everything") == [run.folder.parent.name[-1]] for run in runs)
    assert all(run.folder.parent.parent == Path("runs/study") for run in runs)
    for run in runs:
        model, _, task = run.name.rpartition("-")
        overlays = [file for file in run.configs if file.startswith("paper/")]
        assert bool(overlays) == (task in ("places", "knn_both", "auc"))
        weights = flag(run, "--model.init_args.backbone_weights")
        assert bool(weights) == (task != "pretrain" and not model.endswith("_random")), run.name


@pytest.mark.parametrize("data", ["imagenet", "demo"])
def test_models_as_they_are_initialised(data):
    """No weights, and nothing pretrained; images of as many patches as those of the trained models."""
    runs = [run for run in made("ranks512", data=data) if "_random" in run.name]
    assert names(runs) == [f"{m}_base_random-ranks512" for m in ("vit", "linear_vit", "vim")]
    for run in runs:
        assert run.needs == ((DEMO_DATA,) if data == "demo" else ()) and not run.lacks
        assert not flag(run, "--model.init_args.backbone_weights") and not any("weights" in f for f in run.configs)
        assert f"backbone/{run.name.removesuffix('_random-ranks512')}.yaml" in run.configs
        assert f"paper/{data}/ranks512.yaml" in run.configs
        assert (f"paper/demo/{run.name}.yaml" in run.configs) == (data == "demo")
    (vim,) = [run for run in made("ranks512", data="demo") if run.name == "vim_demo-ranks512"]
    assert flag(vim, "--model.init_args.backbone_weights") == [
        "runs/paper-demo/vim_demo-pretrain/checkpoints/last.ckpt"
    ]
    with pytest.raises(ValueError, match=r"vim_base_random is measured as .* checkpoint=w.pth: models=vim_base takes"):
        made("ranks512", models=("vim_base_random",), checkpoint="w.pth")


@pytest.mark.parametrize("side", [48, 96, 192])
def test_sides(side):
    """Images of a model with a side of its own have it in training and in every evaluation; local crops have half."""
    runs = [run for run in made("sizes") if f"{side}px" in run.name]
    assert len(runs) == 3 * 4
    for run in runs:
        model, _, task = run.name.partition("px-")
        assert flag(run, "--model.init_args.backbone.init_args.img_size") == [str(side)]
        assert flag(run, "--data.init_args.resize") == flag(run, "--data.init_args.crop") == [str(side)]
        assert flag(run, "--data.init_args.probe_size") == ([] if task == "auc_both" else [str(side)])
        assert flag(run, "--data.init_args.multicrop.local_size") == ([str(side // 2)] if task == "pretrain" else [])
        assert f"backbone/{model.rpartition('_')[0]}.yaml" in run.configs


def test_states():
    """Each model is the demo's with another state, in training and in each evaluation; nothing is shortened."""
    runs = [run for run in made("states") if run != DEMO_DATA]
    for run in runs:
        model, _, task = run.name.rpartition("-")
        assert flag(run, "--model.init_args.backbone.init_args.d_state") == [model.removeprefix("vim_demo_n")]
        assert "backbone/vim_demo.yaml" in run.configs and run.folder.parent == Path("runs/states")
        own = [file for file in run.configs if file.startswith("paper/")]
        assert own == ([f"paper/demo/{task}.yaml"] if task in ("ranks512", "auc_both") else [])
    assert sorted({flag(run, "--model.init_args.backbone.init_args.d_state")[0] for run in runs}, key=int) == [
        "16", "32", "64", "128", "256"
    ]  # fmt: skip


def test_evaluate():
    run = made("evaluate")[-1]
    assert run.verb == "test" and flag(run, "--ckpt_path") == ["runs/paper-demo/vim_demo-probe/checkpoints/last.ckpt"]
    (given,) = made("evaluate", data="imagenet", checkpoint="probe.ckpt")
    assert flag(given, "--ckpt_path") == ["probe.ckpt"] and given.name == "vim_small-test" and not given.needs
    assert "data/demo_test.yaml" in run.configs and "data/imagenet.yaml" in given.configs
    (found,) = made("evaluate", checkpoint="probe.ckpt", roots={"imagenet": "/d"})
    assert "data/imagenet.yaml" in found.configs and flag(found, "--data.init_args.root") == ["/d"]
    with pytest.raises(
        ValueError, match=r"evaluate: checkpoint=probe\.ckpt: say what it is tested on, data: imagenet, demo"
    ):
        made("evaluate", checkpoint="probe.ckpt")


@pytest.mark.parametrize(
    ("targets", "settings", "words"),
    [
        (
            ["table9"],
            {},
            "no target 'table9'; there are table1, table2, .*, evaluate, .*figure4 for its parts, and paper",
        ),
        (
            ["table1"],
            {"models": ("vim_huge",)},
            "models=vim_huge: there is no backbone/vim_huge.yaml; there are deit_base",
        ),
        (["table1"], {"data": "mnist"}, "table1: data='mnist'; allowed: imagenet, demo"),
        (["study"], {"data": "imagenet"}, "study: data='imagenet'; allowed: demo"),
        (
            ["states"],
            {"models": ("vim_small",)},
            "states: models=vim_small: it varies d_state .* vim_demo_n16 vim_demo_n32",
        ),
        (
            ["sizes"],
            {"models": ("vim_demo",)},
            "sizes: models=vim_demo: it varies side of .* vit_demo_48px .* no others",
        ),
        (["study"], {"seed": 3}, "study: seed=3: it has seeds of its own, 0, 1, 2, 3, 4"),
        (["claims"], {"seed": 0, "data": "demo"}, "claims: seed=0: it has seeds of its own, 0, 1, 2, 3, 4"),
        (["ranks"], {"data": "demo", "roots": {"imagenet_s": "/s"}}, "data=demo .* takes no folder: imagenet_s=/s; "),
        (["study"], {"args": ("--seed_everything=3",)}, "args=--seed_everything=3: every run has .* say SEED"),
        (["ranks"], {"args": ("--trainer.logger.init_args.name", "x")}, "init_args.name of its own: it is MODEL-TASK"),
        (["ranks"], {"models": ("vim_base", "vim_base")}, "models=vim_base vim_base: vim_base is there twice"),
    ],
)
def test_wrong_input(targets, settings, words):
    with pytest.raises(ValueError, match=words):
        plan.plan(targets, Settings(**settings))


CHECKPOINT = {"checkpoint": "w.pth"}
ONE = r"a checkpoint is of one model: MODELS \(--models\) names that one"


@pytest.mark.parametrize(
    ("targets", "settings", "words"),
    [
        *(
            (name, {"data": "demo"}, r"goes with one overlay .* as MODELS \(--models\)")
            for name in ("figure1", "paper")
        ),
        ("ranks512", {}, r"ranks512: checkpoint=w.pth: .* CHECKPOINT \(--checkpoint\) goes with one overlay"),
        *(
            (name, {}, f"{name}: checkpoint=w.pth: it pretrains its models")
            for name in ("demo", "study", "states", "sizes")
        ),
        ("demo", {"models": ("vim_demo",)}, r"it pretrains its models, and takes no CHECKPOINT \(--checkpoint\)"),
        ("study", {"models": ("vim_demo",)}, "study: checkpoint=w.pth: it pretrains its models"),
        ("claims", {"models": ("vim_demo",), "data": "demo"}, "claims: checkpoint=w.pth: it pretrains its models"),
        ("table1", {"models": ("vim_demo", "vit_demo")}, f"table1: checkpoint=w.pth: models=vim_demo vit_demo: {ONE}"),
        ("evaluate", {"models": ("vim_demo", "vit_demo"), "data": "demo"}, f"evaluate: .*: {ONE}"),
    ],
)
def test_a_checkpoint_goes_with_its_model(targets, settings, words):
    with pytest.raises(ValueError, match=words):
        plan.plan([targets], Settings(**settings, **CHECKPOINT))


def test_a_seed_where_a_target_has_none_of_its_own():
    """The claims have seeds on embedded data only."""
    assert {flag(run, "--seed_everything")[0] for run in made("claims", data="imagenet", seed=3)} == {"3"}


def test_an_overlay_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("backbone/mine.yaml", "paper/imagenet/mine-table1.yaml"):
        Path(name).parent.mkdir(parents=True)
        Path(name).write_text("model: {init_args: {backbone: {init_args: {}}}}")
    (run,) = made("table1", models=("mine",))
    assert run.configs[-1] == "paper/imagenet/mine-table1.yaml" and "no weights for mine: give CHECKPOINT" in run.lacks


def test_make_shows_without_running(tmp_path):
    """A recipe of one command, which `make -n` prints; each variable is an option."""
    command = ["make", "-n", "-o", ".venv/.ready", "figure1", "DATA=demo", f"RUNS={tmp_path}", "ARGS=--x 'a b'"]
    done = subprocess.run(command, cwd=configs.ROOT.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not list(tmp_path.iterdir()), done.stderr
    words = shlex.split(done.stdout.replace("\\\n", " "))
    assert words[1:4] == ["-m", "experiments", "figure1"] and "--data=demo" in words and f"--runs={tmp_path}" in words
    assert "--args=--x 'a b'" in words


def test_make_names_its_targets():
    """Instead of "No rule to make target"; files that there is no rule for are left alone."""
    command = ["make", "-o", ".venv/.ready", "tabel1"]
    done = subprocess.run(command, cwd=configs.ROOT.parent, capture_output=True, text=True, timeout=60)
    first = done.stderr.splitlines()[0]
    assert (
        done.returncode == 2 and not done.stdout and first.startswith("error: no target tabel1; there are help, setup,")
    )
    wanted = {"help", "test", "lint", *spec.content()["targets"], "paper", "figure4"}
    assert wanted <= set(first.partition("there are ")[2].split(", "))
    command = ["make", "-n", "-o", ".venv/.ready", "Makefile", "pyproject.toml", "table1"]
    done = subprocess.run(command, cwd=configs.ROOT.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "no target" not in done.stdout + done.stderr and "experiments table1" in done.stdout


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize(("target", "script"), [("states", "state_size.py"), ("sizes", "image_sizes.py")])
def test_make_measures_the_cost_of_a_sweep_before_it_draws_it(target, script, dry, tmp_path):
    command = ["make", "-n", "-o", ".venv/.ready", target, f"RUNS={tmp_path}", *(["DRY=1"] if dry else [])]
    done = subprocess.run(command, cwd=configs.ROOT.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    cost, drawn = f"benchmarks/{script} --out {tmp_path}/{target}-cost.json", f"-m experiments {target}"
    assert (cost in done.stdout) == (not dry) and drawn in done.stdout.partition(cost)[2 * (not dry)]
    assert (configs.ROOT.parent / "benchmarks" / script).is_file()
    (tmp_path / f"{target}-cost.json").touch()
    assert cost not in subprocess.run(command, cwd=configs.ROOT.parent, capture_output=True, text=True).stdout
