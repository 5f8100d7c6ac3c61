"""The load client: plays a workload against a server, the same for either side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from benchmarks.side_by_side.answer import Answer, Chunk, Played, Usage
from benchmarks.side_by_side.process import Started
from benchmarks.side_by_side.workload import Ask, Workload

_DECODING_TOKENS = 8
"""A stream that has sent this many is decoding steadily."""


class Server(Protocol):
    """Something that answers."""

    def stream(self, ask: Ask) -> AsyncGenerator[Chunk, None]:
        """One answer, as it comes; the last chunk has the usage."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that was started for the benchmark."""

    server: Server
    process: Started
    settings: Mapping[str, object]
    """As far as it tells them."""


class _Stream:
    """One request under way."""

    def __init__(self, server: Server, ask: Ask) -> None:
        self._server = server
        self._ask = ask
        self.arrivals_s: list[float] = []
        self.decoding = asyncio.Event()

    async def run(self) -> Answer:
        """Send it and wait for its end. Raises RuntimeError when the server did other work than it was asked for."""
        sent_s = time.perf_counter()
        usage, first_token = None, -1
        async with aclosing(self._server.stream(self._ask)) as chunks:
            async for chunk in chunks:
                if chunk.token_ids and not self.arrivals_s:
                    first_token = chunk.token_ids[0]
                self.arrivals_s += [time.perf_counter()] * len(chunk.token_ids)
                if len(self.arrivals_s) >= _DECODING_TOKENS:
                    self.decoding.set()
                usage = chunk.usage or usage
        ended_s = time.perf_counter()
        return Answer(sent_s, tuple(self.arrivals_s), ended_s, self._checked(usage), first_token)

    def _checked(self, usage: Usage | None) -> Usage:
        asked = (len(self._ask.prompt), self._ask.new_tokens, self._ask.new_tokens)
        got = usage and (usage.prompt_tokens, usage.generated_tokens, len(self.arrivals_s))
        if usage is None or got != asked:
            raise RuntimeError(
                f"{type(self._server).__name__} was asked for (prompt, generated, streamed) tokens {asked} and reports "
                f"{got}: its times would not compare. Look at the servers' own logs and at what they truncate."
            )
        return usage


async def play(workload: Workload, server: Server) -> Played:
    """Every group in turn; see `Workload`. Raises RuntimeError, in an exception group, for an answer that is not what
    was asked for."""
    await _answers(workload.before, server, workload.in_flight)
    beside = [_Stream(server, ask) for ask in workload.beside]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream.run()) for stream in beside]
        for stream in beside:
            await stream.decoding.wait()
        measured = await _answers(workload.measured, server, workload.in_flight)
        for task in tasks:
            task.cancel()
    return Played(measured, tuple(tuple(stream.arrivals_s) for stream in beside))


async def _answers(asks: Sequence[Ask], server: Server, in_flight: int | None) -> tuple[Answer, ...]:
    begun_s = time.perf_counter()
    room = asyncio.Semaphore(in_flight or max(1, len(asks)))  # serves its waiters in order

    async def answer(ask: Ask) -> Answer:
        await asyncio.sleep(max(0.0, begun_s + ask.after_s - time.perf_counter()))
        async with room:
            return await _Stream(server, ask).run()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(ask)) for ask in asks]
    return tuple(task.result() for task in tasks)
