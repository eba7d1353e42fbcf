"""Shards from afar: fetched whole through webdataset's openers, kept in a local folder up to a size.

A root is ``https://…``, ``http://…``, ``s3://…``, ``gs://…`` or any other scheme of ``webdataset.gopen``, to which a
shard's name is added; or ``pipe:COMMAND`` in which ``{name}`` stands for the name.
"""

import hashlib
import logging
import os
import random
import re
import select
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from webdataset.gopen import Pipe, gopen

from common.files import written_aside
from datamodules.samples import ShardError
from datamodules.shard_info import user_cache

try:
    import fcntl
except ImportError:  # Windows: one process at a time should fetch there
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

NAME = re.compile(r"[\w.+=@-]+")
INDEX_LIMIT = 64 << 20
CHUNK = 1 << 20


def is_remote(root: str) -> bool:
    """Whether a root is a URL or a pipe and no folder."""
    return re.match(r"(pipe:|[a-z][a-z0-9+]*://)", root) is not None and not root.startswith("file:")


def _speaks(pipe: IO[bytes], stall: float) -> bool:
    """Whether a byte or the end comes within so many seconds; Windows cannot tell, and there one is waited for."""
    try:
        return bool(select.select([pipe], [], [], stall)[0])
    except OSError:
        return True


class ShardCache:
    """A local folder with shards of a remote root.

    A shard is fetched once for all processes of a node, written aside, checked and renamed. Afterwards the shards that
    were used longest ago make room; those that a process still reads go from the folder but stay readable for it.

    Args:
        root: see the module's first lines.
        folder: where to keep them, in a folder for each root; None is in the user's cache.
        max_bytes: of one root's shards. What is being fetched comes on top.
        attempts: how often to try a shard, waiting ``first_wait`` seconds after the first failure and twice as long
            after each further one, give or take a half.
        stall: seconds without a byte after which an attempt has failed.
    """

    def __init__(
        self,
        root: str,
        folder: Path | None,
        max_bytes: int,
        attempts: int = 6,
        first_wait: float = 1.0,
        stall: float = 60.0,
    ) -> None:
        if root.startswith("pipe:") and "{name}" not in root:
            raise ShardError(
                f"data.init_args.root={root!r} is a pipe without {{name}}, which stands for a shard's name in it"
            )
        self.root, self.max_bytes, self.attempts, self.first_wait, self.stall = (
            root, max_bytes, attempts, first_wait, stall,
        )  # fmt: skip
        name = f"{re.sub(r'[^a-zA-Z0-9.-]+', '_', root)[:80]}-{hashlib.sha1(root.encode()).hexdigest()[:8]}"
        self.folder = (folder or user_cache() / "shards") / name

    def url(self, name: str) -> str:
        """Where a file of the root lies. ShardError for a name that could be more than one."""
        if not NAME.fullmatch(name):
            raise ShardError(f"{self.root}: {name!r} is no file name; letters, digits and . _ - + = @ are allowed")
        if self.root.startswith("pipe:"):
            return self.root.replace("{name}", shlex.quote(name))
        return f"{self.root.rstrip('/')}/{name}"

    def index(self, names: tuple[str, ...]) -> str:
        """The text of the first of the files ``names`` that can be had."""
        errors = []
        for name in names:
            try:
                return self._tried(name, partial(self._text, name))
            except ShardError as error:
                errors.append(str(error))
        raise ShardError(
            f"{errors[0]}; remote shards need an index beside them: write it with python -m datamodules.prepare index"
        )

    def _text(self, name: str) -> str:
        return b"".join(self._chunks(name, INDEX_LIMIT)).decode()

    def fetch(self, name: str, check: Callable[[Path], object]) -> Path:
        """A shard's local path; fetched first where it is not there.

        Args:
            check: raises ShardError for a file that is not what it should be, which counts as a failed attempt.
        """
        path = self.folder / name
        with self._locked(name):
            if not path.is_file():
                for left in self.folder.glob(f".{name}.*"):  # by a process that was killed while fetching
                    left.unlink(missing_ok=True)
                self._tried(name, partial(self._download, name, path, check))
                self._make_room(path)
            with suppress(FileNotFoundError):  # another process made room just now
                os.utime(path)
        return path

    def _download(self, name: str, path: Path, check: Callable[[Path], object]) -> None:
        with written_aside(path) as aside:
            with aside.open("wb") as file:
                for chunk in self._chunks(name):
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            check(aside)

    def _chunks(self, name: str, limit: int | None = None) -> Iterator[bytes]:
        """The bytes of a file, as they come. OSError where they stop coming or the opener fails."""
        total = 0
        stream: Any = gopen(self.url(name), "rb")
        try:
            # a pipe that is silent must not hold the run up for ever
            raw: IO[bytes] = stream.stream if isinstance(stream, Pipe) else stream
            while True:
                if isinstance(stream, Pipe) and not _speaks(raw, self.stall):
                    stream.proc.kill()
                    raise OSError(f"no byte in {self.stall:g} s")
                chunk = raw.read1(CHUNK) if hasattr(raw, "read1") else raw.read(CHUNK)  # type: ignore[attr-defined]
                if not chunk:
                    break
                total += len(chunk)
                if limit is not None and total > limit:
                    raise ShardError(f"{self.url(name)} is larger than {limit} bytes")
                yield chunk
        except BaseException:
            if isinstance(stream, Pipe):
                stream.ignore_errors = True
                stream.proc.kill()
            raise
        finally:
            stream.close()  # raises where the opener's command failed

    def _tried(self, name: str, attempt: Callable[[], Any]) -> Any:
        url = self.url(name)
        for number in range(self.attempts):
            try:
                return attempt()
            except (OSError, ShardError, UnicodeDecodeError) as error:
                last = error
            if number + 1 < self.attempts:
                wait = self.first_wait * 2**number * random.uniform(0.5, 1.5)
                logger.warning("%s: attempt %d failed (%s); again in %.1f s", url, number + 1, last, wait)
                time.sleep(wait)
        raise ShardError(f"{url} could not be fetched in {self.attempts} attempts, the last: {last}")

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        locks = self.folder / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / name).open("w", encoding="utf-8") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _make_room(self, keep: Path) -> None:
        with self._locked("room"):
            there = []
            for path in self.folder.glob("*"):
                with suppress(FileNotFoundError):
                    stat = path.stat()
                    if path.is_file() and not path.name.startswith("."):
                        there.append((stat.st_mtime_ns, stat.st_size, path))
            size = sum(one for _, one, _ in there)
            for _, one, path in sorted(there):
                if size <= self.max_bytes:
                    break
                if path != keep:
                    with suppress(PermissionError):  # Windows keeps a file that a process reads
                        path.unlink(missing_ok=True)
                        size -= one
