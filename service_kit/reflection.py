"""Server reflection, in both versions that tools ask for."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA: str = reflection.SERVICE_NAME


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Let grpcurl and `buf curl` list these services and describe their messages."""
    # V1 is served but not listed: its descriptors are not installed, and tools fail on a name that they cannot look up.
    servicer = reflection.aio.ReflectionServicer((*services, V1ALPHA))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    # grpcio-reflection has the old package name only; the messages of both versions are the same on the wire.
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}) for name in (V1, V1ALPHA)]
    )
