"""A burst of requests, measured from the client's side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from phaseroute import results
from phaseroute.aio import AsyncClient, AsyncStream
from phaseroute.errors import PhaserouteError
from phaseroute.requests import GenerateOptions, PromptLike
from phaseroute.results import Completion, Delta, Finished
from phaseroute.v1 import router_pb2

DECISION_WAIT_S = 2.0
"""How long the router's report of a decision may lag behind the answer that it led to."""

OnEvent = Callable[[int, Delta | Finished], None]
"""Told of each event of each request, by its index in the burst."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that arrive one after the other, `gap_s` apart, whatever became of those before."""

    prompts: tuple[PromptLike, ...]
    gap_s: float
    options: GenerateOptions
    """The same for all of them."""


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request; seconds from the moment it was sent."""

    sent_s: float
    """Since the burst began."""
    ttft_s: float
    """To the first token."""
    e2e_s: float
    """To the last message."""
    token_times_s: tuple[float, ...]
    """When each token arrived. Tokens that came in one message have one time."""
    answer: Completion
    decision: router_pb2.Decision | None
    """None when the router's report of it did not arrive."""

    @property
    def backend(self) -> str:
        """Where it ran; empty when no router was asked."""
        return self.answer.routing.backend if self.answer.routing else ""

    @property
    def decision_id(self) -> str:
        """Empty when no router was asked."""
        return self.answer.routing.decision_id if self.answer.routing else ""

    @property
    def mean_gap_s(self) -> float | None:
        """(e2e - ttft) / (tokens - 1); None with fewer than two tokens."""
        tokens = len(self.token_times_s)
        return (self.e2e_s - self.ttft_s) / (tokens - 1) if tokens > 1 else None

    @property
    def max_gap_s(self) -> float | None:
        """The longest time without a token once there was one; None with fewer than two tokens."""
        return max((after - before for before, after in pairwise(self.token_times_s)), default=None)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Inter-token latencies, one less than there are tokens. A message that brings n tokens after t seconds counts
        as n latencies of t / n: when it was sent, not when they were made, decides how many it holds."""
        messages = [(time_s, len(list(tokens))) for time_s, tokens in groupby(self.token_times_s)]
        first = [0.0] * (messages[0][1] - 1) if messages else []
        later = [
            (time_s - before_s) / tokens
            for (before_s, _), (time_s, tokens) in pairwise(messages)
            for _ in range(tokens)
        ]
        return (*first, *later)


@dataclass(frozen=True, slots=True)
class BurstResult:
    """A whole burst, in order of arrival."""

    requests: tuple[RequestResult, ...]

    @property
    def completion_s(self) -> float:
        """From the start of the burst to the end of the last answer."""
        return max(request.sent_s + request.e2e_s for request in self.requests)

    @property
    def generated_tokens(self) -> int:
        """By all of them together."""
        return sum(request.answer.usage.generated_tokens for request in self.requests)


async def run_burst(client: AsyncClient, burst: Burst, on_event: OnEvent) -> BurstResult:
    """Send a burst and measure it: through a router, or to a backend, which reports no decisions. Raises the first
    `PhaserouteError` and cancels the other calls."""
    decisions = _Decisions()
    watch = client.watch_decisions()
    await watch.wait_started()
    watcher = asyncio.create_task(decisions.collect(watch))
    start_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_send(client, burst, index, start_s, on_event)) for index in range(len(burst.prompts))
            ]
        requests = [task.result() for task in tasks]
        await decisions.wait({request.decision_id for request in requests if request.decision_id})
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    finally:
        watcher.cancel()
    return BurstResult(tuple(replace(item, decision=decisions.by_id.get(item.decision_id)) for item in requests))


class _Decisions:
    """What the router reports while the burst runs."""

    def __init__(self) -> None:
        self.by_id: dict[str, router_pb2.Decision] = {}
        self._arrived = asyncio.Event()

    async def collect(self, watch: AsyncStream[router_pb2.Decision | router_pb2.Outcome]) -> None:
        """Until cancelled. Without a router's report the burst is measured all the same."""
        with suppress(PhaserouteError):
            async with watch:
                async for event in watch:
                    if isinstance(event, router_pb2.Decision):
                        self.by_id[event.id] = event
                        self._arrived.set()

    async def wait(self, wanted: set[str]) -> None:
        """Until all of them arrived, within reason."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DECISION_WAIT_S):
                while not wanted <= self.by_id.keys():
                    self._arrived.clear()
                    await self._arrived.wait()


async def _send(client: AsyncClient, burst: Burst, index: int, start_s: float, on_event: OnEvent) -> RequestResult:
    await asyncio.sleep(start_s + index * burst.gap_s - time.perf_counter())
    sent_s = time.perf_counter()
    token_times_s: list[float] = []
    events: list[Delta | Finished] = []
    async with client.generate(burst.prompts[index], **burst.options) as stream:
        async for event in stream:
            if isinstance(event, Delta):
                token_times_s += [time.perf_counter() - sent_s] * len(event.token_ids)
            events.append(event)
            on_event(index, event)
    e2e_s = time.perf_counter() - sent_s
    return RequestResult(
        sent_s=sent_s - start_s,
        ttft_s=token_times_s[0] if token_times_s else e2e_s,
        e2e_s=e2e_s,
        token_times_s=tuple(token_times_s),
        answer=results.completion(events),
        decision=None,
    )
