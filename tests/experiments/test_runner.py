"""The runner and the command line, over a program ``cli`` of the test's making in the working folder."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import timm

from experiments import __main__ as command
from experiments import runner
from experiments.plan import DEMO_DATA
from experiments.runs import RunSpec, in_order
from tests.analysis.runs import head, write_run

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, sys, time
from pathlib import Path
name = sys.argv[sys.argv.index("--trainer.logger.init_args.name") + 1]
started = time.time()
Path(f"started-{name}").write_text(str(os.getpid()))
print("\\n".join(f"{name} says {line}" for line in range(20)))
if name in os.environ.get("FAIL", "").split():
    sys.exit("the end of " + name)
for other in os.environ.get("MEET", "").split():
    deadline = time.time() + 20
    while not Path(f"started-{other}").exists():
        assert time.time() < deadline, f"{other} was not started beside {name}"
        time.sleep(0.01)
time.sleep(float(os.environ.get("SECONDS", 0)))
json.dump({
    "args": sys.argv[1:], "threads": os.environ.get("OMP_NUM_THREADS"), "launched": os.environ.get("LAUNCHED"),
    "span": [started, time.time()],
}, open(f"{name}.json", "w"))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with the program, where the embedded data are said to be there."""
    (tmp_path / "cli.py").write_text(PROGRAM)
    for path in ("data/demo/_info.json", "data/demo/robustness/real.json", "w.pth"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    monkeypatch.chdir(tmp_path)
    for name in ("FAIL", "MEET", "SECONDS", "OMP_NUM_THREADS", "LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def spec(name, *needs, verb="validate", **changes):
    flags = ("--trainer.logger.init_args.name", name)
    return RunSpec(name, verb, ("base.yaml",), flags, Path("runs") / name, needs=needs, **changes)


def test_a_run_that_is_made_again_starts_in_an_empty_folder(folder):
    """What the earlier making left is beside it, once."""
    first = spec("a")
    for content in ("one", "two"):
        first.folder.mkdir(parents=True)
        (first.folder / "run.json").write_text(content)
        assert runner.run([first]) == []
        assert not (first.folder / "run.json").exists()
        assert (folder / "runs/a.earlier/run.json").read_text() == content
        first.done.unlink()
        for path in first.folder.iterdir():
            path.unlink()
        first.folder.rmdir()


def left(name):
    return json.loads(Path(f"{name}.json").read_text())


def test_order_and_reuse():
    a = spec("a")
    b, c = spec("b", a, threads=3), spec("c", a)
    assert in_order([b, c, b]) == [a, b, c]
    assert runner.run(in_order([b, c])) == []
    assert (
        left("a")["span"][1] <= left("b")["span"][0] and left("b")["span"][1] <= left("c")["span"][0]
    )  # one at a time
    assert left("a")["args"] == ["validate", "-c", "base.yaml", "--trainer.logger.init_args.name", "a"]
    assert left("b")["threads"] == "3" and left("c")["threads"] is None
    assert (c.folder / "log.txt").read_text().splitlines()[0] == "c says 0" and c.finished
    for name in "abc":
        Path(f"{name}.json").unlink()
    c.done.unlink()
    assert runner.run(in_order([b, c])) == []
    assert [name for name in "abc" if Path(f"{name}.json").exists()] == ["c"]


def test_what_was_made_from_something_older_is_made_again(tmp_path):
    """A source that changed since, a need that was made anew, one that is gone."""
    source = tmp_path / "draw.py"
    source.touch()
    a = replace(spec("a"), sources=(source, tmp_path / "absent.py"))
    b = spec("b", a)
    assert runner.run(in_order([b])) == [] and a.finished and b.finished
    later = b.done.stat().st_mtime_ns + 10**9
    os.utime(source, ns=(later, later))
    assert not a.finished and not b.finished
    os.utime(a.done, ns=(later, later))
    assert a.finished and not b.finished
    os.utime(b.done, ns=(later, later))
    assert b.finished
    a.done.unlink()
    assert not b.finished


def test_two_at_once(monkeypatch):
    monkeypatch.setenv("MEET", "a b")
    c = spec("c", spec("a"), spec("b"))
    assert runner.run(in_order([c]), jobs=2) == []
    with pytest.raises(ValueError, match="jobs=0; allowed: 1 and more"):
        runner.run([], jobs=0)


def test_a_failure_stops_what_needs_it_and_nothing_else(monkeypatch, capfd):
    monkeypatch.setenv("FAIL", "a")
    a = spec("a")
    b, c, d = spec("b", a), spec("c"), spec("d", lacks="no weights for d")
    last = spec("last", b)
    assert set(runner.run([a, b, last, d, c], jobs=2)) == {a, b, last, d}
    assert c.finished and not any(run.finished for run in (a, b, last, d))
    said = capfd.readouterr().out
    assert "failed with exit code 1: runs/a" in said and "    the end of a\n" in said
    assert "a says 11\n" in said and "a says 10\n" not in said  # ten lines of the log
    assert "not started: runs/b, which needs runs/a" in said and "error: no weights for d" in said
    assert not Path("started-b").exists() and not Path("started-d").exists()


def test_launch():
    fit, other = spec("fit", verb="fit"), spec("other")
    data = RunSpec("data", "--help", (), (), Path("data"), program="json.tool", marker="there", log="log.txt")
    assert runner.run([fit, other, data], launch=["env", "LAUNCHED=yes"]) == []
    assert left("fit")["launched"] == left("other")["launched"] == "yes"
    assert left("fit")["args"][-2:] == ["--ckpt_path", "auto"] and "--ckpt_path" not in left("other")["args"]
    assert data.command(["srun"])[0] == sys.executable  # SLURM starts runs, not the drawing of data
    assert replace(fit, threads=1).shown(["srun", "-n 2"]) == (
        "OMP_NUM_THREADS=1 srun '-n 2' dinomamba fit -c base.yaml --trainer.logger.init_args.name fit --ckpt_path auto"
    )
    assert (
        DEMO_DATA.shown(["srun"]) == "python -m datamodules.prepare demo --out data/demo --overwrite true --workers 2"
    )


def test_a_program_that_makes_its_folder(folder):
    """As what draws the robustness sets, which wants none there; it leaves its own marker and says what it does."""
    (folder / "maker.py").write_text("import os, sys; os.mkdir(sys.argv[1]); open(sys.argv[1] + '/made', 'x')")
    data = RunSpec("data", "sets", (), (), Path("sets"), program="maker", marker="made", log=None)
    assert runner.run([data]) == [] and data.finished and runner.run([data]) == []


RANKS = ["ranks", "--data=demo", "--models=vit_demo_random vim_demo_random", "--runs=x"]  # nothing is pretrained


def test_dry_run_starts_nothing(capsys, folder):
    before = sorted(folder.rglob("*"))
    command.main([*RANKS, "--dry-run"])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "# data/demo, done" and said[2] == "# 0: x/vit_demo_random-ranks, after data/demo"
    assert said[5].startswith("OMP_NUM_THREADS=1 dinomamba validate -c base.yaml -c task/ranks.yaml")
    assert "# ranks: 2 runs of its own, --array=0-1" in said and "# shown: 3 runs, 1 of them done" in said
    assert sorted(folder.rglob("*")) == before


def test_index():
    command.main([*RANKS, "--index=1", "--args=--a 1", "--args=--b=2", "--launch=env LAUNCHED=yes"])
    assert [path.name for path in Path("x").iterdir()] == ["vim_demo_random-ranks"]  # one run, and nothing is drawn
    said = left("vim_demo_random-ranks")
    assert said["args"][-3:] == ["--a", "1", "--b=2"] and said["launched"] == "yes"
    with pytest.raises(ValueError, match="task 2, but ranks has 2 runs: --array=0-1"):
        command.main([*RANKS, "--index=2"])


def test_what_did_not_run_is_told_and_the_rest_is_drawn(monkeypatch, capfd):
    monkeypatch.setenv("FAIL", "vit_demo_random-table1")
    write_run(Path("x"), "vim_demo_random", "table1", [head(1, best=0.5)])
    Path("x/vim_demo_random-table1/.done").touch()
    with pytest.raises(ValueError, match=r"1 of 3 runs were not made: x/vit_demo_random-table1$"):
        command.main(["table1", "--data=demo", "--models", "vit_demo_random", "vim_demo_random", "--runs=x", "--jobs="])
    page = Path("x/table1.html").read_text()
    assert "50.0" in page and "not run" in page and "table1.html" in Path("x/index.html").read_text()
    assert "x/table1.csv" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("option", "allowed"),
    [("seed", "0 to 4294967295"), ("jobs", "1 and more"), ("threads", "0 and more"), ("index", "0 and more")],
)
@pytest.mark.parametrize("value", ["abc", "1_0", "007", "-1", "1.5", " 1", "+1", "٣", "9" * 30])
def test_numbers_are_plain(option, allowed, value):
    with pytest.raises(ValueError, match=re.escape(f"--{option} {value}; allowed: {allowed}, in plain digits")):
        command.main([*RANKS, f"--{option}={value}", "--dry-run"])


def test_the_bounds_of_numbers(capsys):
    command.main([*RANKS, "--seed=4294967295", "--jobs=1", "--threads=0", "--dry-run"])
    assert "--seed_everything 4294967295" in capsys.readouterr().out
    for option, value in (("seed", "4294967296"), ("jobs", "0")):
        with pytest.raises(ValueError, match=f"--{option} {value}; allowed: "):
            command.main([*RANKS, f"--{option}={value}", "--dry-run"])


@pytest.mark.parametrize("value", ["x.txt", "there/x.ckpt", "x.pth.tar", "x.json", "x.pt", "there/x", "there/"])
def test_a_checkpoint_that_is_not_there(value):
    Path("there").mkdir()
    with pytest.raises(ValueError, match=f"--checkpoint {value}: there is no such file"):
        command.main(["ranks", "--models=vim_small", f"--checkpoint={value}", "--dry-run"])


@pytest.mark.parametrize("value", ["hf://owner/repo/model.safetensors", "vit_small_patch16_224.dino", "w.pth"])
def test_checkpoints_of_other_places(value, capsys):
    command.main(["ranks", "--models=vim_small", f"--checkpoint={value}", "--dry-run"])
    assert f"--model.init_args.backbone_weights {value}" in capsys.readouterr().out


def test_no_published_weights_are_taken_for_a_file():
    assert not [name for name in timm.list_pretrained() if command._names_a_file(name)]


NO_CHECK = "import dinomamba; dinomamba.check_modules = lambda: None\n"  # the program here is none of ours, on purpose


def experiments(*args, **options):
    code = f"{NO_CHECK}import runpy; runpy.run_module('experiments', run_name='__main__', alter_sys=True)"
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, **options,
    )  # fmt: skip


def test_the_command_itself():
    """An error is one line; a plan is made without torch."""
    process = experiments("table9")
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and said.startswith("error: no target 'table9'") and said.count("\n") == 1
    code = "import sys; from experiments.__main__ import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    code = NO_CHECK + code
    run = [sys.executable, "-c", code, "paper", "--dry-run"]
    subprocess.run(run, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, timeout=60)


def test_sigterm_ends_what_was_started(monkeypatch):
    monkeypatch.setenv("SECONDS", "60")
    process = experiments(*RANKS)
    started = (
        Path("started-vit_demo_random-ranks"),
        Path("started-vim_demo_random-ranks"),
    )  # two at once, being of embedded data
    deadline = time.time() + 30
    while not all(path.exists() and path.read_text() for path in started) and time.time() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    for path in started:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
    assert not list(Path("x").rglob(".done"))
