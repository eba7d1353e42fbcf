"""What lies below a folder: symbolic links are followed, and systems' own files told from a user's."""

from collections.abc import Iterator
from pathlib import Path

from datamodules.tally import Tally

LITTER = (
    "thumbs.db", "desktop.ini", "__macosx", "icon\r", "@eadir", "$recycle.bin", "system volume information",
    "lost+found",
)  # fmt: skip
"""Files and folders that systems leave behind, in lower case; hidden ones come on top."""


def is_litter(name: str) -> bool:
    """Whether a file or folder of that name is hidden, such as ``._a.jpg`` or ``.DS_Store``, or a system's own."""
    return name.startswith(".") or name.lower() in LITTER


def folders_below(root: Path, tally: Tally | None = None) -> Iterator[Path]:
    """A folder and all below it but hidden ones, links followed; each under the path that leads to it.

    A link back to a folder that it lies in is not followed, and counted in ``tally``.
    """
    yield from _folders(root, frozenset(), Tally() if tally is None else tally)


def _folders(folder: Path, above: frozenset[tuple[int, int]], tally: Tally) -> Iterator[Path]:
    stat = folder.stat()
    identity = stat.st_dev, stat.st_ino
    if identity in above:
        tally.add("links back to a folder above them, not followed", folder)
        return
    yield folder
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not is_litter(path.name):
            yield from _folders(path, above | {identity}, tally)


def files_below(root: Path, tally: Tally | None = None) -> list[Path]:
    """All files below a folder, links followed, sorted by path; broken links are among them.

    Args:
        root: the folder.
        tally: counts systems' own files, which are left out.
    """
    tally = Tally() if tally is None else tally
    found = []
    for folder in folders_below(root, tally):
        for path in folder.iterdir():
            if is_litter(path.name):
                tally.add("hidden or system files, left out", path.relative_to(root))
            elif not path.is_dir():
                found.append(path)
    return sorted(found)
