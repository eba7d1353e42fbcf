"""Starts runs: several at once, each after what it needs, none that has ended well before."""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from experiments import records
from experiments.runs import RunSpec

TAIL = 10
"""Lines of a failed run's log that are shown."""
POLL_SECONDS = 0.1


def run(runs: Sequence[RunSpec], jobs: int = 1, launch: Sequence[str] = ()) -> list[RunSpec]:
    """Makes what is not finished yet. A run that fails stops those that need it, and no others.

    Args:
        runs: in an order in which each comes after what it needs.
        jobs: how many run at once.
        launch: what starts a run of dinomamba, such as ``srun …``; then what trains resumes what it finds.

    Returns:
        The runs that failed or could not be started.

    Raises:
        ValueError: ``jobs`` is not positive.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs}; allowed: 1 and more")
    waiting = [one for one in runs if not one.finished]
    running: dict[RunSpec, subprocess.Popen[bytes]] = {}
    failed: list[RunSpec] = []
    try:
        while waiting or running:
            for one in list(waiting):  # in order, so one that is not started stops those that need it in their turn
                if stopped := set(one.needs) & set(failed):
                    print(f"not started: {one.folder}, which needs {_names(stopped)}", flush=True)
                    waiting.remove(one)
                    failed.append(one)
            ready = [one for one in waiting if not set(one.needs) & {*waiting, *running}]
            for one in ready[: jobs - len(running)]:
                waiting.remove(one)
                if one.lacks:
                    print(f"error: {one.lacks}", flush=True)
                    failed.append(one)
                else:
                    running[one] = _start(one, launch)
            for one in _ended(running):
                if code := running.pop(one).returncode:
                    failed.append(one)
                    _tell(one, code)
                else:
                    one.done.touch()
    finally:  # nothing that was started outlives this program
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    return failed


def _names(runs: set[RunSpec]) -> str:
    return ", ".join(sorted(str(one.folder) for one in runs))


def _ended(running: dict[RunSpec, "subprocess.Popen[bytes]"]) -> list[RunSpec]:
    """Waits until one has ended at least, where any runs, and returns what has."""
    while running and all(process.poll() is None for process in running.values()):
        time.sleep(POLL_SECONDS)
    return [one for one, process in running.items() if process.returncode is not None]


def _start(one: RunSpec, launch: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Starts a run; its output goes to its log, or is shown."""
    environment = os.environ | ({"OMP_NUM_THREADS": str(one.threads)} if one.threads else {})
    if one.log is not None and not one.resumes(launch):
        _set_aside(one.folder)
    if one.program == "cli":  # what draws data makes its folder itself, and is made again by the age of its sources
        records.keep(one)
    if one.log is None:
        print(one.shown(launch), flush=True)
        return subprocess.Popen(one.command(launch), env=environment)
    print(one.folder / one.log, flush=True)
    one.folder.mkdir(parents=True, exist_ok=True)
    with open(one.folder / one.log, "wb") as log:
        return subprocess.Popen(one.command(launch), env=environment, stdout=log, stderr=subprocess.STDOUT)


def _set_aside(folder: Path) -> None:
    """What an earlier making left goes to ``NAME.earlier``, in place of what was there: a new run starts empty."""
    if (folder / "run.json").is_file():
        earlier = folder.with_name(f"{folder.name}.earlier")
        shutil.rmtree(earlier, ignore_errors=True)
        folder.rename(earlier)


def _tell(one: RunSpec, code: int) -> None:
    """Says that a run failed, with the last lines of its log."""
    print(f"failed with exit code {code}: {one.folder}", flush=True)
    if one.log is not None:
        lines = (one.folder / one.log).read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(f"    {line}" for line in lines[-TAIL:]), flush=True)
