"""What the benchmarks share: repeated timing, the machine's description, a table."""

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def seconds(function: Callable[[], object], repeats: int = 5) -> tuple[float, float]:
    """Median and spread (largest less smallest) of one call, after one to warm up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times), max(times) - min(times)


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}, python {platform.python_version()}"


def report(name: str, header: list[str], rows: list[list[str]], note: str = "") -> None:
    """Prints a Markdown table and keeps it in results/NAME.md."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    text = "\n".join(
        [
            f"# {name}",
            "",
            f"{time.strftime('%Y-%m-%d')}, {machine()}",
            "",
            *lines,
            *(["", note] if note else []),
            "",
        ]
    )
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
