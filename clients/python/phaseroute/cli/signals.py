"""Ctrl-C and SIGTERM as cancellation, so that clean-up runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The work was cancelled by a signal and has cleaned up."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.exit_code = 128 + number
        """As shells report it."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, but each SIGINT, SIGTERM or SIGHUP cancels the work. Raises `Interrupted` when that ended it."""
    return asyncio.run(_until_signalled(work))


async def _until_signalled(work: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    received: list[signal.Signals] = []

    def cancel(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    for number in _STOPPING:
        loop.add_signal_handler(number, cancel, number)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise Interrupted(received[0]) from None
        raise
