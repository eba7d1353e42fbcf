"""What is strange about files and samples, by reason: how many, and the first few names."""

from collections.abc import Iterator

SHOWN = 3
"""Names that are kept of each reason."""


class Tally:
    """Counts names by reason, so that what is left out is said in one line a reason and not in one a name."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, list[str]] = {}

    def add(self, reason: str, name: object) -> None:
        """Counts one more.

        Args:
            reason: which they are, as it reads before a number, such as "samples without an image".
            name: of what it is the matter with.
        """
        self._counts[reason] = self._counts.get(reason, 0) + 1
        names = self._first.setdefault(reason, [])
        if len(names) < SHOWN:
            names.append(str(name))

    def join(self, other: "Tally", prefix: str = "") -> None:
        """Adds what another has counted, its names behind ``prefix``."""
        for reason, count in other._counts.items():
            self._counts[reason] = self._counts.get(reason, 0) + count
            names = self._first.setdefault(reason, [])
            names += [prefix + name for name in other._first[reason]][: SHOWN - len(names)]

    def __getitem__(self, reason: str) -> int:
        return self._counts.get(reason, 0)

    def __iter__(self) -> Iterator[str]:
        """A line for each reason: the reason, the count, and the first names as they are written in Python."""
        for reason, count in self._counts.items():
            yield f"{reason}: {count} ({some([*map(repr, self._first[reason])], count)})"


def some(names: list[str], count: int | None = None) -> str:
    """The first of some names, and a sign of more; ``count`` is how many there are, if not all were kept."""
    return ", ".join(names[:SHOWN]) + (", …" if (count or len(names)) > SHOWN else "")
