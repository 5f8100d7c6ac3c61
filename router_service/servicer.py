"""InferenceService and RouterService of a router: wire to router and back, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from phaseroute.v1 import router_pb2, router_pb2_grpc
from router_service.backend import Backend
from router_service.prompt_size import prompt_size
from router_service.relay import REQUEST_ID, Client
from router_service.router import Router
from service_kit.faults import Fault
from service_kit.identity import Caller, Scope, current_caller
from service_kit.requests import parse_generate, parse_prompt

HEARTBEAT_S = 1.0
"""WatchStatus says something at least this often."""
CHANGE_INTERVAL_S = 0.05
"""Least time between two messages of WatchStatus; what happens in between is told together."""

_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """What every backend serves, so that a client need not know which of both it talks to."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> AsyncIterator[pb.GenerateResponse]:
        """See the contract. Beyond the router's and the caller's bounds it is refused at once."""
        caller = current_caller()
        client = Client(context.time_remaining, _request_id(context), caller)
        prompt_tokens, max_new_tokens = self._size(request, caller)
        with self._router.admission.admit(caller, prompt_tokens + max_new_tokens) as ticket:
            ticket.used_tokens = prompt_tokens
            sent = False
            try:
                async with aclosing(self._router.relay.generate(request, client)) as responses:
                    async for response in responses:
                        sent = True
                        ticket.used_tokens += len(response.delta.token_ids)
                        yield response
            except Fault:
                if not sent:
                    ticket.used_tokens = 0
                raise

    async def Status(self, request: pb.StatusRequest, context: _Context) -> pb.StatusResponse:
        """See the contract and `FleetView.status`."""
        return pb.StatusResponse(status=self._router.view.status())

    async def WatchStatus(
        self, request: pb.WatchStatusRequest, context: _Context
    ) -> AsyncIterator[pb.WatchStatusResponse]:
        """See the contract."""
        with self._router.fleet.changes.subscribe() as changes:
            while True:
                yield pb.WatchStatusResponse(status=self._router.view.status())
                await asyncio.sleep(CHANGE_INTERVAL_S)
                try:
                    async with asyncio.timeout(HEARTBEAT_S - CHANGE_INTERVAL_S):
                        await changes.get()
                except TimeoutError:
                    continue

    async def CacheProbe(self, request: pb.CacheProbeRequest, context: _Context) -> pb.CacheProbeResponse:
        """The best answer of the fleet."""
        best = await self._router.routing.best_prefix(
            request.prompt,
            parse_prompt(request.prompt),
            cache_salt=current_caller().salt(request.cache_salt),
            time_left_s=context.time_remaining(),
        )
        return pb.CacheProbeResponse(prompt_tokens=best.prompt_tokens, reusable_tokens=best.reusable_tokens)

    def _size(self, request: pb.GenerateRequest, caller: Caller) -> tuple[int, int]:
        """Prompt tokens, about, and the budget; 0 where nobody counts them."""
        if not self._router.admission.counts_tokens(caller):
            return 0, 0
        spec = parse_generate(request)
        return prompt_size(spec.prompt).guess_tokens, spec.max_new_tokens


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """What only a router has."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Route(self, request: router_pb2.RouteRequest, context: _Context) -> router_pb2.RouteResponse:
        """See the contract. When nobody can take the request, that is the answer: nothing is selected."""
        spec, caller = parse_generate(request.request), current_caller()
        routed = await self._router.routing.decide(
            request.request.prompt,
            spec,
            book=False,
            time_left_s=context.time_remaining(),
            caller=caller,
            # Only a router may say what there is of an answer.
            generated=len(spec.generated) if Scope.ROUTE in caller.scopes else 0,
        )
        return router_pb2.RouteResponse(decision=routed.decision.to_proto())

    async def ListBackends(
        self, request: router_pb2.ListBackendsRequest, context: _Context
    ) -> router_pb2.ListBackendsResponse:
        """See the contract."""
        backends = self._router.fleet.backends.values()
        return router_pb2.ListBackendsResponse(backends=[self._entry(backend) for backend in backends])

    async def WatchDecisions(
        self, request: router_pb2.WatchDecisionsRequest, context: _Context
    ) -> AsyncIterator[router_pb2.WatchDecisionsResponse]:
        """See the contract. A watcher that reads too slowly loses the oldest."""
        with self._router.relay.decisions.subscribe() as news:
            # Nothing tells a client that it is subscribed but the headers.
            await context.send_initial_metadata(())
            while True:
                yield await news.get()

    async def DrainBackend(
        self, request: router_pb2.DrainBackendRequest, context: _Context
    ) -> router_pb2.DrainBackendResponse:
        """See the contract."""
        grace_s = request.grace_s if request.HasField("grace_s") else None
        backend = self._router.fleet.drain(request.backend, undo=request.undo, grace_s=grace_s)
        return router_pb2.DrainBackendResponse(backend=self._entry(backend))

    def _entry(self, backend: Backend) -> router_pb2.BackendEntry:
        breaker = self._router.fleet.breaker(backend)
        return router_pb2.BackendEntry(
            name=backend.name,
            target=backend.target,
            state=f"BACKEND_STATE_{backend.state.name}",
            detail=backend.detail,
            status=backend.snapshot.wire if backend.snapshot is not None else None,
            status_age_s=self._router.fleet.status_age_s(backend),
            booked_requests=self._router.ledger.pending(backend.name).requests,
            left_out=self._router.fleet.left_out(backend),
            breaker=router_pb2.Breaker(
                state=f"BREAKER_STATE_{breaker.state.name}",
                failures=breaker.failures,
                retry_in_s=breaker.retry_in_s,
            ),
        )


def _request_id(context: _Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID and isinstance(value, str):
            return value
    return ""
