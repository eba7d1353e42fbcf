"""The YAML files that come with the program, and finding one by name."""

from pathlib import Path

ROOT = Path(__file__).parent
"""The folder that holds base.yaml, task/, data/, backbone/, head/, cluster/ and paper/."""


def find(name: str | Path) -> Path:
    """A configuration file: as named from the working folder, else among those of the program.

    ``task/dino.yaml`` and ``configs/task/dino.yaml`` name the same packaged file. A name that is found nowhere comes
    back as it is, for the parser to complain about.
    """
    path = Path(name).expanduser()
    if path.is_file() or path.is_absolute():
        return path
    parts = path.parts[1:] if path.parts[:1] == (ROOT.name,) else path.parts
    packaged = ROOT.joinpath(*parts)
    return packaged if packaged.is_file() else path


def names(folder: str) -> list[str]:
    """What a folder of configurations holds, without the suffix: ``names("backbone")``."""
    return sorted(path.stem for path in (ROOT / folder).glob("*.yaml"))
