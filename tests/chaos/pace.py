"""Keeps load and faults side by side, however fast the machine is."""

from __future__ import annotations

import asyncio

LEAD_FAULTS = 2
"""So many faults the load may be ahead."""


class Pace:
    """Faults are spread evenly over the requests: the one waits for the other."""

    def __init__(self, requests: int, faults: int) -> None:
        self._requests_per_fault = requests / max(1, faults)
        self._faults = faults
        self._started = 0
        self._begun = 0
        self._changed = asyncio.Condition()

    async def request(self) -> None:
        """Wait until the next request may start."""
        async with self._changed:
            index, self._started = self._started, self._started + 1
            self._changed.notify_all()
            due = min(self._faults, int(index / self._requests_per_fault) - LEAD_FAULTS)
            await self._changed.wait_for(lambda: self._begun >= due)

    async def fault(self) -> None:
        """Wait until the next fault is due."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._started >= self._begun * self._requests_per_fault)
            self._begun += 1
            self._changed.notify_all()

    async def end_faults(self) -> None:
        """No fault will come any more."""
        async with self._changed:
            self._begun = self._faults
            self._changed.notify_all()
