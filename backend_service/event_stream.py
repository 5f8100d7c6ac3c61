"""What one request brings, on its way from the engine's thread to a client that may read slowly."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from backend_service.request import Event, Progress
from service_kit.faults import Overloaded


@dataclass(frozen=True, slots=True)
class UnreadLimits:
    """What a client may leave unread."""

    max_tokens: int = 1024
    grace_s: float = 10.0
    """For so long there may be more."""


class SlowReader(Overloaded):
    """The client does not read its answer, and the engine cannot hold a place for it (RESOURCE_EXHAUSTED)."""

    reason = "SLOW_READER"

    def __init__(self, tokens: int, limits: UnreadLimits) -> None:
        super().__init__(
            f"More than {limits.max_tokens} tokens of this answer lay unread for {limits.grace_s:g} s ({tokens} at "
            "last), so it was given up; read faster, or ask for fewer tokens at a time.",
            retry_after_s=0.0,
        )


class EventStream:
    """One request's events on the loop's side. Tokens that arrive while nobody reads are merged."""

    def __init__(self, limits: UnreadLimits, on_unread: Callable[[SlowReader], None]) -> None:
        """`on_unread` is called when more than may be has waited for a reader for as long as it may. Not once the last
        event is here: then nothing is held for it but memory."""
        self._limits = limits
        self._on_unread = on_unread
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._unread_tokens = 0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, event: Event) -> None:
        """Add an event; never waits."""
        if isinstance(event, Progress):
            self._add(event)
        else:
            self._events.append(event)
            self.close()
        self._arrived.set()

    async def get(self) -> Event:
        """The next event."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, Progress):  # there is one at most
            self._unread_tokens = 0
            self.close()
        return event

    @property
    def waits(self) -> bool:
        """More than may be is unread, and the time runs."""
        return self._timer is not None

    def close(self) -> None:
        """Do not wait for the reader any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _add(self, event: Progress) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Progress):
            event = Progress(event.request_id, last.text + event.text, last.token_ids + event.token_ids)
            self._events[-1] = event
        else:
            self._events.append(event)
        self._unread_tokens = len(event.token_ids)
        if self._unread_tokens > self._limits.max_tokens and self._timer is None:
            self._timer = self._loop.call_later(self._limits.grace_s, self._too_long)

    def _too_long(self) -> None:
        self._timer = None
        self._on_unread(SlowReader(self._unread_tokens, self._limits))
