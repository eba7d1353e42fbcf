"""One run: a command, the folder that it fills, and the runs that must be there before it."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunSpec:
    """A command of ``dinomamba``, or of another module, with what it needs and leaves.

    Args:
        name: MODEL-TASK, as the logger calls it.
        verb: fit, validate or test.
        configs: files after ``-c``, by the names that :func:`configs.find` knows, in order.
        flags: what follows them.
        folder: what it fills.
        needs: runs that must have ended well before it.
        threads: OMP_NUM_THREADS; 0 leaves it to the environment.
        program: the module that is run.
        marker: the file in ``folder`` that says that it ended well.
        log: the file in ``folder`` that takes its output; None shows it.
        lacks: what is wrong, where the run cannot be started.
        sources: files that it is made from; it is made again where one is newer than its marker.
    """

    name: str
    verb: str
    configs: tuple[str, ...]
    flags: tuple[str, ...]
    folder: Path
    needs: tuple["RunSpec", ...] = ()
    threads: int = 0
    program: str = "cli"
    marker: str = ".done"
    log: str | None = "log.txt"
    lacks: str = ""
    sources: tuple[Path, ...] = ()

    @property
    def done(self) -> Path:
        """The file that says that it ended well."""
        return self.folder / self.marker

    @property
    def finished(self) -> bool:
        """Whether it ended well, now or at an earlier time, after all that it was made from."""
        if not self.done.is_file() or not all(need.finished for need in self.needs):
            return False
        made = self.done.stat().st_mtime_ns
        before = [need.done for need in self.needs] + [path for path in self.sources if path.is_file()]
        return all(path.stat().st_mtime_ns <= made for path in before)

    def arguments(self, launched: bool) -> list[str]:
        """What follows the program's name; what trains under a launcher resumes what it finds."""
        files = [part for name in self.configs for part in ("-c", name)]
        resume = ["--ckpt_path", "auto"] if launched and self.verb == "fit" else []
        return [self.verb, *files, *self.flags, *resume]

    def resumes(self, launch: Sequence[str] = ()) -> bool:
        """Whether it goes on from what it finds in its folder, where it was started before."""
        return self.verb == "fit" and "--ckpt_path" in self.arguments(bool(self._launched_by(launch)))

    def command(self, launch: Sequence[str] = ()) -> list[str]:
        """The command line, by this interpreter; ``launch`` starts each run of dinomamba, such as ``srun …``."""
        launch = self._launched_by(launch)
        return [*launch, sys.executable, "-m", self.program, *self.arguments(bool(launch))]

    def _launched_by(self, launch: Sequence[str]) -> Sequence[str]:
        """Nothing for other programs, and for what only prints: one process is enough, and its output is read."""
        return launch if self.program == "cli" and "--print_config" not in self.flags else ()

    def shown(self, launch: Sequence[str] = ()) -> str:
        """The same as people would type it."""
        launch = self._launched_by(launch)
        program = ["dinomamba"] if self.program == "cli" else ["python", "-m", self.program]
        threads = f"OMP_NUM_THREADS={self.threads} " if self.threads else ""
        return threads + shlex.join([*launch, *program, *self.arguments(bool(launch))])


def in_order(runs: Iterable[RunSpec]) -> list[RunSpec]:
    """The runs and all that they need, each once and after what it needs."""
    found: dict[RunSpec, None] = {}

    def add(run: RunSpec) -> None:
        for need in run.needs:
            add(need)
        found.setdefault(run)

    for run in runs:
        add(run)
    return list(found)
