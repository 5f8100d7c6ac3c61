"""Tokens on their way to a client that reads slowly, or not at all."""

from __future__ import annotations

import asyncio

import pytest

from backend_service.event_stream import EventStream, SlowReader, UnreadLimits
from backend_service.request import Ended, Failed, FinishReason, Progress, Times
from service_kit.faults import EngineFailed

END = Ended("r", FinishReason.LENGTH, 1, 0, 9, Times(0, 0, 0, 0))


def token(number: int) -> Progress:
    return Progress("r", chr(number), (number,))


def stream(max_tokens=3, grace_s=0.0) -> tuple[EventStream, asyncio.Future[SlowReader]]:
    given_up = asyncio.get_running_loop().create_future()
    return EventStream(UnreadLimits(max_tokens, grace_s), given_up.set_result), given_up


async def turn() -> None:
    """Let what is due happen."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_tokens_that_nobody_reads_are_merged():
    events, _ = stream(max_tokens=1000)
    for number in range(100, 110):
        events.put(token(number))
    events.put(END)
    assert await events.get() == Progress("r", "defghijklm", tuple(range(100, 110)))
    assert await events.get() is END


async def test_a_reader_waits_for_what_comes():
    events, _ = stream()
    waiting = asyncio.ensure_future(events.get())
    await turn()
    assert not waiting.done()
    events.put(token(100))
    assert await waiting == token(100)


async def test_too_much_unread_for_too_long_is_given_up():
    events, given_up = stream(max_tokens=3)
    for number in range(3):
        events.put(token(number))
    await turn()
    assert not given_up.done()
    events.put(token(3))
    fault = await asyncio.wait_for(given_up, 5)
    assert (fault.reason, fault.retry_after_s) == ("SLOW_READER", 0.0)
    assert "read faster" in str(fault)
    assert (await events.get()).token_ids == (0, 1, 2, 3)  # still there to be read


async def test_a_reader_that_comes_in_time_starts_the_time_anew():
    events, given_up = stream(max_tokens=1, grace_s=60.0)
    for _ in range(3):
        events.put(token(1))
        events.put(token(2))
        assert events.waits
        await events.get()
        assert not events.waits
    assert not given_up.done()


@pytest.mark.parametrize("last", [END, Failed("r", EngineFailed("broken"))])
async def test_once_it_is_over_nobody_minds(last):
    events, given_up = stream(max_tokens=1)
    events.put(token(1))
    events.put(token(2))
    events.put(last)
    await turn()
    assert not given_up.done()
    assert (await events.get()).token_ids == (1, 2)
    assert await events.get() is last


async def test_a_closed_stream_gives_nothing_up():
    events, given_up = stream(max_tokens=1)
    events.put(token(1))
    events.put(token(2))
    events.close()
    await turn()
    assert not given_up.done()
