"""Fewest requests, whatever they cost: the usual baseline."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from router_service.decision import Candidate, Choice, RoutingRequest
from router_service.policies.base import lowest


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The candidate with the fewest active and queued requests. Prices nothing."""

    rng: random.Random
    name: str = "least_loaded"
    forecasts: bool = False
    prices_reuse: bool = False

    def __call__(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Choice:
        """Choose by count."""
        counts = {candidate.name: float(candidate.requests) for candidate in candidates}
        selected, tied = lowest(counts, self.rng)
        many = f"{counts[selected]:.0f} active or queued"
        if len(tied) > 1:
            return Choice(selected, {}, f"{' and '.join(tied)} tie with {many}; {selected} was drawn at random")
        return Choice(selected, {}, f"{selected} has the fewest requests: {many}")
