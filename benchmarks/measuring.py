"""What the benchmarks share: timing contenders in turns, the machine's description, a table."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback

RESULTS = Path(__file__).parent / "results"


class Line(NamedTuple):
    """One comparison: the seconds that ours and a peer took, round by round, at the same work."""

    what: str
    ours: Sequence[float]
    peer: str
    theirs: Sequence[float]
    goal: str = ""
    """In words, such as "≥ 8"; of the ratio theirs / ours."""


def in_turns(contenders: Mapping[str, Callable[[], object]], repeats: int = 5) -> dict[str, list[float]]:
    """Seconds of each contender's calls, after one to warm up.

    They take turns, so that a slow moment of the machine meets them all.
    """
    for function in contenders.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, function in contenders.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return times


class Times(Callback):
    """When each batch of a Trainer's run starts, and when the last one ends, in seconds."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.marks.append(time.perf_counter())

    def on_train_end(self, *_: Any) -> None:
        self.marks.append(time.perf_counter())


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}, python {platform.python_version()}"


def _time(seconds: Sequence[float]) -> str:
    middle = statistics.median(seconds)
    return f"{middle:.3g} s" if middle >= 1 else f"{middle * 1e3:.3g} ms"


def _ratio(line: Line) -> str:
    ratios = [b / a for a, b in zip(line.ours, line.theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def compare(name: str, lines: Sequence[Line], note: str = "") -> None:
    """Prints the table of these lines and keeps it in results/NAME.md."""
    header = ["what", "ours", "peer", "peer's", "peer's / ours (least to most)", "goal"]
    rows = [[x.what, _time(x.ours), x.peer, _time(x.theirs), _ratio(x), x.goal] for x in lines]
    report(name, header, rows, note)


def report(name: str, header: list[str], rows: list[list[str]], note: str = "") -> None:
    """Prints a Markdown table and keeps it in results/NAME.md."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    notes = ["", note] if note else []
    text = "\n".join([f"# {name}", "", f"{time.strftime('%Y-%m-%d')}, {machine()}", "", *lines, *notes, ""])
    print(text, flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
