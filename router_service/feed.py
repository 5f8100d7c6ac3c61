"""News for any number of listeners; a slow one loses the oldest, and never slows who tells."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Subscription(Generic[T]):
    """One listener's bounded queue."""

    def __init__(self, limit: int) -> None:
        self._items: deque[T] = deque(maxlen=limit)
        self._arrived = asyncio.Event()

    def put(self, item: T) -> None:
        """Add news, dropping the oldest beyond the limit."""
        self._items.append(item)
        self._arrived.set()

    async def get(self) -> T:
        """The oldest news kept, waiting for some."""
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        return self._items.popleft()

    async def __aiter__(self) -> AsyncIterator[T]:
        while True:
            yield await self.get()


class Feed(Generic[T]):
    """Publishes on the event loop's thread only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._subscriptions: set[Subscription[T]] = set()

    def publish(self, item: T) -> None:
        """Tell every listener."""
        for subscription in self._subscriptions:
            subscription.put(item)

    @contextmanager
    def subscribe(self) -> Iterator[Subscription[T]]:
        """Listen from now on until the block ends."""
        subscription = Subscription[T](self._limit)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.remove(subscription)

    @property
    def listeners(self) -> int:
        """How many would hear of it."""
        return len(self._subscriptions)
