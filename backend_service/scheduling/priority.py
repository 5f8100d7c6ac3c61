"""Interactive requests before batch requests."""

from __future__ import annotations

from backend_service.scheduling.base import Independent, Waiting
from service_kit.requests import Priority

DEFAULT_PROMOTE_AFTER_S = 300.0


class InteractiveFirst(Independent):
    """A batch request counts as an interactive one that came `promote_after_s` later: those that come before that
    overtake it, later ones do not."""

    name = "priority"

    def __init__(self, promote_after_s: float = DEFAULT_PROMOTE_AFTER_S) -> None:
        self.promote_batch_after_s = promote_after_s

    def __call__(self, waiting: Waiting) -> float:
        """Due on arrival if interactive, `promote_after_s` later if batch."""
        return self.promote_batch_after_s if waiting.priority is Priority.BATCH else 0.0
