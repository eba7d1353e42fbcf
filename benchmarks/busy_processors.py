"""The demo's training step beside busy loops on all processors: threads that spin, spin briefly, or sleep.

``python benchmarks/busy_processors.py`` starts each run as a process of its own, since OpenMP reads its environment
when it starts. Where two threads share a processor with other work, one that spins takes it from the one it waits for.
"""

import os
import statistics
import subprocess
import sys
import time

from measuring import report

STEPS = 15
ROUNDS = 3
STEP = f"""
import sys, time, torch, yaml
sys.path.insert(0, {os.path.dirname(os.path.dirname(os.path.abspath(__file__)))!r})
import configs
from backbones import VisionMamba
from common.memory import keep_freed_memory
from heads import DINOHead
from lightning_modules.dino import MultiCropNetwork
keep_freed_memory()
torch.manual_seed(0)
overlay = yaml.safe_load(configs.find("backbone/vim_demo.yaml").read_text(encoding="utf-8"))
backbone = VisionMamba(**overlay["model"]["init_args"]["backbone"]["init_args"])
network = MultiCropNetwork(backbone, DINOHead(backbone.num_features, 256, 256, 32, use_bn=True))
optimizer = torch.optim.AdamW(network.parameters(), 1e-3, fused=True)
crops = [torch.randn(64, 3, side, side) for side in (48, 48, 24, 24, 24, 24)]
def step():
    optimizer.zero_grad()
    _, z = network(crops)
    (z @ network.head.last_layer.prototypes().T).logsumexp(-1).mean().backward()
    optimizer.step()
for _ in range(3):
    step()
start = time.perf_counter()
for _ in range({STEPS}):
    step()
print(64 * {STEPS} / (time.perf_counter() - start))
"""


POLICIES = {
    "OpenMP's default": {},
    "ours, GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}


def images_per_second(policy: dict[str, str], loops: int) -> float:
    """Of the step in a fresh process with a thread for each processor, beside so many busy loops."""
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    env |= {"OMP_NUM_THREADS": str(os.cpu_count())} | policy
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        time.sleep(0.2)
        done = subprocess.run([sys.executable, "-c", STEP], env=env, capture_output=True, text=True, check=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return float(done.stdout)


def main() -> None:
    header = ["busy loops", "threads wait", "images/s, median", "of the default's (least to most)"]
    rows = []
    for loops in (0, os.cpu_count() or 1):
        found: dict[str, list[float]] = {name: [] for name in POLICIES}
        for _ in range(ROUNDS):
            for name, policy in POLICIES.items():
                found[name].append(images_per_second(policy, loops))
        for name, values in found.items():
            ratios = [a / b for a, b in zip(values, found["OpenMP's default"], strict=True)]
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            rows.append([str(loops), name, f"{statistics.median(values):.0f}", ratio])
    report("busy_processors", header, rows, f"{ROUNDS} rounds of {STEPS} steps, 64 images each, the policies in turns.")


if __name__ == "__main__":
    main()
