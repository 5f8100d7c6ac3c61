"""An OTLP receiver on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP receiver that keeps what it gets."""

    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []

    async def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: object) -> object:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)
