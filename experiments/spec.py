"""What ``paper.yaml`` says: data sets, tasks, models and targets."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from analysis.targets import Target
from experiments import paper

PATH = Path(__file__).with_name("paper.yaml")
TARGET_KEYS = ("title", "kind", "tasks", "models")


@cache
def content() -> dict[str, Any]:
    """The file. ValueError for the first thing in it that is wrong."""
    return paper.load(PATH)


@dataclass(frozen=True)
class Task:
    """What a run MODEL-TASK does.

    Args:
        name: the task, as in the run's name.
        config: its YAML in configs/task.
        verb: subcommand of dinomamba.
        data: ``images``, ``masks``, ``robustness``, ``held_out``, ``label_maps`` or ``objects``; which YAML in
            configs/data that is depends on the data set.
        overlay: its YAML in configs/paper/DATA, where there is one.
        needs_probe: the task whose probe it takes on to other images.
        tests_probe: the task whose probe it evaluates.
        prints_config: whether it only says what all its settings are, into config.yaml; without data or weights.
    """

    name: str
    config: str
    verb: str
    data: str
    overlay: str
    needs_probe: str | None = None
    tests_probe: str | None = None
    prints_config: bool = False


@dataclass(frozen=True)
class Model:
    """A model.

    Args:
        name: as in the names of its runs.
        backbone: its overlay in configs/backbone.
        method: what pretrains it here (dino, supervised); None leaves it as it was initialised.
        changes: arguments of the backbone in place of the overlay's.
        side: of all its images, in pixels, in place of the data's; of local crops half.
    """

    name: str
    backbone: str
    method: str | None
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    side: int | None = None


def datasets() -> list[str]:
    """What ``--data`` may be."""
    return list(content()["data"])


def task(name: str) -> Task:
    """A task of evaluation."""
    return Task(**{"name": name, "overlay": name} | content()["tasks"][name])


def pretraining(method: str) -> Task:
    """The task ``pretrain`` by a method."""
    return Task(name="pretrain", **content()["methods"][method])


def model(name: str) -> Model:
    """A model of the file, or one of the user's own, which is an overlay's name and is pretrained by DINO."""
    entry = content()["models"].get(name, {})
    method, changes = entry.get("method", "dino"), entry.get("changes", {})
    return Model(name, entry.get("backbone", name), method, changes, entry.get("side"))


def names(target: str) -> list[str]:
    """The targets behind a name: ``paper`` is all of the paper, ``figure4`` its parts figure4a, figure4b, …

    Raises:
        ValueError: there is none of that name.
    """
    known = content()["targets"]
    if target == "paper":
        return [name for part in content()["paper"] for name in names(part)]
    found = [name for name in known if name == target or (name[:-1] == target and name[-1].isalpha())]
    if not found:
        raise ValueError(f"no target {target!r}; there are {', '.join(known)}, figure4 for its parts, and paper")
    return found


def target(name: str, data: str | None = None, models: Sequence[str] = ()) -> Target:
    """A target on a data set, of its own models unless others are named.

    Raises:
        ValueError: the data set is unknown, or the target is not made of it.
    """
    entry = content()["targets"][name]
    data = data or entry.get("default_data", "imagenet")
    if data not in entry["models"]:
        raise ValueError(f"{name}: data={data!r}; allowed: {', '.join(entry['models'])}")
    options = {key: value for key, value in entry.items() if key not in TARGET_KEYS}
    labels = content()["models"]
    chosen = tuple(models or entry["models"][data])
    return Target(name, entry["kind"], entry["title"], data, tuple(entry["tasks"]), chosen, labels, options)


def targets(wanted: Sequence[str], data: str | None = None, models: Sequence[str] = ()) -> list[Target]:
    """The targets behind several names, each once."""
    return [target(name, data, models) for name in dict.fromkeys(name for group in wanted for name in names(group))]


def titles() -> dict[str, str]:
    """Every target's title by its name."""
    return {name: entry["title"] for name, entry in content()["targets"].items()}
