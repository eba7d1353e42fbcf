"""Random single mutations of valid configurations, each run through the command line in this process.

A run is right where it ends well and ``run.json`` holds the mutated value; else its last line must be an error that
names the key. ``python -m tests.yaml_fuzz 500`` does as many and prints what fell short.
"""

import contextlib
import copy
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import cli
from callbacks.settings import whole
from common.ranges import COUNT, RANGES, SEED, TRAINER, ZERO_FOR_NONE, interval
from datamodules import prepare
from tests.tiny_runs import BACKBONES, CONFIGS, EXTRA, TINY

TASKS = {"dino": "fit", "linear_probe": "fit", "supervised": "fit", "knn": "validate", "binary_auc": "validate"}
MODELS = ("vim", "mambar", "vit", "linear_vit", "timm")
LEFT_ALONE = ("logger", "callbacks", "plugins", "default_root_dir", "profiler", "strategy", "num_nodes", "devices")
"""Of the trainer: where files go, and how many processes there are."""


class Mutation(NamedTuple):
    """A change of one place of a configuration."""

    kind: str
    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.kind} {self.key} = {self.value!r}"


def resolved(task: str, model: str, shards: Path, folder: Path) -> dict[str, Any]:
    """A task's whole configuration, as ``--print_config`` shows it."""
    data = "demo_s" if task == "binary_auc" else "demo"
    tiny = TINY.format(root=shards).replace("max_epochs: 2", "max_epochs: 1")
    if model == "timm":
        tiny = tiny.replace("resize: 16", "resize: 32").replace("crop: 16", "crop: 32")
    texts = {
        "tiny": tiny, "extra": EXTRA[task],
        "model": f"model: {{init_args: {{backbone: {{class_path: backbones.{BACKBONES[model]}}}}}}}",
    }  # fmt: skip
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    files = [CONFIGS / "base.yaml", CONFIGS / f"task/{task}.yaml", CONFIGS / f"data/{data}.yaml"]
    files += [folder / f"{name}.yaml" for name in ("model", "tiny", "extra")]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main([TASKS[task], *[a for f in files for a in ("-c", str(f))], "--print_config"])
    config = yaml.safe_load(out.getvalue())
    if model == "timm" and task == "dino":
        config["data"]["init_args"]["multicrop"] |= {"global_size": 32, "local_size": 16}
    return config


