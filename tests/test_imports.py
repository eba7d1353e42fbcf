"""Imports run one way, as the contract says."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("backbones", "metrics", "datamodules", "lightning_modules", "callbacks", "analysis")
ALLOWED = {
    "backbones": {"native"},
    "metrics": set(),
    "datamodules": {"native"},
    "lightning_modules": {"backbones", "metrics"},
    "callbacks": {"backbones", "metrics", "native"},
    "analysis": {"backbones", "metrics"},
}
FOREIGN = {  # what a package must stay free of
    "backbones": {"lightning", "torchmetrics", "webdataset", "albumentations", "jsonargparse"},
    "metrics": {"lightning", "timm", "webdataset", "albumentations", "jsonargparse"},
}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        names = set(imported(path))
        ours = (names & {*PACKAGES, "cli", "native", "tests"}) - {package}
        assert ours <= ALLOWED[package], f"{path.relative_to(ROOT)} imports {ours - ALLOWED[package]}"
        assert not names & FOREIGN.get(package, set()), f"{path.relative_to(ROOT)} imports {names & FOREIGN[package]}"


def test_packages_are_flat():
    for package in PACKAGES:
        deep = [p for p in (ROOT / package).rglob("*.py") if len(p.relative_to(ROOT).parts) > 3]
        assert not deep
