"""First come, first served."""

from __future__ import annotations

from backend_service.scheduling.base import Independent, Waiting


class FirstComeFirstServed(Independent):
    """Order of arrival."""

    name = "fcfs"
    promote_batch_after_s = 0.0

    def __call__(self, waiting: Waiting) -> float:
        """Due on arrival."""
        return 0.0
