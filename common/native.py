"""C that stands beside the Python it serves, compiled for this machine when it is first called.

Needs a C compiler ($CC, cc, gcc or clang) once; what it makes is kept in $DINOMAMBA_CACHE, else in the user's cache
folder, under a name that follows from the C with the headers it includes, the flags and the processor. Where there is
none, :func:`library` returns None after one warning, and its callers take the Python they are compared with.
DINOMAMBA_NATIVE=0 has them do so.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
"""None of them changes a result: sums are not reordered, products and sums not fused."""
TUNED = ("-march=native", "-mcpu=native")
"""For the very processor: the first that the compiler takes."""


loaded: list[str] = []
"""Names of the C files whose functions this process has."""


def compiler() -> str | None:
    """The path of a C compiler, or None."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    return next((found for name in names if (found := shutil.which(name))), None)


def _processor() -> str:
    """What code for this very machine may rely on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        told = sorted({x for x in lines if x.startswith(("flags", "Features", "model name"))})
    except OSError:
        told = [platform.processor()]
    return "\n".join([platform.system(), platform.machine(), *told])


def _folder() -> Path:
    """Where libraries are kept: a folder of this user's alone, or a new one for this process."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(os.environ.get("DINOMAMBA_CACHE") or Path(home) / "dinomamba") / "native"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        own = not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()  # Windows has no such numbers
        if own and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # no home, a read-only one, ...
        pass
    return Path(tempfile.mkdtemp(prefix="dinomamba-"))


def _compile(cc: str, source: Path, target: Path, flags: tuple[str, ...]) -> str:
    """Makes the library, aside and then renamed; the compiler's complaint where it cannot."""
    aside = target.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    complaint = ""
    for tuned in (*TUNED, ""):
        command = [cc, *FLAGS, *flags, *([tuned] if tuned else []), "-o", str(aside), str(source), "-lm"]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=300)
        if done.returncode == 0:
            os.replace(aside, target)
            return ""
        complaint = complaint or done.stderr.strip()
    aside.unlink(missing_ok=True)
    return complaint or "it says nothing"


def headers(source: Path) -> list[Path]:
    """The files that a C file includes by ``#include "name"`` from beside it, and those that these include."""
    found: list[Path] = []
    waiting = [source]
    while waiting:
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', waiting.pop().read_text(encoding="utf-8"), re.MULTILINE):
            header = source.with_name(name)
            if header not in found:
                found.append(header)
                waiting.append(header)
    return sorted(found)


def _load(source: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    """From the folder, or compiled into it. OSError with the reason where neither works."""
    text = b"\0".join(path.read_bytes() for path in [source, *headers(source)])
    key = hashlib.sha256("\0".join([*FLAGS, *flags, _processor()]).encode() + text).hexdigest()[:24]
    target = _folder() / f"{source.stem}-{key}.so"
    if target.exists():
        with suppress(OSError):  # a damaged file is made anew
            return _opened(target)
    cc = compiler()
    if reason := "no C compiler is found" if cc is None else _compile(cc, source, target, flags):
        raise OSError(reason)
    return _opened(target)


def _opened(target: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(target), winmode=0)  # on Windows: the compiler's own libraries are found by PATH


@cache
def library(source: Path, *flags: str) -> ctypes.CDLL | None:
    """The functions of a C file, or None where they cannot be had; calling them releases the GIL.

    Args:
        source: the C file.
        flags: for the compiler, beside FLAGS.
    """
    if os.environ.get("DINOMAMBA_NATIVE") == "0":
        return None
    try:
        found = _load(source, flags)
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"{source.name} cannot be compiled, and slower Python takes its place: {error}. Install a C compiler or "
            "name it in CC; DINOMAMBA_NATIVE=0 silences this",
            stacklevel=2,
        )
        return None
    loaded.append(source.name)
    return found
