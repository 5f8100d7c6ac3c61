"""From a client's request to its stream: decide, book, pass on; on another backend again where one is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import structlog

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import router_pb2
from router_service.attempt import CANCELLED, Attempt
from router_service.continuation import Answer, BrokenOff, RelayLimits, why_not, worth_another
from router_service.decision import Decision
from router_service.failures import REST_S, Failures
from router_service.feed import Feed
from router_service.fleet import Fleet
from router_service.ledger import Lease
from router_service.routing import Routed, Routing
from router_service.upstream import broken, forwarded, messages
from service_kit.errors import UpstreamFailed, code_name, to_status
from service_kit.faults import Fault
from service_kit.identity import ANYONE, Caller, Scope
from service_kit.requests import GenerateSpec, parse_generate
from service_kit.telemetry import Attr, Telemetry

DECISIONS_KEPT = 1024
"""For a watcher that does not read; beyond them it loses the oldest."""
DECIDE_INTERVAL_S = 0.05
"""Least time between two looks for a backend while an answer waits for one."""
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
    caller: Caller = ANYONE


@dataclass(slots=True)
class _Request:
    """One request, from its arrival to its end."""

    wire: pb.GenerateRequest
    spec: GenerateSpec
    client: Client
    answer: Answer
    failures: Failures


class Relay:
    """Runs requests over a fleet. When a stream is over, however that comes about, its lease is released and its call
    upstream cancelled."""

    def __init__(
        self,
        fleet: Fleet,
        routing: Routing,
        *,
        telemetry: Telemetry,
        limits: RelayLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.decisions: Feed[router_pb2.WatchDecisionsResponse] = Feed(limit=DECISIONS_KEPT)
        """Each decision, later its outcome."""
        self._fleet = fleet
        self._routing = routing
        self._telemetry = telemetry
        self._limits = limits or RelayLimits()
        self._clock = clock

    async def generate(self, request: pb.GenerateRequest, client: Client) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The answer's messages, as if they came from one backend. Raises a `Fault` when the request itself is at
        fault or the answer cannot go on anywhere. Close the generator to give the request up."""
        spec = parse_generate(request)
        # Only a router may say what there is of an answer; from others it counts as not said.
        inherited = spec.generated if Scope.ROUTE in client.caller.scopes else ()
        it = _Request(request, spec, client, Answer(inherited, self._clock()), Failures())
        while True:
            routed = await self._decide(it)
            attempt = Attempt(routed.decision, routed.lease, it.answer, decided_s=self._clock())
            with self._ending(attempt, client):
                if attempt.lease is None:
                    raise _nobody(it, attempt.decision)
                async with aclosing(self._stream(attempt, attempt.lease, it)) as responses:
                    async for response in responses:
                        yield response
                if attempt.failure is not None:
                    it.failures.add(attempt.lease.backend, attempt.lease.incarnation, attempt.failure, self._clock())
                    self._check(it, attempt.failure, begun=attempt.begun)
            if attempt.failure is None:
                return

    async def _decide(self, it: _Request) -> Routed:
        """Where the request goes next. An answer that has begun waits for a backend where there is none: its client
        cannot send it again, and one that was restarted or cut off is often back within seconds."""
        routed = await self._decide_now(it)
        if routed.lease is not None or not it.answer.begun:
            return routed
        until_s = self._clock() + self._limits.max_wait_s
        with self._fleet.changes.subscribe() as changes:
            while routed.lease is None and (left_s := until_s - self._clock()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, REST_S)):
                        await changes.get()
                await asyncio.sleep(DECIDE_INTERVAL_S)
                routed = await self._decide_now(it)
        return routed

    async def _decide_now(self, it: _Request) -> Routed:
        """Where the request goes next, if anywhere. An answer that has begun goes on for as long as its deadline lets
        it: what made it worth beginning does not count any more, and no refusal is the request's own fault."""
        spec, time_left_s = it.spec, it.client.time_left_s()
        if it.answer.token_ids:
            spec, time_left_s = replace(spec, routing=replace(spec.routing, ttft_slo_s=None)), None
        try:
            routed = await self._routing.decide(
                it.wire.prompt,
                spec,
                book=True,
                failed=it.failures.reasons(self._incarnations(), self._clock() if it.answer.begun else None),
                time_left_s=time_left_s,
                caller=it.client.caller,
                generated=len(it.answer.token_ids),
            )
        except Fault as fault:
            if it.answer.begun:
                raise BrokenOff(it.answer, it.failures, str(fault).rstrip(".")) from fault
            raise
        return replace(routed, decision=replace(routed.decision, attempt=it.failures.attempts + 1))

    async def _stream(self, attempt: Attempt, lease: Lease, it: _Request) -> AsyncGenerator[pb.GenerateResponse, None]:
        """One attempt's messages; a failure ends them without a word."""
        backend = self._fleet.backends[lease.backend]
        about: dict[str, str | int] = {
            Attr.BACKEND: backend.name,
            Attr.ATTEMPT: attempt.decision.attempt,
            Attr.ATTEMPT_ID: lease.attempt_id,
        }
        client = it.client
        with self._telemetry.client_span(METHOD, backend.target, about) as span:
            metadata = (*span.metadata, (REQUEST_ID, client.request_id)) if client.request_id else span.metadata
            held: pb.GenerateResponse | None = None
            upstream = messages(
                backend.stub.Generate,
                forwarded(
                    it.wire,
                    it.spec,
                    caller=client.caller,
                    generated=it.answer.token_ids,
                    decision=attempt.decision,
                    lease=lease,
                ),
                partial(self._fleet.until_lost, lease.backend, lease.incarnation),
                timeout_s=client.time_left_s(),
                metadata=metadata,
            )
            try:
                async with aclosing(upstream) as responses:
                    async for response in responses:
                        if held is not None:
                            if response.HasField("delta"):
                                it.answer.traceable = False
                            attempt.note(held, self._clock())
                            yield held
                            held = None
                        if not response.delta.token_ids and response.HasField("delta"):
                            # The last of the text, for which no token stands: were it sent and the end after it lost,
                            # another backend would send it again.
                            held = response
                            continue
                        attempt.note(response, self._clock())
                        yield response
                if attempt.routing is None:
                    raise broken("The backend ended its stream without a last message.")
                attempt.code = "OK"
            except UpstreamFailed as failure:
                attempt.fail(failure)
            except (asyncio.CancelledError, GeneratorExit):
                attempt.give_up()
                raise
            finally:
                span.code = attempt.code

    def _check(self, it: _Request, failure: UpstreamFailed, *, begun: bool) -> None:
        """An attempt failed, `begun` or before it sent anything. Raises what the client is told, unless the request
        goes elsewhere."""
        if not worth_another(failure, here=begun, anywhere=it.answer.begun):
            raise failure
        why = why_not(it.answer, it.failures, self._limits)
        if why and it.answer.begun:
            raise BrokenOff(it.answer, it.failures, why) from failure
        if why:
            raise it.failures.given_up() from failure

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
                self._fleet.attempt_over(attempt.lease.backend, attempt.lease.incarnation, attempt.failure)
            if attempt.code == CANCELLED and client.time_left_s() == 0:
                attempt.code = "DEADLINE_EXCEEDED"
            if self.decisions.listeners:
                self.decisions.publish(router_pb2.WatchDecisionsResponse(outcome=attempt.outcome()))

    def _incarnations(self) -> dict[str, str]:
        """Of the processes that are there now, by backend."""
        return {
            name: backend.snapshot.incarnation
            for name, backend in self._fleet.backends.items()
            if backend.snapshot is not None
        }


def _nobody(it: _Request, last: Decision) -> Fault:
    """What the client is told when the last decision found no backend."""
    if it.answer.begun:
        return BrokenOff(it.answer, it.failures, last.choice.reason)
    return it.failures.nobody_left(last)
