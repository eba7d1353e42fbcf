"""Renderers by kind: a function that draws a target out of run folders. A new kind is a new file of this package."""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

import analysis
from analysis.targets import Target

Renderer = Callable[[Target, Path], list[Path]]
"""Draws a target out of the runs under a folder, and returns the files it wrote there. ValueError where it cannot."""

_RENDERERS: dict[str, Renderer] = {}


def renderer(kind: str) -> Callable[[Renderer], Renderer]:
    """Registers the function below it for targets of that kind."""

    def register(function: Renderer) -> Renderer:
        _RENDERERS[kind] = function
        return function

    return register


def kinds() -> list[str]:
    """Every kind that a file of this package registers."""
    for module in pkgutil.iter_modules(analysis.__path__):
        importlib.import_module(f"{analysis.__name__}.{module.name}")
    return sorted(_RENDERERS)


def draw(target: Target, runs: Path) -> list[Path]:
    """Draws a target and returns its files. ValueError where none of its runs is there, or nobody knows its kind."""
    known = kinds()
    if target.kind not in known:
        raise ValueError(f"{target.name}: kind={target.kind!r}; allowed: {', '.join(known)}")
    return _RENDERERS[target.kind](target, runs)
