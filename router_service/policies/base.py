"""The plug for policies: one callable from a request and its candidates to a choice."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from router_service.decision import Candidate, Choice, RoutingRequest


class Policy(Protocol):
    """Pure apart from the random generator that breaks ties, so a dry run is just a call."""

    @property
    def name(self) -> str:
        """As a request or the configuration names it."""

    @property
    def forecasts(self) -> bool:
        """It wants candidates with `load`."""

    @property
    def prices_reuse(self) -> bool:
        """The lowest `score_s` wins, and a score never falls when the tokens to prefill grow. Then a candidate whose
        best case loses to another's worst case need not be probed."""

    def __call__(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Choice:
        """Choose among at least one candidate."""


def lowest(values: Mapping[str, float], rng: random.Random) -> tuple[str, list[str]]:
    """The name with the lowest value, ties broken at random, and every name that ties with it."""
    least = min(values.values())
    tied = [name for name, value in values.items() if value == least]
    return (tied[0] if len(tied) == 1 else rng.choice(tied)), tied
