"""A run that goes on from a checkpoint does what is asked of it now, and says what that changed; docs/resuming.md."""

import json
import math
import shutil

import pytest
import torch

from callbacks import settings
from lightning_modules.schedules import cosine_schedule
from tests.tiny_runs import run

STEPS = 3  # an epoch of the 24 images in batches of 8
LR = {
    "dino": ("--model.init_args.lr", "0.01"),
    "supervised": ("--model.init_args.lr", "0.01"),
    "linear_probe": ("--model.init_args.momentum", "0.5"),
}
KEY = {task: flags[0].removeprefix("--") for task, flags in LR.items()}


@pytest.fixture(scope="module")
def trained(shards, tmp_path_factory):
    """Runs of two epochs, by method, made when first asked for; each call gives a copy."""
    made = {}

    def copy(task, out):
        if task not in made:
            made[task] = run("fit", task, shards, tmp_path_factory.mktemp(task)).parent
        shutil.copytree(made[task], out, dirs_exist_ok=True)
        return out

    return copy


def end(folder):
    checkpoint = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    record = json.loads(max(folder.glob("run*.json"), key=lambda path: path.stat().st_mtime_ns).read_text())
    return checkpoint, record


def expected_rate(task, step, total, batch, lr):
    """Of the last step: DINO's and Supervised's cosine per step, the probe's per epoch."""
    peak = lr * batch / 256
    if task == "linear_probe":
        epochs = 4
        return peak * 0.5 * (1 + math.cos(math.pi * (epochs - 1) / epochs))
    return cosine_schedule(step, total, peak, 1e-6 if task == "dino" else 0.0)


@pytest.mark.parametrize("task", LR)
def test_what_is_asked_for_now_holds(task, trained, shards, tmp_path, caplog):
    """More epochs, another rate and precision: taken, said, recorded; batches an epoch too."""
    trained(task, tmp_path)
    extra = [
        "--trainer.max_epochs", "4", *LR[task], "--trainer.precision", "bf16-mixed",
        "--data.init_args.batch_size", "12",
    ]  # fmt: skip
    checkpoint, record = end(run("fit", task, shards, tmp_path, "vim", *extra, "--ckpt_path", "auto"))
    # two epochs of three steps, then two of two: a run of four epochs of two steps ends where they do
    assert checkpoint["global_step"] == 2 * STEPS + 2 * 2 and checkpoint["epoch"] == 3
    lr = 1.0 if task == "linear_probe" else 0.01
    group = checkpoint["optimizer_states"][0]["param_groups"][0]
    assert group["lr"] == pytest.approx(expected_rate(task, 7, 8, 12, lr), rel=1e-9)
    assert lr * 12 / 256 == pytest.approx(max(record["effective_lr"]))
    changed = {change["key"]: (change["before"], change["now"]) for change in record["changed_on_resume"]}
    assert changed.keys() == {
        "trainer.max_epochs", KEY[task], "trainer.precision", "data.init_args.batch_size",
    }  # fmt: skip
    assert changed["trainer.max_epochs"] == (2, 4) and changed["trainer.precision"] == ("32-true", "bf16-mixed")
    value = float(LR[task][1])
    assert changed[KEY[task]][1] == value == checkpoint["hyper_parameters"][KEY[task].rpartition(".")[2]]
    assert group.get("momentum") == (0.5 if task == "linear_probe" else None)
    assert "trainer.max_epochs 2 -> 4" in caplog.text


def test_unchanged_settings_are_no_change(trained, shards, tmp_path):
    trained("dino", tmp_path)
    _, record = end(run("fit", "dino", shards, tmp_path, "vim", "--ckpt_path", "auto"))
    assert record["changed_on_resume"] == []


def refusal(capfd, *args):
    with pytest.raises(SystemExit) as stop:
        run(*args)
    assert stop.value.code == 1
    return capfd.readouterr().err.strip().splitlines()[-1]


