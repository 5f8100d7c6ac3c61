"""Sends planned requests as clients do, and books how each ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from phaseroute.errors import from_rpc_error
from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from tests.chaos.fleet import Fleet
from tests.chaos.ledger import Ending, Entry, Ledger, Outcome, Verdict, judge
from tests.chaos.pace import Pace
from tests.chaos.reference import Answer
from tests.chaos.workload import CLIENTS, PlannedRequest

PATIENCE_S = 90.0
"""A call that is not over by then hangs."""
ROUTER_PATIENCE_S = 120.0
MOST_RESENT = 5
"""A client that is refused so often while a router restarts gives up."""


class Player:
    """The clients of one run; each has a channel of its own."""

    def __init__(self, fleet: Fleet, ledger: Ledger, answers: Callable[[PlannedRequest], Answer]) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._answers = answers
        self._stubs: Mapping[str, pb_grpc.InferenceServiceStub] = {}

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Clients are there while the block runs."""
        channels = {name: self._fleet.client_channel() for name in CLIENTS}
        self._stubs = {
            name: pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            for name, channel in channels.items()
        }
        try:
            yield
        finally:
            for channel in channels.values():
                await channel.close()

    async def play(self, load: Iterable[PlannedRequest], at_once: int, pace: Pace) -> None:
        """All requests, so many at a time."""
        remaining = iter(load)
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(self._work(remaining, pace))

    async def _work(self, remaining: Iterator[PlannedRequest], pace: Pace) -> None:
        for planned in remaining:
            await pace.request()
            await self.request(planned)

    async def request(self, planned: PlannedRequest) -> None:
        """One request, to its end; sent again where a restarting router refused it before anything came."""
        answer = self._answers(planned)
        self._ledger.open(planned)
        resent = 0
        while True:
            ending = await self.ask(planned)
            trouble = self._fleet.trouble_of(ending.began_s, ending.ended_s)
            verdict = judge(planned, answer, ending, trouble)
            if verdict.outcome is not Outcome.RESEND:
                break
            if resent == MOST_RESENT:
                verdict = Verdict(Outcome.BROKEN, f"refused {resent + 1} times: {ending.message}")
                break
            resent += 1
            async with asyncio.timeout(ROUTER_PATIENCE_S):
                await self._fleet.router_up.wait()
        self._ledger.close(Entry(planned, ending, verdict, resent))

    async def ask(self, planned: PlannedRequest) -> Ending:
        """One call, to its end, which the client may bring about."""
        call = self._stubs[planned.client].Generate(planned.to_proto(), timeout=planned.deadline_s)
        reading = _Reading(planned)
        giving_up = None
        if planned.cancel_after_s is not None:
            giving_up = asyncio.get_running_loop().call_later(planned.cancel_after_s, call.cancel)
        code, message, retry_info = "OK", "", False
        try:
            async with asyncio.timeout(PATIENCE_S):
                await reading.follow(call)
        except TimeoutError:
            code, message = "HUNG", f"not over after {PATIENCE_S:g} s"
        except grpc.aio.AioRpcError as error:
            # As the shipped client has it: what gRPC ends CANCELLED though nobody did is UNAVAILABLE.
            code = from_rpc_error(error, "the router").code.name
            message, retry_info = error.details() or "", _has_retry_info(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            code = "CANCELLED"
        finally:
            if giving_up is not None:
                giving_up.cancel()
            call.cancel()
        return reading.ending(code, message, retry_info=retry_info)


class _Reading:
    """What a client has of an answer so far."""

    def __init__(self, planned: PlannedRequest) -> None:
        self._cancel_after_tokens = planned.cancel_after_tokens
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._finished: pb.Finished | None = None
        self._after_last = 0
        self._began_s = self._heard_s = time.monotonic()
        self._longest_gap_s = 0.0

    async def follow(self, call: Any) -> None:
        """Read to the end; cancel where that is planned."""
        async for response in call:
            now_s = time.monotonic()
            self._longest_gap_s = max(self._longest_gap_s, now_s - self._heard_s)
            self._heard_s = now_s
            if self._finished is not None:
                self._after_last += 1
            if response.WhichOneof("event") == "finished":
                self._finished = response.finished
                continue
            self._token_ids += response.delta.token_ids
            self._text.append(response.delta.text)
            if self._cancel_after_tokens is not None and len(self._token_ids) >= self._cancel_after_tokens:
                self._cancel_after_tokens = None
                call.cancel()

    def ending(self, code: str, message: str, *, retry_info: bool) -> Ending:
        """It is over."""
        return Ending(
            code=code,
            message=message,
            token_ids=tuple(self._token_ids),
            text="".join(self._text),
            finished=self._finished,
            after_last=self._after_last,
            began_s=self._began_s,
            ended_s=time.monotonic(),
            longest_gap_s=self._longest_gap_s,
            retry_info=retry_info,
        )


def _has_retry_info(error: grpc.aio.AioRpcError) -> bool:
    with suppress(ValueError):
        status = rpc_status.from_call(error)
        return status is not None and any(
            detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details
        )
    return False