def places(config: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key of a configuration but those that are left alone."""
    found = []
    items = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, value in items:
        here = (*path, key)
        if here[0] == "trainer" and len(here) > 1 and str(here[1]).startswith((*LEFT_ALONE, "enable_")):
            continue
        found += [here, *places(value, here)]
    return found


def other_values(value: Any, rng: random.Random) -> list[Any]:
    """Values in place of one, of its type and of others."""
    anything = ["", "abc", None, [], {}, [1, 2], {"a": 1}, True, "1e-3", -1, 0, 1, 2.5, float("nan"), float("inf")]
    if isinstance(value, bool):
        return [not value, "maybe", 2, None, "yes"]
    if isinstance(value, int):
        return [0, -value or -1, value + 1, value - 1, 2 * value, value + 0.5, str(value), rng.choice(anything)]
    if isinstance(value, float):
        return [0.0, -value or -1.0, value / 2, value * 2, 1.5, float("nan"), float("inf"), rng.choice(anything)]
    if isinstance(value, str):
        return [value[:-1], value + "x", value.upper(), "", None, 3, rng.choice(anything)]
    if isinstance(value, list):
        return [[], value[:-1], value + value, value[::-1], None, [None], rng.choice(anything)]
    return [None, [], {}, rng.choice(anything)]


def mutate(config: dict[str, Any], rng: random.Random) -> tuple[dict[str, Any], Mutation]:
    """A copy with one place changed: its value or type, its key, or the level at which it stands."""
    config = copy.deepcopy(config)
    path = rng.choice(places(config))
    parent: Any = config
    for name in path[:-1]:
        parent = parent[name]
    last, key = path[-1], ".".join(map(str, path))
    kind = rng.choices(["value", "key", "level", "none"], [8, 1, 1, 0])[0] if isinstance(parent, dict) else "value"
    if kind == "value":
        parent[last] = rng.choice(other_values(parent[last], rng))
        return config, Mutation("value", key, parent[last])
    value = parent.pop(last)
    if kind == "key":
        new = rng.choice([f"{last}s", last[:-1] or "x", last.upper(), last.replace("_", "-") + "_"])
        parent[new] = value
        return config, Mutation("key", ".".join(map(str, (*path[:-1], new))), value)
    target = rng.choice([config, *(config[part] for part in ("model", "data", "trainer") if part in config)])
    target = target if target is not parent else {}
    target[last] = value
    return config, Mutation("level", key, value)


def attempt(task: str, config: dict[str, Any], folder: Path) -> tuple[int, str, dict[str, Any]]:
    """Runs a configuration: the exit code, its last line, and the settings that its record holds."""
    path, runs = folder / "mutated.yaml", folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    said, code = io.StringIO(), 0
    args = ["--trainer.logger.init_args.save_dir", str(runs), "--trainer.logger.init_args.name", "one"]
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.main([TASKS[task], "-c", str(path), *args])
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            code, _ = -1, said.write(traceback.format_exc())
    lines = said.getvalue().strip().splitlines()
    record = runs / "one/run.json"
    held = json.loads(record.read_text()).get("settings", {}) if record.is_file() else {}
    return code, lines[-1] if lines else "", held


def shortcoming(code: int, line: str, held: dict[str, Any], asked: dict[str, Any], mutation: Mutation) -> str | None:
    """What is wrong with how a mutated run went; None where it is as it should be."""
    names = [name for name in mutation.key.split(".") if not name.isdigit()]
    if code == 0 and asked.get("trainer.fast_dev_run"):  # which leaves no record
        return None
    if code == 0:
        touched = [
            key for key in asked if f"{mutation.key}.".startswith(f"{key}.") or key.startswith(f"{mutation.key}.")
        ]
        if (outside := _out_of_range(mutation)) is not None:
            return outside
        different = next((key for key in touched if not _same(held.get(key), asked[key])), None)
        if different is None and not touched and mutation.kind != "level":
            return "ran, and the key is not in the record"
        return None if different is None else f"ran with {different}={held.get(different)!r}"
    if code == -1:
        return f"uncaught: {line}"
    if not line.startswith("error: ") or len(line) > 1000 or line.endswith(":"):
        return f"ends with: {line[:200]}"
    moved = list(mutation.value) if mutation.kind in ("level", "key") and isinstance(mutation.value, dict) else []
    if not any(re.search(rf"\b{re.escape(name)}\b", line) for name in (*names[-3:], *moved)):
        return f"names no key: {line[:300]}"
    return None


def _out_of_range(mutation: Mutation) -> str | None:
    """A number that was taken though it lies outside of its documented range, or has none."""
    *_, part, name = ("", *(name for name in mutation.key.split(".") if not name.isdigit()))
    value = mutation.value
    if mutation.kind != "value" or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    text = SEED if name == "seed_everything" else (TRAINER if part == "trainer" else RANGES).get(name)
    if text is None:
        return f"ran, and {name} has no documented range"
    at_least = COUNT if name in ZERO_FOR_NONE and "backbone" in mutation.key else text
    return None if value in interval(at_least) else f"ran outside of {text}"


def _same(held: Any, asked: Any) -> bool:
    if isinstance(asked, list) and isinstance(held, list) and len(asked) == len(held):
        return all(map(_same, held, asked))
    if isinstance(asked, str):
        asked = {"yes": True, "no": False}.get(asked, asked)
        with contextlib.suppress(ValueError):
            asked = type(held)(asked) if isinstance(held, int | float) else asked  # 1e-3 is a number
    return str(held) == str(asked) or (asked in ({}, []) and not held) or held == asked


def fuzz(count: int, seed: int, shards: Path, folder: Path, say: Any = None) -> tuple[Counter[str], list[str]]:
    """How many runs were right, refused, or fell short; and those that did, in words."""
    rng, counts, short = random.Random(seed), Counter[str](), []
    bases: dict[tuple[str, str], dict[str, Any]] = {}
    for number in range(count):
        task, model = rng.choice(list(TASKS)), rng.choice(MODELS)
        if (task, model) not in bases:
            bases[task, model] = resolved(task, model, shards, folder)
        config, mutation = mutate(bases[task, model], rng)
        code, line, held = attempt(task, config, folder)
        why = shortcoming(code, line, held, whole(config), mutation)
        if os.environ.get("FUZZ_SHOW") and not why:
            print(number, task, model, mutation, "RAN" if code == 0 else line, flush=True)
        counts["fell short" if why else "right" if code == 0 else "refused"] += 1
        if why:
            short.append(f"{number} {task} {model}: {mutation}: {why}")
            if say:
                say(short[-1])
    return counts, short


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        prepare.demo(f"{name}/shards", train=24, validation=20, test=10, samples_per_shard=9)
        total, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
        found, _ = fuzz(total, seed, Path(name) / "shards", Path(name), lambda text: print(text, flush=True))
    print(dict(found))
