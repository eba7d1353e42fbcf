"""Numbers of the paper, or of its authors' release, and which row of ours each stands beside."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

PAPER = "paper"
OTHERS = ("model", "part", "value", "source", "inferred", "note", "sizes")
"""Keys of an entry that no row is matched by."""


@dataclass(frozen=True)
class Published:
    """One number.

    Args:
        model: whose.
        value: in percent.
        source: ``paper``, or where else it is printed.
        fields: what a row must have for the number to be its own: ``n_last_blocks``, ``lr``, ``set``, …
        part: of the table, where it has several.
        inferred: whether that it belongs there is our inference, which the paper does not say.
        note: what stands beside it.
        sizes: the paper's: ``width``, and ``backbone`` and ``head`` in millions of parameters.
    """

    model: str
    value: float
    source: str
    fields: Mapping[str, Any]
    part: str | None = None
    inferred: bool = False
    note: str = ""
    sizes: Mapping[str, float] = field(default_factory=dict)

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has all its fields."""
        return all(key in row and row[key] == value for key, value in self.fields.items())


def read(entries: Iterable[Mapping[str, Any]]) -> list[Published]:
    """``published`` of a target. An entry with ``by: FIELD`` and ``values`` is one number a value of it."""
    found = []
    for entry in entries:
        many = entry.get("values", {None: entry.get("value")})
        for key, value in many.items():
            one = {k: v for k, v in entry.items() if k not in ("by", "values", "notes")}
            one |= {"value": float(value), "note": entry.get("notes", {}).get(key, entry.get("note", ""))}
            one |= {} if key is None else {entry["by"]: key}
            fields = {k: v for k, v in one.items() if k not in OTHERS}
            found.append(Published(fields=fields, **{k: v for k, v in one.items() if k in OTHERS}))
    return found


@dataclass(frozen=True)
class Cell:
    """What is printed of one thing: the paper's number, and those of others beside it."""

    first: Published
    others: tuple[Published, ...] = ()

    def columns(self) -> dict[str, Any]:
        """``published`` with its mark, sizes and remark, as a row holds them."""
        remarks = [self.first.note, *(f"{other.source}: {other.value:.1f}" for other in self.others)]
        sizes = {f"paper_{key}": value for key, value in self.first.sizes.items()}
        return {
            "published": self.first.value,
            "source": self.first.source,
            "inferred": self.first.inferred,
            "remark": "; ".join(filter(None, remarks)) or None,
        } | sizes


def cells(numbers: Iterable[Published]) -> list[Cell]:
    """Numbers of the same model, part and fields together, in order; the paper's stands for them."""
    groups: dict[tuple[Any, ...], list[Published]] = {}
    for number in numbers:
        groups.setdefault((number.model, number.part, *sorted(number.fields.items())), []).append(number)
    ordered = (sorted(group, key=lambda number: number.source != PAPER) for group in groups.values())
    return [Cell(first, tuple(others)) for first, *others in ordered]
