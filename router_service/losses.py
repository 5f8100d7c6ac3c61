"""Who waits to be told that a backend's attempts are to be given up."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from router_service.backend import Backend


class Losses:
    """One future for each that waits. Telling costs nothing where nobody waits, and O(1) where there is no loss."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, defaultdict[str, set[asyncio.Future[str]]]] = defaultdict(
            lambda: defaultdict(set)
        )
        """By backend and incarnation."""

    async def wait(self, backend: Backend, incarnation: str) -> str:
        """Until `backend.why_lost(incarnation)` says why; at once when it does now."""
        if why := backend.why_lost(incarnation):
            return why
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        waiting = self._waiting[backend.name][incarnation]
        waiting.add(future)
        try:
            return await future
        finally:
            waiting.discard(future)
            if not waiting and self._waiting[backend.name].get(incarnation) is waiting:
                del self._waiting[backend.name][incarnation]

    def tell(self, backend: Backend) -> None:
        """Something has changed there."""
        by_incarnation = self._waiting.get(backend.name)
        for incarnation, waiting in list(by_incarnation.items()) if by_incarnation else ():
            if why := backend.why_lost(incarnation):
                self._resolve(waiting, why)

    def tell_all(self, why: str) -> None:
        """Everything is given up."""
        for by_incarnation in self._waiting.values():
            for waiting in by_incarnation.values():
                self._resolve(waiting, why)

    @staticmethod
    def _resolve(waiting: set[asyncio.Future[str]], why: str) -> None:
        for future in waiting:
            if not future.done():
                future.set_result(why)

    def __len__(self) -> int:
        """How many wait."""
        return sum(len(waiting) for each in self._waiting.values() for waiting in each.values())
