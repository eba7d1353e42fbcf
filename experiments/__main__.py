"""Makes tables and figures: starts the runs that they need and are not there yet, then draws them.

A target is table1, figure4 (all its parts), …, paper (all of the paper), demo, study or evaluate. A run is a folder
RUNS/MODEL-TASK; delete it to have it made again, or made of something else. The files of a target are RUNS/TARGET.*.
"""

import argparse
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from common.pipes import end_with_the_reader
from experiments import plan, records, runner, spec
from experiments.runs import RunSpec, in_order

NUMBERS = {"seed": (0, 2**32 - 1), "jobs": (1, None), "threads": (0, None), "index": (0, None)}
"""Options that are whole numbers, the least and the most (seed_everything's)."""
ROOTS = ("imagenet", "imagenet_s", "robustness", "ade20k", "coco")
"""YAML in configs/data whose folder an option of that name gives."""
FILES = (
    ".bin", ".ckpt", ".csv", ".gz", ".h5", ".json", ".msgpack", ".npy", ".npz", ".onnx", ".pickle", ".pkl", ".pt",
    ".pth", ".safetensors", ".tar", ".torch", ".txt", ".yaml", ".yml", ".zip",
)  # fmt: skip
"""Endings of files. Names of published weights have one, too (vit_small_patch16_224.dino), and .pt is among them."""


def parser() -> argparse.ArgumentParser:
    """The command line. An empty value is the default, as Make hands on what is not set."""
    found = argparse.ArgumentParser(prog="python -m experiments", description=__doc__, allow_abbrev=False)
    add = found.add_argument
    add("targets", nargs="+", metavar="TARGET", help="table1, figure4, …, paper, demo, study, evaluate")
    add("--data", help=f"{' or '.join(spec.datasets())}; imagenet unless the target says otherwise")
    add("--models", nargs="*", default=[], help="overlays in configs/backbone, in place of the target's models")
    add("--checkpoint", help="weights of the one model named; for evaluate, the checkpoint of a probe")
    add("--runs", help="folder of the runs; runs/paper-DATA, runs/demo or runs/study unless given")
    add("--imagenet", help="folder of ImageNet's shards")
    add("--imagenet-s", help="folder of ImageNet-S's shards")
    add("--robustness", help="folder of the robustness sets")
    add("--ade20k", help="folder of ADE20K's shards")
    add("--coco", help="folder of COCO's shards")
    add("--seed", help="of every run; 0 unless given; not for a study, which has its own")
    add("--args", action="append", default=[], help='flags added to every run: --args="--trainer.devices 8"')
    add("--launch", default="", help="what starts a run, such as srun; fits then resume what they find")
    add("--jobs", help="runs at once; 2 for embedded data, else 1")
    add("--threads", help="OMP_NUM_THREADS of a run; 1 for embedded data, 0 leaves it as it is")
    add("--index", help="only the target's run of that number, after what it needs; draws nothing")
    add("--dry-run", action="store_true", help="prints the runs and starts none")
    return found


def settings(given: argparse.Namespace) -> plan.Settings:
    """The command line as the planner takes it."""
    roots = {name: getattr(given, name) for name in ROOTS}
    return plan.Settings(
        data=given.data or None,
        models=tuple(name for group in given.models for name in group.split()),
        checkpoint=given.checkpoint or None,
        runs=Path(given.runs) if given.runs else None,
        roots={name: root for name, root in roots.items() if root},
        seed=given.seed,
        args=tuple(flag for group in given.args for flag in shlex.split(group)),
        threads=given.threads,
    )


def check(given: argparse.Namespace) -> None:
    """Makes numbers of the options that are some. ValueError for what no run can be made with."""
    for name, (least, most) in NUMBERS.items():
        setattr(given, name, _number(name, getattr(given, name), least, most))
    for name in ROOTS:
        root = getattr(given, name)
        if root and ":" not in root and not Path(root).expanduser().is_dir():  # a URL, or pipe: and a command
            raise ValueError(f"--{name.replace('_', '-')} {root}: there is no such folder")
    path = given.checkpoint or ""
    if _names_a_file(path) and not Path(path).expanduser().is_file():
        raise ValueError(f"--checkpoint {path}: there is no such file")


