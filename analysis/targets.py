"""A table or figure: what it shows of which models' runs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.runs import Run, find_run


@dataclass(frozen=True)
class Target:
    """One table or figure on one data set.

    Args:
        name: table1, figure4a, …; its files are called so.
        kind: which renderer draws it.
        title: the page's heading.
        data: ``imagenet``, or ``demo`` for the embedded scenes.
        tasks: a run is MODEL-TASK; what is drawn are the runs of the first task. None where nothing is run for it.
        models: in the order in which they are shown.
        labels: model -> ``label``, ``mixer`` and ``training``.
        options: what the kind asks for besides.
    """

    name: str
    kind: str
    title: str
    data: str
    tasks: tuple[str, ...]
    models: tuple[str, ...]
    labels: dict[str, dict[str, str]]
    options: dict[str, Any] = field(default_factory=dict)

    def label(self, model: str) -> dict[str, str]:
        """``label``, ``mixer`` and ``training`` of a model; a model of the user's own is called by its name."""
        return self.labels.get(model, {"label": model, "mixer": "own", "training": "own"})

    @property
    def seeds(self) -> list[int] | None:
        """The seeds that it is made with, on its data; None where it has none of its own."""
        seeds = self.options.get("seeds")
        return seeds.get(self.data) if isinstance(seeds, dict) else seeds

    def folders(self, runs: Path) -> dict[int | None, Path]:
        """Where its runs lie under the folder ``runs``: by seed, where it is made with several; else with None."""
        return {None: runs} if self.seeds is None else {seed: runs / f"seed{seed}" for seed in self.seeds}

    def found(self, runs: Path) -> list[Run]:
        """Its models' runs in the folder ``runs``, as far as they are there."""
        if not self.tasks:
            return []
        every = (find_run(runs / f"{model}-{self.tasks[0]}") for model in self.models)
        return [run for run in every if run is not None]

    def some(self, runs: Path) -> list[Run]:
        """The same. ValueError where there is none."""
        found = self.found(runs)
        if not found:
            wanted = ", ".join(f"{model}-{self.tasks[0]}" for model in self.models)
            raise ValueError(f"{self.name}: none of its runs is under {runs}: {wanted}")
        return found
