"""What of a JPEG can be told without decoding it: whether its own pixels are there, and where zeros stand in them.

Decoders fill in what a damaged scan lacks and say nothing. A file's segments are walked by their lengths (ITU-T T.81,
annex B), since an EXIF thumbnail is a whole JPEG inside one.
"""

import re

END, SCAN = b"\xff\xd9", b"\xff\xda"
_SEQUENTIAL = (0xC0, 0xC1)
_TABLES, _SCAN = 0xC4, 0xDA
_END_OF_BLOCK = 0
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
"""What ends the pixels of a scan."""
SHORTEST = 64
"""Bytes of a run of zeros."""


def first_scan(data: bytes) -> int | None:
    """Where the file's own first scan starts, past thumbnails; None where it is cut off before."""
    found = _segments(data)
    return found[-1][1] if found and found[-1][0] == _SCAN else None


def is_whole(data: bytes) -> bool:
    """Whether the file's own pixels end as they should; without that they may still all be there."""
    scan = first_scan(data)
    return scan is not None and data.rfind(END) > max(scan, data.rfind(SCAN))


def zeros(data: bytes) -> int | None:
    """Where zeros were written over pixels, as by a broken disk or copy: the first one's offset; None for nowhere.

    A run of zeros counts where nothing else can be meant by it: where it ends the file, and in a sequential JPEG of one
    scan unless all its Huffman tables let zeros say "nothing here", as optimized ones of flat pictures do.
    """
    segments = _segments(data)
    if not segments or segments[-1][0] != _SCAN:
        return None
    scan = segments[-1][1]
    if data.rfind(END) < scan:
        tail = len(data) - len(data.rstrip(b"\0"))
        return len(data) - tail if tail >= SHORTEST else None
    frames = [at for marker, at in segments if marker in _SEQUENTIAL]
    symbols = [symbol for marker, at in segments if marker == _TABLES for symbol in _zero_symbols(data, at)]
    if not frames or data[frames[0] + 9] != data[scan + 4] or all(symbol == _END_OF_BLOCK for symbol in symbols):
        return None
    at = data.find(bytes(SHORTEST), scan)
    if at < 0:
        return None
    end = _MARKER.search(data, scan + 2)
    return at if end is None or at < end.start() else None


def _segments(data: bytes) -> list[tuple[int, int]]:
    """(marker, where it stands) of each segment up to the first scan, or to where they break off."""
    found: list[tuple[int, int]] = []
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # filling
            at += 1
            continue
        found.append((marker, at))
        if marker == _SCAN:
            break
        at += 2 if marker == 1 or 0xD0 <= marker <= 0xD8 else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return found


def _zero_symbols(data: bytes, at: int) -> list[int]:
    """Of each Huffman table for AC coefficients in a segment, the symbol whose code is nothing but zeros."""
    end, found = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big"), []
    at += 4
    while at + 17 < end:
        if data[at] >> 4 == 1:
            found.append(data[at + 17])
        at += 17 + sum(data[at + 1 : at + 17])
    return found
