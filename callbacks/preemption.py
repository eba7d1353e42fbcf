"""What signals ask of a run: save, have SLURM start it again, stop."""

import os
import signal
import subprocess
import threading
from enum import IntEnum
from types import FrameType
from typing import Any

USR1 = getattr(signal, "SIGUSR1", None)
"""Windows has no such signal."""


class Request(IntEnum):
    """The larger one is the more urgent."""

    NONE = 0
    SAVE = 1
    REQUEUE = 2
    STOP = 3


class Preempted(Exception):
    """The run ended early, with its checkpoint written. ``exit_code`` is the shell's for that signal."""

    def __init__(self, request: Request, what: str) -> None:
        super().__init__(f"{what}; --ckpt_path auto goes on from the last checkpoint")
        self.exit_code = 128 + (signal.SIGTERM if request == Request.STOP or USR1 is None else USR1)


class SignalRequests:
    """Remembers what SIGTERM (stop) and SIGUSR1 (save, and requeue under SLURM) asked for until it is taken.

    A handler only takes the note: training is never interrupted inside a step or between two ranks' exchanges.
    """

    def __init__(self) -> None:
        self._noted = Request.NONE
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """From the main thread; elsewhere Python delivers no signals."""
        if threading.current_thread() is threading.main_thread() and not self._before:
            for number in (signal.SIGTERM, *(() if USR1 is None else (USR1,))):
                self._before[number] = signal.signal(number, self._note)

    def stop_listening(self) -> None:
        """Puts back the handlers that were there."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        asked = Request.STOP if number == signal.SIGTERM else Request.REQUEUE if slurm_job() else Request.SAVE
        self._noted = max(self._noted, asked)

    def take(self) -> Request:
        noted, self._noted = self._noted, Request.NONE
        return noted


def slurm_job() -> str | None:
    """What ``scontrol`` calls the batch job that this process is part of; None outside one."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def requeue() -> str:
    """Has SLURM start this job again; what became of it, in words."""
    job = slurm_job()
    assert job is not None
    try:
        subprocess.run(
            ["scontrol", "requeue", job], check=True, capture_output=True, encoding="utf-8", errors="replace"
        )
    except (OSError, subprocess.CalledProcessError) as error:
        cause = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        return f"SLURM did not requeue job {job} ({cause})"
    return f"SLURM starts job {job} again"
