"""Checkpoint files: written aside, flushed, renamed; the newest whole one is found again."""

import logging
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised when an older version could not resume from what this one writes."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes ``.NAME.PID`` beside the target, flushes it to the disk, then renames it: a reader never sees a part."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """OSError, naming file and cause, where it could not be written; what was there before stays."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with aside.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(target)
            _flush_folder(target.parent)
        except (OSError, RuntimeError) as error:  # torch's writer wraps a full disk in a RuntimeError
            aside.unlink(missing_ok=True)
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise OSError(
                f"checkpoint {target} could not be written ({cause}); the one before it is untouched"
            ) from error


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fault(path: Path) -> str | None:
    """What keeps a file from being resumed from, in words; None where nothing does."""
    try:
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:
                return f"its member {damaged} is damaged"
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, zipfile.BadZipFile) as error:
        return f"it is no whole checkpoint ({error})"
    except Exception as error:  # the unpickler raises many types
        return f"it cannot be read ({type(error).__name__})"
    if not isinstance(content, dict) or "pytorch-lightning_version" not in content:
        return "it is no checkpoint of a run"
    if content.get("dinomamba_format", 0) > FORMAT:
        return (
            f"it is of format {content['dinomamba_format']} and this version of dinomamba reads up to {FORMAT}; "
            "install the version that wrote it"
        )
    return None


def newest(folder: Path) -> Path | None:
    """The newest checkpoint under ``folder`` that is whole; others are passed over with a message."""
    for path in sorted(folder.glob("*.ckpt"), key=lambda p: p.stat().st_mtime_ns, reverse=True):
        why = fault(path)
        if why is None:
            return path
        logger.warning("passing over %s: %s", path, why)
    return None


def link(source: Path, target: Path) -> None:
    """Another name for a file, put in place in one step; a copy where the file system has no links."""
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    try:
        os.link(source, aside)
    except OSError:
        aside.write_bytes(source.read_bytes())
    aside.replace(target)
