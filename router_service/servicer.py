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
from router_service.relay import REQUEST_ID, Client
from router_service.router import Router
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
        """See the contract."""
        client = Client(context.time_remaining, _request_id(context))
        async with aclosing(self._router.relay.generate(request, client)) as responses:
            async for response in responses:
                yield response

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
            request.prompt, parse_prompt(request.prompt), time_left_s=context.time_remaining()
        )
        return pb.CacheProbeResponse(prompt_tokens=best.prompt_tokens, reusable_tokens=best.reusable_tokens)


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """What only a router has."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Route(self, request: router_pb2.RouteRequest, context: _Context) -> router_pb2.RouteResponse:
        """See the contract. When nobody can take the request, that is the answer: nothing is selected."""
        routed = await self._router.routing.decide(
            request.request.prompt,
            parse_generate(request.request),
            book=False,
            time_left_s=context.time_remaining(),
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
        backend = self._router.fleet.drain(request.backend, undo=request.undo)
        return router_pb2.DrainBackendResponse(backend=self._entry(backend))

    def _entry(self, backend: Backend) -> router_pb2.BackendEntry:
        return router_pb2.BackendEntry(
            name=backend.name,
            target=backend.target,
            state=f"BACKEND_STATE_{backend.state.name}",
            detail=backend.detail,
            status=backend.snapshot.wire if backend.snapshot is not None else None,
            status_age_s=self._router.fleet.status_age_s(backend),
            booked_requests=self._router.ledger.pending(backend.name).requests,
            left_out=self._router.fleet.left_out(backend),
        )


def _request_id(context: _Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID and isinstance(value, str):
            return value
    return ""
