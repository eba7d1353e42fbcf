"""A run's folder and what it left there, as every page reads it: results, the record of how it was run, arrays."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

OLD_NAME = re.compile(r"block(\d+)/(?:(head|register)(\d+)/)?(\w+)")


def map_fields(row: dict[str, Any]) -> dict[str, Any]:
    """A row of Binary-AUC with ``block``, ``part``, ``index``, ``kind`` and ``stream``.

    Rows written before these were columns hold them in the map's name alone, and came from the published stream.
    """
    if "kind" in row:
        return row
    match = OLD_NAME.fullmatch(row["map"])
    if match is None:
        fields = {"block": None, "part": None, "index": None, "kind": row["map"]}
    else:
        block, part, index, kind = match.groups()
        fields = {"block": int(block), "part": part, "index": None if index is None else int(index), "kind": kind}
    return row | fields | {"stream": "published"}


@dataclass
class Run:
    """A run's folder and what it left.

    Args:
        folder: RUNS/MODEL-TASK.
        model: its name in the experiments; the folder's name up to the task.
        results: the content of results.json, or of results.partial.json where the run is not complete.
        record: the content of run.json; empty where the file is missing.
    """

    folder: Path
    model: str
    results: dict[str, Any]
    record: dict[str, Any]

    @property
    def complete(self) -> bool:
        """Whether all that was asked for was evaluated."""
        return bool(self.results.get("complete", True))

    @cached_property
    def every_row(self) -> list[dict[str, Any]]:
        """The table's rows; those of maps with their fields."""
        return [map_fields(row) if "map" in row else row for row in self.results["rows"]]

    @property
    def ways(self) -> list[str]:
        """How its maps were scored, the first first; on the grid, where rows are from before there were other ways."""
        return list(dict.fromkeys(row.get("compare", "grid") for row in self.every_row))

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The same; of maps scored in several ways, those of the first."""
        return [row for row in self.every_row if row.get("compare", "grid") == self.ways[0]]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration; empty where the file is missing."""
        path = self.folder / self.record.get("config", "config.yaml")
        return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def maps(
        self, kind: str, part: str | None = None, reading: str | None = None, way: str | None = None
    ) -> list[dict[str, Any]]:
        """Rows of the maps of a kind and part, from the first block to the last; None asks for maps of whole blocks.

        ``reading`` is ``published`` or ``other``, the stream beside it, where a run scored both; None takes the
        published one, and the other where a run read that alone. ``way`` is one of ``ways``; None for the first.
        """
        rows = self.rows if way is None else [row for row in self.every_row if row.get("compare", "grid") == way]
        rows = [row for row in rows if row["kind"] == kind and row["part"] == part]
        for wanted in ("published", "other") if reading is None else (reading,):
            if found := [row for row in rows if row.get("reading", "published") == wanted]:
                return found
        return []

    @cached_property
    def kept_arrays(self) -> dict[str, np.ndarray]:
        """What results.npz holds; nothing where it is missing."""
        path = self.folder / ("results.npz" if self.complete else "results.partial.npz")
        return self.arrays if path.is_file() else {}

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """What results.npz holds. ValueError where it is missing."""
        path = self.folder / ("results.npz" if self.complete else "results.partial.npz")
        if not path.is_file():
            raise ValueError(f"{path} is missing: run it again with --model.init_args.pictures 8")
        with np.load(path) as file:
            return dict(file)


def read_json(path: Path, hint: str) -> Any:
    """A JSON file. ValueError, with ``hint`` on what to do, where it is missing."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: {hint}")
    return json.loads(path.read_text(encoding="utf-8"))


def find_run(folder: Path) -> Run | None:
    """A folder with its complete results, else its partial ones, else None."""
    for name in ("results.json", "results.partial.json"):
        if (folder / name).is_file():
            record = folder / "run.json"
            content = read_json(record, "") if record.is_file() else {}
            return Run(folder, folder.name.rpartition("-")[0], read_json(folder / name, ""), content)
    return None


def complete_run(folder: Path, hint: str, module: str | None = None) -> Run:
    """A folder with complete results of ``module``.

    Raises:
        ValueError: there are none, with ``hint`` on what to do; or another module left them.
    """
    run = find_run(folder)
    if run is None or not run.complete:
        raise ValueError(f"{folder / 'results.json'} is missing: {hint}")
    if module is not None and run.results.get("module") != module:
        found = run.results.get("module")
        raise ValueError(f"{folder / 'results.json'} is a table of {found}, wanted one of {module}")
    return run
