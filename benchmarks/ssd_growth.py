"""Time and memory of ssd, forward and backward, from 1,024 to 16,384 tokens, in fresh processes."""

import resource
import statistics
import subprocess
import sys

import torch
from measuring import in_turns, report

from backbones.ops import ssd

LENGTHS = (1024, 2048, 4096, 8192, 16384)


def one(length: int) -> None:
    """Prints median seconds, spread, and peak memory above the start in MiB."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    x, B, C = torch.randn(1, length, 4, 64), torch.randn(1, length, 1, 64), torch.randn(1, length, 1, 64)
    dt, A = torch.rand(1, length, 4) * 0.1, -torch.rand(4) * 15 - 1
    arguments = [t.requires_grad_() for t in (x, dt, A, B, C)]

    def step() -> None:
        ssd(*arguments, chunk_size=256).sum().backward()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = in_turns({"ssd": step}, 3)["ssd"]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(statistics.median(times), max(times) - min(times), (after - before) / 1024)


def main() -> None:
    rows, first = [], None
    for length in LENGTHS:
        run = subprocess.run([sys.executable, __file__, str(length)], capture_output=True, text=True, check=True)
        median, spread, memory = map(float, run.stdout.split())
        first = first or (median, memory)
        time, growth = f"{median * 1e3:.0f} ± {spread * 1e3:.0f}", f"{median / first[0]:.1f}"
        ratio = f"{length / LENGTHS[0]:.0f}"
        rows.append([f"{length:,}", ratio, time, growth, f"{memory:.0f}", f"{memory / first[1]:.1f}"])
    report(
        "ssd_growth",
        ["tokens", "ratio", "forward + backward, ms", "ratio", "peak memory, MiB", "ratio"],
        rows,
        "One sequence, 4 heads of 64, state 64, chunks of 256, float32. Linear growth has equal ratios.",
    )


if __name__ == "__main__":
    one(int(sys.argv[1])) if len(sys.argv) > 1 else main()
