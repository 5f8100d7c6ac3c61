"""The calls that a server is working on: how many there may be, and how they end when it stops."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from service_kit.faults import Overloaded, Unavailable
from service_kit.identity import Caller, Scope

RETRY_S = 1.0
"""Told to those who are refused: nobody here knows how long the calls in flight will take."""

_Context = grpc.aio.ServicerContext[Any, Any]
_Kind = bool


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Calls of our own services at a time. One caller that is told apart, and is no router, may have half of them."""

    calls: int = 10_000
    observers: int = 256


class CallsInFlight:
    """Counts the calls that a drain waits for, turns new ones away once it has begun, or when there are too many, and
    gives up those that are left after it."""

    def __init__(self, limits: CallLimits | None = None) -> None:
        limits = limits or CallLimits()
        self.draining = False
        self._limit = {False: limits.calls, True: limits.observers}
        self._counts = {False: 0, True: 0}
        self._callers: Counter[tuple[_Kind, str]] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._given_up: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        """Those that a drain waits for: all but observers."""
        return self._counts[False]

    def check(self, caller: Caller, *, observer: bool) -> None:
        """Whether another call may come. Raises `Unavailable` during a drain, and `Overloaded`."""
        if self.draining and not observer:
            raise Unavailable("This server is shutting down; send the request to another one.")
        what = "calls that watch or ask for its status" if observer else "calls"
        limit = self._limit[observer]
        if self._counts[observer] >= limit:
            raise Overloaded(f"This server has {limit} {what} already; try again when some have ended.", RETRY_S)
        own = max(1, limit // 2)
        is_one_of_many = caller.name and Scope.ROUTE not in caller.scopes
        if is_one_of_many and self._callers[observer, caller.name] >= own:
            raise Overloaded(f"{caller.name} has {own} {what} here already; end some of them first.", RETRY_S)

    def enter(self, context: _Context, caller: Caller, *, observer: bool) -> None:
        """Count a call until its status is sent. Raises as `check` does."""
        self.check(caller, observer=observer)
        self._counts[observer] += 1
        self._callers[observer, caller.name] += 1
        if not observer:
            self._idle.clear()
        # Called when the status is on its way; when our handler returns, it is not yet.
        context.add_done_callback(partial(self._leave, (observer, caller.name)))  # type: ignore[arg-type]  # stub: class

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around a counted call's work, in its own task: `give_up` reaches it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def give_up(self) -> None:
        """Cancel the work of all counted calls, so that each can still say how it ended."""
        for task in self._tasks:
            self._given_up.add(task)
            task.add_done_callback(self._given_up.discard)
            task.cancel()

    def was_given_up(self) -> bool:
        """Whether `give_up`, and nobody else, cancelled the current task. Then its cancellation is taken back."""
        task = asyncio.current_task()
        if task is None or task not in self._given_up:
            return False
        self._given_up.discard(task)
        return task.uncancel() == 0

    async def wait_idle(self) -> None:
        """Return once no call is left that a drain waits for."""
        await self._idle.wait()

    def _leave(self, key: tuple[_Kind, str], _: _Context) -> None:
        observer, _name = key
        self._counts[observer] -= 1
        self._callers[key] -= 1
        if not self._callers[key]:
            del self._callers[key]
        if not self.count:
            self._idle.set()
