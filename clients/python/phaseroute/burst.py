"""A burst of requests, measured from the client's side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

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
    """Send a burst through a router and measure it. Raises the first `PhaserouteError` and cancels the other calls."""
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
    first_s: float | None = None
    events: list[Delta | Finished] = []
    async with client.generate(burst.prompts[index], **burst.options) as stream:
        async for event in stream:
            first_s = first_s or time.perf_counter()
            events.append(event)
            on_event(index, event)
    end_s = time.perf_counter()
    return RequestResult(
        sent_s=sent_s - start_s,
        ttft_s=(first_s or end_s) - sent_s,
        e2e_s=end_s - sent_s,
        answer=results.completion(events),
        decision=None,
    )
