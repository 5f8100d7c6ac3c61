"""Numbers with an allowed range, as fields of frozen dataclasses, and the one-line form in which people write them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar

MOST_TOKENS = 1 << 20
"""Of a prompt, and of an answer."""

T = TypeVar("T")
_RANGE = "range"


class BadScenario(ValueError):
    """Nothing can be played like that; the message says what is wrong and what is allowed, in one line."""

    def __init__(self, message: str, option: str = "") -> None:
        super().__init__(message)
        self.option = option
        """Name of the one in `ScenarioOptions` that is to blame; empty for none."""


def bounded(low: float, high: float, *, default: Any = MISSING) -> Any:
    """A field of `Bounded`, an int or a float from `low` to `high`, both allowed."""
    return field(default=default, metadata={_RANGE: (low, high)})


class Bounded:
    """A frozen dataclass that refuses values out of range. Raises `BadScenario`."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            if _RANGE in each.metadata:
                check(f"{type(self).__name__.lower()}: {each.name}", getattr(self, each.name), each)


def check(what: str, value: float, each: Field[Any]) -> None:
    """Raise `BadScenario` unless the value is in the field's range, and whole where that is asked for."""
    low, high = each.metadata[_RANGE]
    whole = each.type == "int"
    if not low <= value <= high or (whole and value != int(value)):
        raise BadScenario(
            f"{what} is {value:g}; give {'a whole number' if whole else 'a number'} from {low:g} to {high:g}"
        )


def parse(what: str, text: str, kinds: Mapping[str, type[T]]) -> T:
    """One of `kinds` from "kind", "kind:value" or "kind:name=value,name=value".

    `what` it is for, in messages, such as "arrivals". Raises `BadScenario` that names the value and what is allowed.
    """
    name, _, rest = text.partition(":")
    kind = kinds.get(name)
    if kind is None:
        raise BadScenario(
            f"{what} {text!r} are of no known kind; use one of {', '.join(usage(*each) for each in kinds.items())}"
        )
    known = {each.name: each for each in fields(kind) if _RANGE in each.metadata}  # type: ignore[arg-type]
    first = next(iter(known), "")
    values: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        key, equals, number = part.partition("=")
        if not equals:
            key, number = first, part
        if key not in known or key in values:
            raise BadScenario(f"{what} {text!r}: {part!r} is not expected there; write {usage(name, kind)}")
        values[key] = _number(f"{what} {text!r}: {key}", number, known[key])
    missing = [key for key, each in known.items() if each.default is MISSING and key not in values]
    if missing:
        raise BadScenario(f"{what} {text!r}: {', '.join(missing)} is missing; write {usage(name, kind)}")
    return kind(**values)


def usage(name: str, kind: type[Any]) -> str:
    """How to write one: "gamma:rate=...,cv=...", with defaults where there are some."""
    known = [each for each in fields(kind) if _RANGE in each.metadata]
    shown = ",".join(f"{each.name}={'...' if each.default is MISSING else f'{each.default:g}'}" for each in known)
    return f"{name}:{shown}" if shown else name


def _number(what: str, text: str, each: Field[Any]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        low, high = each.metadata[_RANGE]
        raise BadScenario(f"{what} is {text!r}; give a number from {low:g} to {high:g}")
    check(what, value, each)
    return int(value) if each.type == "int" else value
