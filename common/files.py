"""Writing files whole: a reader sees the old file or the new one, never a part of it. Reading parts of one."""

import csv
import io
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A hidden name beside ``path`` to write to; renamed to it at the end, removed where an exception ends the block.

    The folder is made where it is missing. The suffix is kept, since some writers go by it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


_seeking = threading.Lock()


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """So many bytes of an open file from ``offset`` on; fewer where it ends before."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    with _seeking:  # Windows reads from where a file stands only
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)


def write_text(path: Path, text: str) -> None:
    """A text file, in UTF-8 and with the line ends that ``text`` has, on every system.

    Of file names in another encoding, the bytes that it lacks are written as escapes.
    """
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")


def write_json(path: Path, value: object) -> None:
    """An indented JSON file."""
    write_text(path, json.dumps(value, indent=1))


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Named arrays."""
    with written_aside(path) as aside:
        np.savez(aside, **arrays)  # type: ignore[arg-type]


def to_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Rows to CSV with a header; ``columns`` are those of the first row unless named, and others are left out."""
    rows = list(rows)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, rows[0].keys() if columns is None else columns, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
