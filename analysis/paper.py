"""Tables and figures of the paper out of run folders: ``python -m analysis.paper draw TARGET --runs RUNS``.

What a target is made of is in ``paper.yaml``; runs are folders RUNS/MODEL-TASK, as the Makefile makes them. Results go
to RUNS/TARGET.*; ``python -m analysis.paper runs TARGET`` lists the runs a target needs.
"""

import argparse
import html
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SPEC = Path(__file__).with_name("paper.yaml")
DATA = ("imagenet", "demo")


@dataclass
class Run:
    """A run's folder and what it left."""

    folder: Path
    model: str
    table: dict[str, Any]
    record: dict[str, Any]

    @property
    def complete(self) -> bool:
        return bool(self.table["complete"])

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.table["rows"]


def read_run(runs: Path, model: str, task: str) -> Run | None:
    """RUNS/MODEL-TASK with its complete results, else its partial ones, else None."""
    folder = runs / f"{model}-{task}"
    for name in ("results.json", "results.partial.json"):
        if (folder / name).is_file():
            record = folder / "run.json"
            content = json.loads(record.read_text()) if record.is_file() else {}
            return Run(folder, model, json.loads((folder / name).read_text()), content)
    return None


@dataclass
class Target:
    """One table or figure of ``paper.yaml`` on one data set."""

    name: str
    spec: dict[str, Any]
    data: str
    models: list[str]
    labels: dict[str, dict[str, str]]

    def label(self, model: str) -> dict[str, str]:
        """``label``, ``mixer`` and ``training`` of a model; a model of the user's own is called by its name."""
        return self.labels.get(model, {"label": model, "mixer": "own", "training": "own"})

    def tasks(self) -> list[str]:
        return [self.spec["task"], *([self.spec["probe"]] if "probe" in self.spec else [])]

    def found(self, runs: Path) -> list[Run]:
        """Its models' runs, as far as they are there."""
        return [run for model in self.models if (run := read_run(runs, model, self.spec["task"])) is not None]


def spec() -> dict[str, Any]:
    return yaml.safe_load(SPEC.read_text())


def targets(name: str, data: str, models: list[str] | None = None) -> list[Target]:
    """The target called ``name``, or its parts (figure4: figure4a … figure4f), with other models if any are named."""
    content = spec()
    names = [n for n in content["targets"] if n == name or (n[:-1] == name and n[-1].isalpha())]
    if not names:
        raise ValueError(f"no target {name!r}; there are {', '.join(content['targets'])}, and figure4 for its parts")
    return [
        Target(n, content["targets"][n], data, models or content["targets"][n]["models"][data], content["models"])
        for n in names
    ]


def draw(target: Target, runs: Path) -> list[Path]:
    """Makes a target's files and returns them. ValueError where none of its runs is there."""
    from analysis import figures, maps, rank, tables

    kind = target.spec["kind"]
    if kind in ("probe", "robustness"):
        return tables.draw(target, runs)
    if not target.found(runs):
        wanted = ", ".join(f"{model}-{target.spec['task']}" for model in target.models)
        raise ValueError(f"{target.name}: none of its runs is under {runs}: {wanted}")
    if kind == "ranks":
        return rank.main([run.folder for run in target.found(runs)], runs)
    if kind in ("maps", "components"):
        return maps.draw(target, runs)
    return figures.draw(target, runs)


def write_index(runs: Path) -> None:
    """RUNS/index.html: links to the pages of the targets that are there."""
    from analysis.pages import page
    from common.files import write_text

    there = [(n, t["title"]) for n, t in spec()["targets"].items() if (runs / f"{n}.html").is_file()]
    links = "".join(f'<li><a href="{name}.html">{html.escape(title)}</a></li>' for name, title in there)
    write_text(runs / "index.html", page("Tables and figures", f"<ul>{links}</ul>"))


def main(args: list[str]) -> None:
    """See the module's first lines."""
    parser = argparse.ArgumentParser(prog="python -m analysis.paper", description=__doc__)
    parser.add_argument("command", choices=("runs", "draw"))
    parser.add_argument("target", nargs="+", help="table1, figure4, …")
    parser.add_argument("--data", choices=DATA, default="imagenet")
    parser.add_argument("--models", nargs="*", default=[], help="instead of those of paper.yaml")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    given = parser.parse_args(args)
    chosen = [t for name in given.target for t in targets(name, given.data, given.models or None)]
    if given.command == "runs":
        print(*dict.fromkeys(f"{model}-{task}" for t in chosen for task in t.tasks() for model in t.models))
        return
    failed: list[str] = []
    for target in chosen:
        try:
            for path in draw(target, given.runs):
                print(path)
        except ValueError as error:  # the others are drawn all the same
            failed.append(str(error))
    write_index(given.runs)
    if failed:
        raise ValueError("; ".join(failed))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