def _names_a_file(checkpoint: str) -> bool:
    """Whether it is no name of weights published elsewhere."""
    if checkpoint.startswith("hf://"):
        return False
    published = checkpoint.endswith(".pt") and "_patch" in checkpoint  # beit3_base_patch16_224.pt
    return "/" in checkpoint or (checkpoint.endswith(FILES) and not published)


def _number(name: str, text: str | None, least: int, most: int | None) -> int | None:
    """The number in plain digits; nothing is the default."""
    if not text:
        return None
    plain = re.fullmatch("0|[1-9][0-9]*", text) and len(text) < 20
    if not plain or int(text) < least or (most is not None and int(text) > most):
        allowed = f"{least} and more" if most is None else f"{least} to {most}"
        raise ValueError(f"--{name} {text}; allowed: {allowed}, in plain digits")
    return int(text)


def describe(runs: Sequence[RunSpec], own: Sequence[RunSpec], names: Sequence[str], launch: Sequence[str]) -> str:
    """The runs in order as a shell script; those of ``own``, all of the targets' own, with their index."""
    lines = []
    for run in runs:
        number = f"{own.index(run)}: " if run in own else ""
        after = f", after {', '.join(str(need.folder) for need in run.needs)}" if run.needs else ""
        lines.append(f"# {number}{run.folder}{after}{', done' if run.finished else ''}")
        wrong = records.conflict(run, launch) or run.lacks
        lines.append(f"# error: {wrong}" if wrong else run.shown(launch))
    array = f", --array=0-{len(own) - 1}" if own else ""
    lines.append(f"# {' '.join(names)}: {len(own)} runs of its own{array}")
    lines.append(f"# shown: {len(runs)} runs, {sum(run.finished for run in runs)} of them done")
    return "\n".join(lines)


def draw(names: Sequence[str], asked: plan.Settings) -> list[str]:
    """Draws what is there of each target, and returns what is wrong with the others."""
    from analysis import renderers  # brings torch and matplotlib, which planning does without
    from analysis.pages import write_index

    wrong = []
    for target in plan.targets(names, asked):
        folder = plan.runs_folder(target, asked)
        try:
            print(*renderers.draw(target, folder), sep="\n")
        except ValueError as error:  # the others are drawn all the same
            wrong.append(str(error))
        write_index(folder, spec.titles())
    return wrong


def main(args: Sequence[str]) -> None:
    """See the module's first lines. ValueError where something is wrong, after all that could be made was made."""
    given = parser().parse_args(args)
    check(given)
    asked = settings(given)
    own = plan.requested(given.targets, asked)
    chosen = own
    if given.index is not None:
        if not 0 <= given.index < len(own):
            allowed = f": --array=0-{len(own) - 1}" if own else ", and needs no array"
            raise ValueError(f"task {given.index}, but {' '.join(given.targets)} has {len(own)} runs{allowed}")
        chosen = [own[given.index]]
    runs, launch = in_order(chosen), shlex.split(given.launch)
    if given.dry_run:
        end_with_the_reader()
        print(describe(runs, own, given.targets, launch))
        return
    if conflicts := [found for run in runs if (found := records.conflict(run, launch))]:
        more = f" ({len(conflicts) - 1} more of the {len(runs)} runs were, too)" if len(conflicts) > 1 else ""
        raise ValueError(f"{conflicts[0]}{more}")
    demo = all(target.data == "demo" for target in plan.targets(given.targets, asked))
    jobs = (2 if demo else 1) if given.jobs is None else given.jobs
    failed = runner.run(runs, jobs, launch)
    wrong = []
    if failed:
        wrong.append(f"{len(failed)} of {len(runs)} runs were not made: {', '.join(str(f.folder) for f in failed)}")
    if given.index is None:
        wrong += draw(given.targets, asked)
    if wrong:
        raise ValueError("; ".join(wrong))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that what was started is ended
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
