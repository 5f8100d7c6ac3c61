"""Always the same backend: for measuring what routing gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router_service.decision import Candidate, Choice, RoutingRequest
from router_service.policies.two_phase import price


@dataclass(frozen=True, slots=True)
class Forced:
    """`forced:<backend>`. Every candidate is priced as two_phase would, for the record; the prices decide nothing."""

    backend: str
    forecasts: bool = False
    prices_reuse: bool = False

    @property
    def name(self) -> str:
        """With the backend in it."""
        return f"forced:{self.backend}"

    def __call__(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Choice:
        """Choose the backend if it is among the candidates, else none."""
        prices = {candidate.name: price(request, candidate) for candidate in candidates}
        if self.backend in prices:
            return Choice(self.backend, prices, f"The policy is {self.name}")
        return Choice("", prices, f"The policy is {self.name}, and {self.backend} is no candidate")