REFUSED = {
    "heads a token mixer has, shapes alike": ("dino", "model.init_args.backbone.init_args.headdim", "4"),
    "prototypes": ("dino", "model.init_args.out_dim", "32"),
    "what a head reads": ("linear_probe", "model.init_args.stream", "residual"),
    "classes": ("supervised", "model.init_args.num_classes", "11"),
    "an end that has passed": ("dino", "trainer.max_epochs", "1"),
    "an end in steps that has passed": ("dino", "trainer.max_steps", "4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_change_is_refused(case, trained, shards, tmp_path, capfd):
    task, key, value = REFUSED[case]
    folder = trained(task, tmp_path) / f"{task}-vim"
    before = {path: path.read_bytes() for path in folder.rglob("*.ckpt")}
    flag = f"--{key}".replace("backbone.init_args", "backbone")
    message = refusal(capfd, "fit", task, shards, tmp_path, "vim", flag, value, "--ckpt_path", "auto")
    assert message.startswith("error: ") and key in message and value in message
    assert {path: path.read_bytes() for path in folder.rglob("*.ckpt")} == before


def test_names_of_a_runs_own_checkpoints(trained, shards, tmp_path, capfd):
    folder = trained("dino", tmp_path) / "dino-vim/checkpoints"
    for name in ("last", "best"):
        epochs = {"last": "3", "best": "4"}[name]
        at = torch.load(folder / f"{name}.ckpt", weights_only=True)["global_step"]
        checkpoint, record = end(
            run("fit", "dino", shards, tmp_path, "vim", "--trainer.max_epochs", epochs, "--ckpt_path", name)
        )
        assert checkpoint["global_step"] == STEPS * int(epochs) > at
        assert "trainer.max_epochs" in {change["key"] for change in record["changed_on_resume"]}
    assert not list((tmp_path / "dino-vim").glob("checkpoints-*"))
    (folder / "best.ckpt").unlink()
    message = refusal(capfd, "fit", "dino", shards, tmp_path, "vim", "--ckpt_path", "best")
    assert message.startswith(f"error: ckpt_path=best: there is no best.ckpt in {folder}; name the run")
    (folder / "last.ckpt").write_bytes(b"PK")
    message = refusal(capfd, "fit", "dino", shards, tmp_path, "vim", "--ckpt_path", "last")
    assert "ckpt_path=last" in message and "cannot be used" in message


@pytest.mark.parametrize("task", ["linear_probe", "supervised"])
def test_what_was_never_trained_is_not_scored(task, trained, shards, tmp_path, capfd):
    for command in ("validate", "test"):
        message = refusal(capfd, command, task, shards, tmp_path, "vim")
        assert f"{command} without a checkpoint would score a" in message
    message = refusal(capfd, "validate", task, shards, tmp_path, "vim", "--trainer.limit_val_batches", "0")
    assert message == "error: trainer.limit_val_batches=0: nothing would be evaluated"
    message = refusal(capfd, "validate", task, shards, tmp_path, "vim", "--ckpt_path", "auto")
    assert message.startswith("error: ckpt_path=auto: there is no whole checkpoint in ")
    trained(task, tmp_path)
    run("validate", task, shards, tmp_path, "vim", "--ckpt_path", "last")


def test_what_a_backbone_frees_is_taken_in_its_own_folder(trained, shards, tmp_path):
    trained("dino", tmp_path)
    extra = ["--trainer.max_epochs", "3", "--model.backbone.init_args.drop_path", "0.1", "--ckpt_path", "auto"]
    checkpoint, record = end(run("fit", "dino", shards, tmp_path, "vim", *extra))
    assert checkpoint["global_step"] == 3 * STEPS
    assert {change["key"].rpartition(".")[2] for change in record["changed_on_resume"]} == {"max_epochs", "drop_path"}


def test_a_callbacks_settings_are_those_of_now(shards, tmp_path, caplog):
    """Lightning restores EarlyStopping's patience with its count."""
    stop = tmp_path / "stop.yaml"

    def fit(patience, *extra):
        stop.write_text(
            "trainer: {callbacks+: [{class_path: EarlyStopping, init_args: "
            f"{{monitor: train/loss, mode: max, min_delta: 1000.0, patience: {patience}}}}}]}}"
        )
        return end(run("fit", "supervised", shards, tmp_path, "vim", "-c", str(stop), *extra))

    checkpoint, _ = fit(1)
    assert checkpoint["epoch"] == 1
    checkpoint, record = fit(7, "--trainer.max_epochs", "5", "--ckpt_path", "auto")
    assert checkpoint["epoch"] == 4
    (kept,) = (state for name, state in checkpoint["callbacks"].items() if name.startswith("EarlyStopping"))
    assert kept["patience"] == 7
    changed = {change["key"]: (change["before"], change["now"]) for change in record["changed_on_resume"]}
    assert changed["callbacks.EarlyStopping.patience"] == (1, 7)
    assert "callbacks.EarlyStopping.patience 1 -> 7" in caplog.text


def test_a_second_probe_keeps_the_results_of_the_first(trained, shards, tmp_path):
    folder = trained("linear_probe", tmp_path) / "linear_probe-vim"
    before = {path.name: path.read_bytes() for path in folder.glob("results.*")}
    assert "results.json" in before
    run("fit", "linear_probe", shards, tmp_path, "vim", "--model.heads.lr", "0.5", "--trainer.max_epochs", "1")
    for name, text in before.items():
        assert (folder / name.replace("results", "results-1")).read_bytes() == text
        assert (folder / name).is_file()
    assert (folder / "checkpoints-1").is_dir()


def test_a_head_that_reads_something_else_is_refused():
    before = {"model.class_path": "lightning_modules.LinearProbe", "model.init_args.heads.0.pooling": "cls"}
    changes = settings.compare(before, before | {"model.init_args.heads.0.pooling": "mean"})

    class Module:
        fixed_on_resume = ("heads.*.pooling",)

    assert [str(change) for change in settings.refused(changes, None, Module)] == [
        "model.init_args.heads.0.pooling cls -> mean"
    ]
    assert settings.refused(changes, None, None) == []


def test_comparing():
    """A group that became one, an entry of a list, a class by its older name, an option of another version."""
    before = {"a.multicrop": None, "a.heads.0.lr": 1, "b.class_path": "backbones.SupervisedVim", "a.old": 1}
    now = {
        "a.multicrop.size": 8,
        "a.heads.0.lr": 1,
        "a.heads.1.lr": 2,
        "b.class_path": "backbones.VimMamba1",
        "a.new": 1,
    }
    assert {change.key: change[1:] for change in settings.compare(before, now)} == {
        "a.multicrop": (None, "options"),
        "a.heads.1.lr": (None, 2),
    }


def test_a_folder_of_another_run(trained, shards, tmp_path, capfd):
    """Neither a fit nor an evaluation writes into it; a second fit of the same model keeps the checkpoints of the first."""
    folder = trained("dino", tmp_path) / "dino-vim"
    name = ["--trainer.logger.init_args.name", "dino-vim"]
    for args in (("fit", "dino", shards, tmp_path, "vit"), ("validate", "knn", shards, tmp_path, "vim")):
        message = refusal(capfd, *args, *name)
        assert f"{folder} holds another run" in message and "--trainer.logger.init_args.name NAME" in message
    before = (folder / "checkpoints/last.ckpt").read_bytes()
    run("fit", "dino", shards, tmp_path, "vim", "--trainer.max_epochs", "1")
    assert (folder / "checkpoints-1/last.ckpt").read_bytes() == before
    assert torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["global_step"] == STEPS


def test_a_fast_dev_run_leaves_and_takes_nothing(trained, shards, tmp_path, monkeypatch):
    folder = trained("dino", tmp_path)
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for args in (("fit", "dino"), ("validate", "knn"), ("predict", "knn")):
        extra = ["--trainer.fast_dev_run", "true", *(["--ckpt_path", "auto"] if args[0] == "fit" else [])]
        run(*args, shards, tmp_path, "vim", *extra)
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".yaml"}
    assert after == {path: text for path, text in before.items() if path.suffix != ".yaml"}


SCHEDULES = {
    "cosine": lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, n),
    "step": lambda o, n: torch.optim.lr_scheduler.StepLR(o, n),
    "lambda": lambda o, n: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 - step / n),
    "constant": lambda o, n: torch.optim.lr_scheduler.ConstantLR(o, 0.5, n),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("now", [(1.0, 10), (0.3, 8), (2.0, 7)])
