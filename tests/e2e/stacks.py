"""A router with real backends behind it, all in this process, over loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc

from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from phaseroute.v1 import router_pb2, router_pb2_grpc
from router_service.host import Hosted, host
from router_service.settings import RouterSettings
from service_kit.channels import open_channel
from tests.integration.backends import Answer, Backend, backend, collect, first_status, request


@dataclass
class Stack:
    """A served router, a client of it, and the backends behind it."""

    hosted: Hosted
    channel: grpc.aio.Channel
    backends: dict[str, Backend]
    stub: pb_grpc.InferenceServiceStub = field(init=False)
    router: router_pb2_grpc.RouterServiceStub = field(init=False)

    def __post_init__(self):
        self.stub = pb_grpc.InferenceServiceStub(self.channel)
        self.router = router_pb2_grpc.RouterServiceStub(self.channel)

    async def generate(self, prompt, **options) -> Answer:
        return await collect(self.stub.Generate(request(prompt, **options)))

    async def route(self, prompt, **options) -> router_pb2.Decision:
        response = await self.router.Route(router_pb2.RouteRequest(request=request(prompt, **options)))
        return response.decision


@asynccontextmanager
async def stack(backends: dict[str, dict], *, probe_timeout_s: float = 2.0, **settings) -> AsyncIterator[Stack]:
    """Backends by name with their settings, and a router that sees them all serving. The probe deadline is generous:
    here one event loop carries everybody."""
    async with AsyncExitStack() as exits:
        running = {name: await exits.enter_async_context(backend(**options)) for name, options in backends.items()}
        hosted = await exits.enter_async_context(
            host(
                RouterSettings(
                    listen="127.0.0.1:0",
                    backend=[f"{name}={one.server.target}" for name, one in running.items()],
                    probe_timeout_s=probe_timeout_s,
                    **{"keep_lengths": False, **settings},
                )
            )
        )
        channel = await exits.enter_async_context(open_channel(hosted.server.target))
        it = Stack(hosted, channel, running)
        count = sum(options.get("max_active", 4) for options in backends.values())
        await first_status(it.stub, lambda status: status.max_active == count)
        yield it
