"""How many new tokens a request will still make: one file a way to tell."""

from __future__ import annotations

from collections.abc import Callable

from router_service.lengths.base import LengthEstimator, LengthOutcome, LengthQuery
from router_service.lengths.budget import Budget
from router_service.lengths.file import LengthFile
from router_service.lengths.history import History
from router_service.lengths.ratio import Ratio
from service_kit.faults import InvalidRequest

__all__ = ["LENGTH_POLICIES", "LengthEstimator", "LengthFile", "LengthOutcome", "LengthQuery", "make_lengths"]

LENGTH_POLICIES: dict[str, Callable[[], LengthEstimator]] = {
    History.name: History,
    Ratio.name: Ratio,
    Budget.name: Budget,
}
"""By name; the first is the default."""


def make_lengths(name: str) -> LengthEstimator:
    """An estimator that has seen nothing yet. Raises `InvalidRequest` that lists what there is."""
    if name not in LENGTH_POLICIES:
        raise InvalidRequest(
            "output_lengths", f"{name!r} is no way to estimate them; use one of {', '.join(LENGTH_POLICIES)}"
        )
    return LENGTH_POLICIES[name]()
