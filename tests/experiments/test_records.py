"""What a run was made of stands in its folder; another one asked for there is told before anything runs."""

import json
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import __main__ as command
from experiments import records, runner
from experiments.plan import DEMO_DATA
from experiments.runs import RunSpec

PROGRAM = "import sys; sys.exit('--fail' in sys.argv)"
NAME = "--trainer.logger.init_args.name"
ASKED = ["ranks", "--data=demo", "--models=vim_demo", "--checkpoint=a.ckpt", "--runs=r"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with a program that does nothing, settings, weights, and the embedded data."""
    monkeypatch.chdir(tmp_path)
    Path("cli.py").write_text(PROGRAM)
    Path("mine.yaml").write_text("model: {k: 1}\ntrainer: {devices: 1, max_epochs: 2}\n")
    for name in ("data/demo/_info.json", "a.ckpt", "b.ckpt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    monkeypatch.setattr("experiments.__main__.draw", lambda names, asked: [])
    return tmp_path


def a_run(*flags, verb="validate", configs=("mine.yaml",), runs="r", **changes):
    every = ("--trainer.logger.init_args.save_dir", str(runs), NAME, "a")
    return RunSpec("a", verb, configs, (*every, *flags), Path(runs) / "a", **changes)


def said(made, asked, launch=()):
    """What is told of a run that was made and another one in its place."""
    if not made.finished:
        assert runner.run([made]) == []
    return records.conflict(asked, launch)


@pytest.mark.parametrize(
    ("made", "asked", "words"),
    [
        (a_run("--x", "1"), a_run("--x", "2"), "x: 1; asked for: 2"),
        (a_run("--x", "1"), a_run(), "x: 1; asked for: nothing"),
        (a_run(), a_run("--x=1"), "x: nothing; asked for: 1"),
        (a_run("--x+", "1", "--x+", "2"), a_run("--x+", "1"), "x+: ['1', '2']; asked for: 1"),
        (a_run(), a_run(verb="test"), "verb: validate; asked for: test"),
        (a_run(configs=("mine.yaml", "base.yaml")), a_run(), "base.yaml: seed_everything"),
        (a_run(configs=("mine.yaml", "base.yaml")), a_run(configs=("base.yaml", "mine.yaml")), "order: ["),
        (
            a_run("--model.backbone_weights", "a.ckpt"),
            a_run("--model.backbone_weights", "b.ckpt"),
            "/a.ckpt; asked for: /",
        ),
        (a_run("-c", "mine.yaml", configs=()), a_run(configs=()), "mine.yaml: model, trainer; asked for: nothing"),
    ],
)
def test_what_is_told(made, asked, words):
    found = said(made, asked)
    assert found.startswith("r/a was made of other settings: ") and words in found
    assert found.endswith("; delete the folder, or give another RUNS (--runs)")


@pytest.mark.parametrize(
    ("made", "asked"),
    [
        (a_run("--x", "1"), a_run("--x=1", threads=2)),
        (a_run("--x", "1", "--y", "2"), a_run("--y", "0", "--x", "1", "--y", "2")),  # the last one counts
        (a_run(), a_run("--trainer.devices", "8", "--trainer.num_nodes", "2", "-c", "configs/cluster/slurm.yaml")),
        (a_run("--ckpt_path", "auto", verb="fit"), a_run(verb="fit")),
        (a_run("--d.root", "data"), a_run("--d.root", "./data")),
        (a_run("--x", "r/b/last.ckpt"), a_run("--x", "./r/../r/b/last.ckpt")),
        (a_run("--x", "hf://o/r/f"), a_run("--x", "hf://o/r/f")),
    ],
)
def test_what_is_the_same(made, asked):
    assert said(made, asked) == ""


def test_relative_and_whole_paths(folder):
    made = a_run("--m.backbone_weights", "a.ckpt", "--m.probe", "r/b/last.ckpt")
    asked = a_run("--m.backbone_weights", f"{folder}/a.ckpt", "--m.probe", f"{folder}/r/b/last.ckpt", runs=folder / "r")
    assert said(made, asked) == ""
    Path("r").rename("moved")  # with all its runs
    assert records.conflict(a_run(*made.flags[4:-1], "moved/b/last.ckpt", runs="moved")) == ""


def test_comments_and_where_it_runs_are_no_settings():
    run = a_run()
    assert said(run, run) == ""
    Path("mine.yaml").write_text("# new\nmodel:\n  k: 1 # one\ntrainer: {max_epochs: 2, devices: 8, strategy: ddp}\n")
    assert records.conflict(run) == ""
    Path("mine.yaml").write_text("model: {k: 2}\ntrainer: {max_epochs: 2}\n")
    assert "made of other settings: mine.yaml, model.k: 1; asked for: 2; " in records.conflict(run)


def test_a_run_without_a_record_counts():
    made, asked = a_run("--x", "1"), a_run("--x", "2")
    assert said(made, made) == "" and records.conflict(asked)
    (made.folder / records.NAME).unlink()
    assert records.conflict(asked) == "" and asked.finished


def test_what_is_made_anew_may_be_made_of_something_else():
    """A run that failed; one whose need is newer. The record is then the new one's."""
    failed, asked = a_run("--fail"), a_run("--x", "2")
    assert runner.run([failed]) == [failed] and (failed.folder / records.NAME).is_file()
    assert said(asked, asked) == "" and records.conflict(failed).endswith("RUNS (--runs)")
    source = Path("newer")
    source.touch()
    later = asked.done.stat().st_mtime_ns + 10**9
    os.utime(source, ns=(later, later))
    assert records.conflict(replace(failed, sources=(source,))) == ""


def test_what_is_gone_on_with_is_told():
    """A fit that left a checkpoint and resumes it; without a launcher it starts anew."""
    fit, other = a_run("--fail", verb="fit"), a_run("--x", "2", verb="fit")
    assert runner.run([fit]) == [fit]
    assert records.conflict(other, ["env"]) == ""
    (fit.folder / "checkpoints").mkdir()
    assert records.conflict(fit, ["env"]) == "" and records.conflict(other) == ""
    assert "r/a was made of other settings: --x: nothing; asked for: 2" in records.conflict(other, ["env"])


@pytest.mark.parametrize("text", ["{", "5", ""])
def test_a_record_that_is_damaged(text):
    run = a_run()
    assert said(run, run) == ""
    (run.folder / records.NAME).write_text(text)
    with pytest.raises(ValueError, match=r"r/a/made_of.json is no record .*; delete it, or the folder"):
        records.conflict(run)


def test_tasks_that_start_at_once_leave_one_record():
    runs = [a_run("--x", "1", threads=n) for n in range(8)]
    with ProcessPoolExecutor(4, multiprocessing.get_context("fork")) as pool:
        list(pool.map(records.keep, runs))
    assert [path.name for path in Path("r/a").iterdir()] == [records.NAME]
    assert json.loads(Path("r/a", records.NAME).read_text()) == records.made_of(runs[0])


def test_data_keep_no_record():
    """Their folder is made by the program, and they are made again where a source is newer."""
    data = replace(DEMO_DATA, folder=Path("sets"), program="maker", marker="made", flags=(), log=None)
    Path("maker.py").write_text("import os; os.mkdir('sets'); open('sets/made', 'x')")
    assert runner.run([data]) == [] and os.listdir("sets") == ["made"]
    assert records.conflict(replace(data, flags=("--x",))) == ""


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("--checkpoint=b.ckpt", "backbone_weights: /.*/a.ckpt; asked for: /.*/b.ckpt"),
        ("--seed=1", "seed_everything: 0; asked for: 1"),
        ("--args=--model.init_args.chunk 4", "model.init_args.chunk: nothing; asked for: 4"),
    ],
)
def test_the_command_tells_it_before_anything_runs(changed, words, capsys):
    command.main(ASKED)
    command.main([*ASKED, "--threads=2", "--jobs=3", "--launch=env"])
    before = {path: path.stat().st_mtime_ns for path in Path("r").rglob("*")}
    with pytest.raises(ValueError, match=f"^r/vim_demo-ranks was made of other settings: .*{words}"):
        command.main([*ASKED, changed])
    capsys.readouterr()
    command.main([*ASKED, changed, "--dry-run"])
    assert re.search(f"^# error: r/vim_demo-ranks was made of .*{words}", capsys.readouterr().out, re.MULTILINE)
    assert {path: path.stat().st_mtime_ns for path in Path("r").rglob("*")} == before


def test_several_are_counted():
    models = ["ranks", "--data=demo", "--models=vim_demo_random vit_demo_random", "--runs=r"]
    command.main(models)
    with pytest.raises(ValueError, match=r"r/vim_demo_random-ranks was made .* \(1 more of the 3 runs were, too\)"):
        command.main([*models, "--seed=1"])
    command.main([*models, "--seed=1", "--runs=other"])


def test_weights_that_were_written_anew_are_run_again():
    command.main(ASKED)
    Path("r/vim_demo-ranks/run.json").touch()  # as a run leaves it
    command.main(ASKED)
    assert not Path("r/vim_demo-ranks.earlier").exists()
    later = Path("r/vim_demo-ranks/.done").stat().st_mtime_ns + 10**9
    os.utime("a.ckpt", ns=(later, later))
    command.main(ASKED)
    assert Path("r/vim_demo-ranks.earlier/run.json").exists()
