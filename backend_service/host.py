"""One backend as a running server: settings in, a served engine out. What the command runs, and what tests run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import structlog

from backend_service.assembly import assemble
from backend_service.event_stream import UnreadLimits
from backend_service.places import QueueLimits
from backend_service.runner import Runner
from backend_service.servicer import BackendServicer
from backend_service.settings import BackendSettings
from phaseroute.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from service_kit.serve import Server, Service
from service_kit.telemetry import Telemetry

ENGINE_DIED_CODE = 1

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Hosted:
    """A backend that serves."""

    server: Server
    runner: Runner


@asynccontextmanager
async def host(settings: BackendSettings, telemetry: Telemetry | None = None) -> AsyncIterator[Hosted]:
    """Listen, load the engine, then serve until the block is left. Raises `StartupFailed`.

    Health is SERVING once the engine answers; before that calls are refused as unavailable. When the engine dies, its
    requests fail, health turns NOT_SERVING and the server asks to be stopped with code 1.
    """
    telemetry = telemetry or Telemetry()
    runner = Runner(
        partial(assemble, settings),
        QueueLimits(settings.largest_batch, settings.max_queued, settings.max_queued_tokens),
        UnreadLimits(settings.max_unread_tokens, settings.unread_grace_s),
        on_death=lambda: server.request_stop(ENGINE_DIED_CODE),
    )
    servicer = BackendServicer(runner, telemetry=telemetry)

    async def drain() -> None:
        runner.drain()

    server = Server(
        [Service("phaseroute.v1.InferenceService", partial(add_InferenceServiceServicer_to_server, servicer))],
        address=settings.listen,
        telemetry=telemetry,
        protection=settings.protection,
        drain_grace_s=settings.drain_grace_s,
        on_drain=drain,
    )
    try:
        async with server:
            _log.info("loading", address=server.target, engine=settings.engine, model=settings.model)
            info = await runner.start()
            await server.set_serving(True)
            _log.info("serving", address=server.target, engine=info.name, device=info.device, model=info.model_name)
            yield Hosted(server, runner)
    finally:
        await runner.stop()
