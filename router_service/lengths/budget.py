"""Every answer is as long as it may become."""

from __future__ import annotations

from typing import Any

from router_service.lengths.base import LengthOutcome, LengthQuery


class Budget:
    """max_new_tokens - generated, whatever happened before; what the two_phase score counts on."""

    name = "budget"
    version = 0

    def expected(self, query: LengthQuery) -> float:
        """What max_new_tokens leaves."""
        return float(query.budget_tokens)

    def observe(self, outcome: LengthOutcome) -> None:
        """Learns nothing."""

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def restore(self, state: object) -> bool:
        """There is nothing to know."""
        return False
