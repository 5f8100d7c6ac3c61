"""From a client's request to its stream: decide, book, pass on; elsewhere again while nothing was sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import router_pb2
from router_service.attempt import CANCELLED, Attempt
from router_service.decision import Decision, ProbeOutcome
from router_service.failures import Failures
from router_service.feed import Feed
from router_service.fleet import Fleet
from router_service.ledger import Lease
from router_service.routing import Routing
from service_kit.errors import UpstreamFailed, code_name, from_rpc_error, to_status
from service_kit.faults import Fault, Unavailable
from service_kit.requests import parse_generate
from service_kit.telemetry import Attr, Telemetry

DECISIONS_KEPT = 1024
"""For a watcher that does not read; beyond them it loses the oldest."""
METHOD = "phaseroute.v1.InferenceService/Generate"
REQUEST_ID = "x-request-id"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Client:
    """What a caller's side of the call hands on to the backend's."""

    time_left_s: Callable[[], float | None]
    """Until its deadline; None without one."""
    request_id: str
    """Its x-request-id; empty without one."""


class Relay:
    """Runs requests over a fleet. When a stream is over, however that comes about, its lease is released and its call
    upstream cancelled."""

    def __init__(
        self,
        fleet: Fleet,
        routing: Routing,
        *,
        telemetry: Telemetry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.decisions: Feed[router_pb2.WatchDecisionsResponse] = Feed(limit=DECISIONS_KEPT)
        """Each decision, later its outcome."""
        self._fleet = fleet
        self._routing = routing
        self._telemetry = telemetry
        self._clock = clock

    async def generate(self, request: pb.GenerateRequest, client: Client) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The answer's messages. Raises a `Fault`, before the first message only when the request itself is at fault
        or no other backend is left to try. Close the generator to give the request up."""
        arrived_s = self._clock()
        spec = parse_generate(request)
        failures = Failures()
        while True:
            routed = await self._routing.decide(
                request.prompt, spec, book=True, failed=failures.reasons, time_left_s=client.time_left_s()
            )
            attempt = Attempt(routed.decision, routed.lease, arrived_s, decided_s=self._clock())
            with self._ending(attempt, client):
                if attempt.lease is None:
                    raise failures.fault(attempt.decision)
                forwarded = _forwarded(request, attempt.decision, attempt.lease)
                async with aclosing(self._stream(attempt, forwarded, client)) as responses:
                    async for response in responses:
                        yield response
            if attempt.failure is None:
                return
            failures.add(attempt.decision.selected, attempt.failure)

    async def _stream(
        self, attempt: Attempt, request: pb.GenerateRequest, client: Client
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """One attempt's messages; a failure that another backend may do better with ends them without a word."""
        backend = self._fleet.backends[attempt.decision.selected]
        about: dict[str, str | int] = {
            Attr.BACKEND: backend.name,
            Attr.ATTEMPT: attempt.decision.attempt,
            Attr.ATTEMPT_ID: request.attempt.id,
        }
        with self._telemetry.client_span(METHOD, backend.target, about) as span:
            metadata = (*span.metadata, (REQUEST_ID, client.request_id)) if client.request_id else span.metadata
            call = backend.stub.Generate(request, timeout=client.time_left_s(), metadata=metadata)
            try:
                async with aclosing(_messages(call)) as responses:
                    async for response in responses:
                        attempt.note(response, self._clock())
                        yield response
                if attempt.routing is None:
                    raise _lost("The backend ended its stream without a last message.")
                attempt.code = "OK"
            except UpstreamFailed as failure:
                attempt.fail(failure)
            except (asyncio.CancelledError, GeneratorExit):
                attempt.give_up()
                raise
            finally:
                span.code = attempt.code

    @contextmanager
    def _ending(self, attempt: Attempt, client: Client) -> Iterator[None]:
        """Make an attempt known; at its end give its lease back and make its outcome known."""
        try:
            log.info("decision", **attempt.decision.log_fields())
            if self.decisions.listeners:
                self.decisions.publish(router_pb2.WatchDecisionsResponse(decision=attempt.decision.to_proto()))
            yield
        except Fault as fault:
            attempt.code = code_name(to_status(fault))
            raise
        finally:
            if attempt.lease is not None:
                self._routing.release(attempt.lease, attempt.ended)
            if attempt.code == CANCELLED and client.time_left_s() == 0:
                attempt.code = "DEADLINE_EXCEEDED"
            if self.decisions.listeners:
                self.decisions.publish(router_pb2.WatchDecisionsResponse(outcome=attempt.outcome()))


async def _messages(call: Any) -> AsyncGenerator[pb.GenerateResponse, None]:
    """What a backend sends. However the call breaks, that is an `UpstreamFailed`; the call never outlives this."""
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Not the client: the call itself was cancelled, as when its channel is closed.
        raise _lost("The router's own call to the backend was cut off.") from None
    finally:
        call.cancel()


def _lost(problem: str) -> UpstreamFailed:
    return UpstreamFailed(to_status(Unavailable(problem)))


def _forwarded(request: pb.GenerateRequest, decision: Decision, lease: Lease) -> pb.GenerateRequest:
    """The request as the backend gets it. Hints were for this router and name its backends; a demanded precision is for
    every router on the way."""
    forwarded = pb.GenerateRequest()
    forwarded.CopyFrom(request)
    forwarded.ClearField("routing")
    if request.routing.precision:
        forwarded.routing.precision = request.routing.precision
    forwarded.max_new_tokens = lease.max_new_tokens
    forwarded.attempt.Clear()
    forwarded.attempt.id = lease.attempt_id
    chosen = next(candidate for candidate in decision.candidates if candidate.name == lease.backend)
    if chosen.probe is ProbeOutcome.ANSWERED:
        # Without an answer the backend looks for itself.
        forwarded.attempt.reusable_tokens = lease.reusable_tokens
    return forwarded
