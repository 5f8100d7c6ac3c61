"""Requests to come, and what happens to backends meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request. Its prompt begins with a prefix that others may share; the rest is its own."""

    at_s: float
    """When it arrives, since the start of the scenario."""
    prompt_tokens: int
    """At least 2."""
    prefix: int = -1
    """Number of the shared prefix; below 0: it shares nothing."""
    prefix_tokens: int = 0
    """How many of its tokens are that prefix: the first ones, below prompt_tokens. Shorter and longer parts of one
    prefix agree as far as the shorter goes."""
    max_new_tokens: int
    new_tokens: int
    """What the answer comes to, 1 to max_new_tokens. Equal to it: the request ignores the model's end."""
    workload: str = ""
    batch: bool = False
    """Priority: nobody watches the answer come."""
    deadline_s: float | None = None
    """From its arrival."""
    ttft_slo_s: float | None = None
    """From its arrival."""


class IncidentKind(Enum):
    """What can happen to a backend."""

    FAIL = "fail"
    """It is gone: what ran there is lost before or after its first token; it gets no more work."""
    RETURN = "return"
    """It is back, with an empty cache."""
    SLOW = "slow"
    """Every step takes `factor` times as long as at the start."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that happens to a backend at a given time. Only a simulator can play it."""

    at_s: float
    backend: str
    kind: IncidentKind
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A list of requests in order of arrival; the same list for every policy."""

    name: str
    description: str
    """For people, one line."""
    requests: tuple[Planned, ...]
    warm: tuple[int, ...] = ()
    """Shared prefixes that every backend holds before the first arrival, as long as the longest use of them."""
    incidents: tuple[Incident, ...] = ()

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].at_s - self.requests[0].at_s if self.requests else 0.0
