"""Checkpoint files: written aside, flushed, renamed; the newest whole one is found again."""

import logging
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from common.files import written_aside

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised when an older version could not resume from what this one writes."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes ``.NAME.PID`` beside the target, flushes it to the disk, then renames it: a reader never sees a part."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """OSError, naming file and cause, where it could not be written; what was there before stays."""
        target = Path(path)
        try:
            with written_aside(target) as aside, aside.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            _flush_folder(target.parent)
        except (OSError, RuntimeError) as error:  # torch's writer wraps a full disk in a RuntimeError
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise OSError(
                f"checkpoint {target} could not be written ({cause}); the one before it is untouched"
            ) from error


def _flush_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fault(path: Path) -> str | None:
    """What keeps a file from being resumed from, in words; None where nothing does."""
    return _examine(path)[1]


def _examine(path: Path) -> tuple[int, str | None]:
    """The step a checkpoint stands at, and its fault."""
    try:
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:
                return -1, f"its member {damaged} is damaged"
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, zipfile.BadZipFile) as error:
        return -1, f"it is no whole checkpoint ({error})"
    except Exception as error:  # the unpickler raises many types
        return -1, f"it cannot be read as plain data ({type(error).__name__})"
    if not isinstance(content, dict) or "pytorch-lightning_version" not in content:
        return -1, "it is no checkpoint of a run"
    if content.get("dinomamba_format", 0) > FORMAT:
        return -1, (
            f"it is of format {content['dinomamba_format']} and this version of dinomamba reads up to {FORMAT}; "
            "install the version that wrote it"
        )
    return int(content["global_step"]), None


def newest(folder: Path) -> Path | None:
    """``last.ckpt`` where it is whole, else the whole checkpoint that got furthest; others with a message.

    No clock is asked: it may have been put back between two checkpoints.
    """
    last = folder / "last.ckpt"
    found: list[tuple[int, Path]] = []
    for path in sorted(folder.glob("*.ckpt"), key=lambda p: p != last):
        step, why = _examine(path)
        if why is not None:
            logger.warning("passing over %s: %s", path, why)
        elif path == last:
            return path
        else:
            found.append((step, path))
    return max(found, default=(0, None))[1]


def link(source: Path, target: Path) -> None:
    """Another name for a file, put in place in one step; a copy where the file system has no links."""
    with written_aside(target) as aside:
        aside.unlink(missing_ok=True)
        try:
            os.link(source, aside)
        except OSError:
            aside.write_bytes(source.read_bytes())
