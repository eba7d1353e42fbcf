"""Imports run one way, as the contract says: folder by folder, and no circle of files anywhere."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "common": {"dinomamba"},  # whether it is ours
    "backbones": {"common"},
    "heads": {"common"},
    "metrics": {"common"},
    "datamodules": {"common"},
    "lightning_modules": {"common", "backbones", "heads", "metrics"},
    "callbacks": {"common", "backbones", "metrics"},
    "analysis": {"common", "backbones", "metrics"},
    "experiments": {"common", "analysis", "configs"},
}
FOREIGN = {  # what a package must stay free of
    "common": {"lightning", "timm", "torchmetrics", "webdataset", "albumentations", "jsonargparse"},
    "backbones": {"lightning", "torchmetrics", "webdataset", "albumentations", "jsonargparse"},
    "heads": {"lightning", "torchmetrics", "webdataset", "albumentations", "jsonargparse"},
    "metrics": {"lightning", "timm", "webdataset", "albumentations", "jsonargparse"},
}
PACKAGES = [name for name in ALLOWED if (ROOT / name / "__init__.py").is_file()]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in [*ROOT.glob("*.py"), *(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))]
}


def imported(path):
    """Modules that a file imports, anywhere in it: ``from a import b`` is a.b where that is a module, else a."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else node.module


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        names = {name.split(".")[0] for name in imported(path)}
        ours = (names & {*ALLOWED, *(p.stem for p in ROOT.glob("*.py")), "tests"}) - {package}
        assert ours <= ALLOWED[package], f"{path.relative_to(ROOT)} imports {ours - ALLOWED[package]}"
        assert not names & FOREIGN.get(package, set()), f"{path.relative_to(ROOT)} imports {names & FOREIGN[package]}"


def test_no_circle_of_files():
    """A package's __init__ gathers its files, which name each other and not the package."""
    graph = {name: {found for found in imported(path) if found in FILES} for name, path in FILES.items()}
    done, path = set(), []

    def walk(name):
        assert name not in path, f"a circle of imports: {' -> '.join([*path[path.index(name) :], name])}"
        if name in done:
            return
        path.append(name)
        for other in sorted(graph[name]):
            walk(other)
        done.add(path.pop())

    for name in graph:
        walk(name)


def test_packages_are_flat():
    for package in PACKAGES:
        deep = [p for p in (ROOT / package).rglob("*.py") if len(p.relative_to(ROOT).parts) > 3]
        assert not deep
