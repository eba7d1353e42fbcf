"""Checks of what a YAML file says, made of smaller ones. Each takes a value and its key.

ValueError of one line: the key, what was found, what is allowed.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

Check = Callable[[Any, str], None]


def refuse(key: str, value: Any, allowed: str) -> NoReturn:
    """The error."""
    found = json.dumps(value, ensure_ascii=False, default=str)
    raise ValueError(f"{key}: {found if len(found) <= 100 else found[:100] + ' …'}; allowed: {allowed}")


def anything(value: Any, key: str) -> None:
    """No check."""


def text(value: Any, key: str) -> None:
    """Words that are not empty."""
    if not isinstance(value, str) or not value.strip():
        refuse(key, value, "text")


def like(pattern: str, allowed: str) -> Check:
    """Text of a pattern."""

    def check(value: Any, key: str) -> None:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            refuse(key, value, allowed)

    return check


def flag(value: Any, key: str) -> None:
    """True or false."""
    if not isinstance(value, bool):
        refuse(key, value, "true, false")


def one_of(names: Collection[str]) -> Check:
    """One of some names."""

    def check(value: Any, key: str) -> None:
        if not isinstance(value, str) or value not in names:
            refuse(key, value, ", ".join(names) or "none")

    return check


def number(least: float = -math.inf, most: float = math.inf, whole: bool = False) -> Check:
    """A number between two others, both included. A quoted one is text, and so is 1e-3 without a point."""

    def check(value: Any, key: str) -> None:
        kind = int if whole else int | float
        if not isinstance(value, kind) or isinstance(value, bool) or not least <= value <= most or math.isinf(value):
            what = "a whole number" if whole else "a number"
            above = "" if least == -math.inf else f" from {least}" if most < math.inf else f", {least} or more"
            refuse(key, value, f"{what}{above}{f' to {most}' if most < math.inf else ''}")

    return check


def null_or(inner: Check) -> Check:
    """Nothing, or what another check takes."""

    def check(value: Any, key: str) -> None:
        if value is not None:
            inner(value, key)

    return check


def either(kind: type, inner: Check, other: Check) -> Check:
    """What one check takes where it is of a kind, else what another one takes."""

    def check(value: Any, key: str) -> None:
        (inner if isinstance(value, kind) else other)(value, key)

    return check


def list_of(inner: Check, least: int = 0) -> Check:
    """A list of what another check takes, each once."""

    def check(value: Any, key: str) -> None:
        if not isinstance(value, list):
            refuse(key, value, "a list")
        if len(value) < least:
            refuse(key, value, f"a list of {least} or more")
        for at, item in enumerate(value):
            inner(item, f"{key}.{at}")
            if item in value[:at]:
                refuse(f"{key}.{at}", item, "each once")

    return check


def by(names: Check, inner: Check) -> Check:
    """Keys that a check takes, with values that another one takes."""

    def check(value: Any, key: str) -> None:
        for name, item in _mapping(value, key).items():
            names(name, f"a key of {key}")
            inner(item, f"{key}.{name}")

    return check


def keys(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Certain keys, each with its check."""
    known = {**required, **(optional or {}), **required}

    def check(value: Any, key: str) -> None:
        for name in _mapping(value, key):
            if name not in known:
                refuse(f"a key of {key}" if key else "a key", name, ", ".join(known))
        for name in required:
            if name not in value:
                raise ValueError(f"{key or 'the file'}: the key {name} is missing")
        for name, item in value.items():
            known[name](item, f"{key}.{name}" if key else name)

    return check


def _mapping(value: Any, key: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        refuse(key or "the file", value, "keys and values")
    return value
