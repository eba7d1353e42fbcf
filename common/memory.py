"""How the process uses memory."""

import ctypes


def keep_freed_memory() -> None:
    """Lets glibc reuse large freed blocks instead of returning them to the system and faulting them in again.

    On the CPU every operation allocates its output, and the page faults cost a good part of a small step's time.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, its largest
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        libc.mallopt(-2, 256 << 20)  # M_TOP_PAD
    except (OSError, AttributeError):  # another C library
        pass
