"""grpc.health.v1 for a server's services: one switch, real Watch."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

SERVICE_NAME: str = health.SERVICE_NAME

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """The health of "" (the whole server) and of each service, always equal."""

    def __init__(self, services: Sequence[str]) -> None:
        self._names = ("", *services)
        self._servicer = health.aio.HealthServicer()

    async def register(self, server: grpc.aio.Server) -> None:
        """Add the service to a server that is not started yet; everything is NOT_SERVING."""
        # The servicer starts "" as SERVING.
        await self.set_serving(False)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self, serving: bool) -> None:
        """Tell all watchers. Without effect after `retire`."""
        for name in self._names:
            await self._servicer.set(name, _SERVING if serving else _NOT_SERVING)

    async def retire(self) -> None:
        """NOT_SERVING for good: the server is about to stop."""
        await self._servicer.enter_graceful_shutdown()
