"""Reference files as test parameters: one test id a file, by a glob, from tests/golden or the folder in GOLDEN_DIR."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("GOLDEN_DIR", Path(__file__).parent / "golden"))


def golden_files(pattern: str, without: str = "-"):
    """A decorator that runs a test for each file that matches, as ``path``; without any, the test fails.

    Args:
        pattern: a glob below the folder, such as ``vim*.safetensors`` or ``zoo/mila*.safetensors``.
        without: a glob of those left out.
    """
    paths = sorted(path for path in FOLDER.glob(pattern) if not path.match(without))
    names = ["-".join(path.relative_to(FOLDER).with_suffix("").parts) for path in paths]
    found = [pytest.param(path, id=f"golden-{name}") for path, name in zip(paths, names, strict=True)]
    missing = pytest.param(None, id=f"golden-none-{pattern}")

    def decorate(test):
        return pytest.mark.parametrize("path", found or [missing])(test)

    return decorate


def present(path: Path | None) -> Path:
    assert path is not None, f"no golden file of this kind is in {FOLDER}"
    return path
