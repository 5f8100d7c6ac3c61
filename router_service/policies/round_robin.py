"""Turn by turn, whatever waits: the simplest baseline."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from router_service.decision import Candidate, Choice, RoutingRequest
from router_service.policies.base import lowest


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """The candidate whose last turn is longest ago.

    Keeps no counter of its own: turns come with the candidates, so a dry run takes none.
    """

    rng: random.Random
    name: str = "round_robin"
    forecasts: bool = False
    prices_reuse: bool = False

    def __call__(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Choice:
        """Choose by turn."""
        turns = {candidate.name: float(candidate.last_turn) for candidate in candidates}
        selected, tied = lowest(turns, self.rng)
        if len(tied) > 1:
            return Choice(selected, {}, f"{' and '.join(tied)} had no turn yet; {selected} was drawn at random")
        return Choice(selected, {}, f"it is {selected}'s turn")
