"""Where a run's files go."""

import itertools
import os
import platform
import time
from pathlib import Path
from typing import IO

from lightning.pytorch import Trainer


def run_folder(trainer: Trainer) -> Path:
    """The logger's folder, or the trainer's root without a logger.

    Not ``trainer.log_dir``: that is a collective call, and would wait for ranks that do not write.
    """
    folder = getattr(trainer.logger, "log_dir", None)
    return Path(folder or trainer.default_root_dir)


def goes_on(trainer: Trainer) -> bool:
    """Whether a run goes on from a checkpoint of its own folder."""
    source = trainer.ckpt_path
    return source is not None and Path(source).resolve().parent == (run_folder(trainer) / "checkpoints").resolve()


def number_aside(folder: Path) -> int:
    """The number under which what another training left in a folder is kept: ``checkpoints-1``, ``results-1.json``."""
    return next(n for n in itertools.count(1) if not (folder / f"checkpoints-{n}").exists())


def claim(folder: Path) -> IO[str] | None:
    """Takes a folder for this process until it ends or closes the returned file.

    Returns:
        None where the system or the file system has no locks. BlockingIOError, naming the holder, where another
        process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl  # not on Windows
    except ImportError:
        return None
    file = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, not shared with forked workers
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise BlockingIOError(
            f"another run is training in {folder} ({holder}): wait for its end, or give this one another "
            "trainer.logger.init_args.name"
        ) from None
    except OSError:
        file.close()
        return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file
