"""What happens to backends, as people write it."""

from __future__ import annotations

import math

from phaseroute.scenarios.bounds import BadScenario
from phaseroute.scenarios.planned import Incident, IncidentKind

LATEST_S = 1e9
MOST_FACTOR = 1e3


def parse_incident(kind: IncidentKind, text: str) -> Incident:
    """From "gpu@12.5", or for a slow-down "gpu@12.5:2", with the backend's name, seconds since the start, and how many
    times as long its steps take from then on. Raises `BadScenario` that names the value and the allowed range."""
    slow = kind is IncidentKind.SLOW
    backend, at, when = text.rpartition("@")
    time_text, colon, factor_text = when.partition(":")
    if not (backend and at) or bool(colon) != slow:
        example = "gpu@12.5:2" if slow else "gpu@12.5"
        raise BadScenario(f"{text!r} does not say who and when; write it like {example}")
    at_s = _number(text, "time", time_text, 0.0, LATEST_S)
    factor = _number(text, "factor", factor_text, 1 / MOST_FACTOR, MOST_FACTOR) if slow else 1.0
    return Incident(at_s, backend, kind, factor)


def _number(text: str, what: str, number: str, low: float, high: float) -> float:
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise BadScenario(f"{text!r}: the {what} is {number!r}; give {low:g} to {high:g}")
    return value
