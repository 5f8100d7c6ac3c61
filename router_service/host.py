"""One router as a running server: what the command runs, and what tests run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import structlog

from phaseroute.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from phaseroute.v1.router_pb2_grpc import add_RouterServiceServicer_to_server
from router_service.router import Router
from router_service.servicer import InferenceServicer, RouterServicer
from router_service.settings import RouterSettings
from service_kit.serve import Server, Service
from service_kit.telemetry import Telemetry

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Hosted:
    """A router that serves."""

    server: Server
    router: Router


@asynccontextmanager
async def host(settings: RouterSettings, telemetry: Telemetry | None = None) -> AsyncIterator[Hosted]:
    """Route until the block is left. Raises `StartupFailed` when the address cannot be served on; backends that do not
    answer are no reason not to start."""
    telemetry = telemetry or Telemetry()
    router = Router(settings, telemetry)

    async def drain() -> None:
        router.view.draining = True
        router.fleet.changes.publish(None)

    server = Server(
        [
            Service(
                "phaseroute.v1.InferenceService",
                partial(add_InferenceServiceServicer_to_server, InferenceServicer(router)),
            ),
            Service(
                "phaseroute.v1.RouterService", partial(add_RouterServiceServicer_to_server, RouterServicer(router))
            ),
        ],
        address=settings.listen,
        telemetry=telemetry,
        protection=settings.protection,
        drain_grace_s=settings.drain_grace_s,
        on_drain=drain,
    )
    async with router.length_file or nullcontext(), router.fleet, server:
        health = asyncio.create_task(_tell_health(router, server), name="health")
        _log.info("serving", address=server.target, backends=dict(settings.targets), policy=settings.policy)
        try:
            yield Hosted(server, router)
        finally:
            health.cancel()
            await asyncio.gather(health, return_exceptions=True)


async def _tell_health(router: Router, server: Server) -> None:
    """SERVING only while some backend takes work."""
    with router.fleet.changes.subscribe() as changes:
        told = None
        while True:
            if router.fleet.routable != told:
                told = router.fleet.routable
                await server.set_serving(told)
            await changes.get()