def test_a_schedule_of_torch_is_the_one_of_now(name, now, tmp_path):
    """It stands where one made with these settings stands after as many steps."""

    def made(lr, n, steps=0):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr, momentum=lr / 4)
        scheduler = SCHEDULES[name](optimizer, n)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return optimizer, scheduler

    old, fresh, expected = made(1.0, 10, 4), made(*now), made(*now, 4)
    asked, settings_of = settings.options(fresh[0]), dict(fresh[1].state_dict())
    fresh[0].load_state_dict(old[0].state_dict())
    fresh[1].load_state_dict(old[1].state_dict())
    settings.put_back(fresh[0], asked)
    settings.put_schedule_back(fresh[1], settings_of)
    for _ in range(3):
        groups = zip(fresh[0].param_groups, expected[0].param_groups, strict=True)
        for mine, theirs in groups:
            assert mine["lr"] == pytest.approx(theirs["lr"]) and mine["momentum"] == theirs["momentum"]
        for optimizer, scheduler in (fresh, expected):
            optimizer.step()
            scheduler.step()


def test_a_schedule_that_cannot_be_taken_up():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], 1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)
    asked = {**scheduler.state_dict(), "T_0": 7}
    with pytest.raises(ValueError, match="CosineAnnealingWarmRestarts: T_0 was 5 and is 7"):
        settings.put_schedule_back(scheduler, asked)
