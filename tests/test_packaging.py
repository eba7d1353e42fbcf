"""What ``pip install .`` takes along is what the program reads, and nothing is left in the checkout."""

import subprocess
import tomllib
from fnmatch import fnmatch

import pytest

from tests.tiny_runs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
OUTSIDE = {"tests", "benchmarks", "docs", "slurm", ".ci"}


def tracked():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no git checkout")
    return [path for path in done.stdout.splitlines() if "/" in path and path.split("/")[0] not in OUTSIDE]


def test_every_folder_is_a_package_that_is_installed():
    included = PROJECT["packages"]["find"]["include"]
    for path in tracked():
        top = path.split("/")[0]
        assert any(fnmatch(top, pattern) for pattern in included), path
        assert (ROOT / top / "__init__.py").is_file(), top


def test_every_file_that_is_no_python_is_package_data():
    for path in tracked():
        top, _, inside = path.partition("/")
        patterns = PROJECT["package-data"].get(top, [])
        depth = [p for p in patterns if p.count("/") == inside.count("/")]
        assert path.endswith(".py") or any(fnmatch(inside, pattern) for pattern in depth), path


def test_every_module_beside_the_packages_is_installed():
    assert sorted(PROJECT["py-modules"]) == sorted(path.stem for path in ROOT.glob("*.py"))
