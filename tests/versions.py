"""The lowest and the newest packages that pyproject allows, beside what is installed: ``make test-versions``.

Each set lies in a folder in front of the environment's own packages; torch is the environment's. In each the program
trains a step of DINO, resumes, probes, and scores by k-NN and Binary-AUC, and tests/test_internals.py runs.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHANGED = ("lightning", "timm", "numpy", "torchmetrics", "jsonargparse", "webdataset", "safetensors", "tensorboard")
"""What is exchanged; ``pytorch-lightning`` goes with ``lightning``."""
SMOKE = """
import json, sys, tempfile
from pathlib import Path
import jsonargparse, lightning, numpy, safetensors, tensorboard, timm, torch, torchmetrics, webdataset
from datamodules import prepare
from tests.tiny_runs import run
folder = Path(tempfile.mkdtemp())
prepare.demo(str(folder / "shards"), train=24, validation=20, test=10, samples_per_shard=9)
done = {}
for name, verb, task, *extra in (
    ("dino", "fit", "dino"), ("resume", "fit", "dino", "--ckpt_path", "auto", "--trainer.max_epochs", "3"),
    ("probe", "fit", "linear_probe"), ("knn", "validate", "knn"), ("auc", "validate", "binary_auc"),
):
    try:
        run(verb, task, folder / "shards", folder, "vim", *extra)
        done[name] = "ok"
    except SystemExit as stop:
        done[name] = f"exit {stop.code}"
modules = (lightning, timm, numpy, torchmetrics, jsonargparse, webdataset, safetensors, tensorboard)
print("FOUND " + json.dumps({"versions": {m.__name__: m.__version__ for m in modules}, "torch": torch.__version__, "done": done}))
"""


def requirements(which: str) -> list[str]:
    """What pip is asked for: the lower bounds exactly, or the newest within the bounds."""
    wanted = []
    for requirement in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        name, bounds = re.fullmatch(r"([\w-]+)(?:\[\w+\])?(.*)", requirement).groups()
        if name in CHANGED:
            low = re.search(r">=([\w.]+)", bounds)[1]
            bounds = f"=={low}" if which == "lowest" else bounds
            wanted += [f"{name}{bounds}", *([f"pytorch-lightning{bounds}"] if name == "lightning" else [])]
    return wanted


def attempt(which: str, folder: Path) -> dict:
    """Installs a set and runs the program in it."""
    place = folder / which
    environment = os.environ | {"PYTHONPATH": f"{place}{os.pathsep}{ROOT}"}
    if which != "installed":
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--upgrade",
                "--target",
                str(place),
                *requirements(which),
            ],
            check=True,
        )
    said = subprocess.run([sys.executable, "-c", SMOKE], env=environment, cwd=folder, capture_output=True, text=True)
    line = next((line for line in said.stdout.splitlines() if line.startswith("FOUND ")), None)
    if line is None:
        return {"done": {"import": said.stderr.strip().splitlines()[-1]}, "versions": {}, "torch": ""}
    found = json.loads(line.removeprefix("FOUND "))
    if any(value != "ok" for value in found["done"].values()):
        print(said.stderr[-3000:], file=sys.stderr)
    internals = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests/test_internals.py")]
    found["done"]["internals"] = (
        "ok" if subprocess.run(internals, env=environment, cwd=ROOT).returncode == 0 else "failed"
    )
    return found


def main() -> None:
    folder = ROOT / ".versions"
    folder.mkdir(exist_ok=True)
    sets = {which: attempt(which, folder) for which in ("lowest", "installed", "newest")}
    names = list(next(found["versions"] for found in sets.values() if found["versions"]))
    print("| set | " + " | ".join([*names, "torch"]) + " | " + " | ".join(sets["installed"]["done"]) + " |")
    print("| --- " * (2 + len(names) + len(sets["installed"]["done"])) + "|")
    for which, found in sets.items():
        cells = [found["versions"].get(name, "") for name in names] + [found["torch"]]
        print(f"| {which} | " + " | ".join([*cells, *found["done"].values()]) + " |")
    if any(value != "ok" for found in sets.values() for value in found["done"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
