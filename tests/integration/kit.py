"""A server with handlers of the test's choosing, and the calls to it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from service_kit.channels import open_channel
from service_kit.peer_channel import PeerSecurity
from service_kit.protection import Protection
from service_kit.serve import Server, Service
from service_kit.telemetry import Telemetry

INFERENCE = "phaseroute.v1.InferenceService"
PATIENCE_S = 10.0
"""Nothing here takes a second; a call that hangs fails its test after this."""

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Running:
    """A server and a channel to it."""

    server: Server
    channel: grpc.aio.Channel
    stub: pb_grpc.InferenceServiceStub
    health: health_pb2_grpc.HealthStub


@asynccontextmanager
async def serving(
    *,
    address: str = "127.0.0.1:0",
    telemetry: Telemetry | None = None,
    protection: Protection | None = None,
    security: PeerSecurity | None = None,
    drain_grace_s: float = PATIENCE_S,
    on_drain: Callable[[], Awaitable[None]] | None = None,
    **handlers: Callable[..., object],
) -> AsyncIterator[Running]:
    """A server whose InferenceService has these handlers and otherwise echoes; `security` is the channel's."""
    async with (
        Server(
            [inference(**handlers)],
            address=address,
            telemetry=telemetry,
            protection=protection,
            drain_grace_s=drain_grace_s,
            on_drain=on_drain,
        ) as server,
        open_channel(server.target, security) as channel,
    ):
        await server.set_serving(True)
        yield Running(server, channel, pb_grpc.InferenceServiceStub(channel), health_pb2_grpc.HealthStub(channel))


def inference(**handlers: Callable[..., object]) -> Service:
    servicer = pb_grpc.InferenceServiceServicer()
    for name, handler in {"Generate": echo, "CacheProbe": count, "Status": status, **handlers}.items():
        setattr(servicer, name, handler)
    return Service(INFERENCE, partial(pb_grpc.add_InferenceServiceServicer_to_server, servicer))


async def echo(request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:
    yield delta(request.prompt.text)
    yield pb.GenerateResponse(finished=pb.Finished(finish_reason=pb.FINISH_REASON_EOS))


async def count(request: pb.CacheProbeRequest, context: grpc.aio.ServicerContext) -> pb.CacheProbeResponse:
    return pb.CacheProbeResponse(prompt_tokens=len(request.prompt.text))


async def status(request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusResponse:
    return pb.StatusResponse(status=pb.BackendStatus(incarnation="i"))


def delta(text: str) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(text=text))


def ask(text: str = "hi") -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=pb.Prompt(text=text))


def probe(text: str = "hi") -> pb.CacheProbeRequest:
    return pb.CacheProbeRequest(prompt=pb.Prompt(text=text))


async def collect(call: grpc.aio.UnaryStreamCall) -> list[pb.GenerateResponse]:
    async with asyncio.timeout(PATIENCE_S):
        return [response async for response in call]


async def failure(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(PATIENCE_S):
            await call
    return caught.value


def details_of(error: grpc.aio.AioRpcError) -> dict[str, object]:
    found = {}
    rich = rpc_status.from_call(error)
    for detail in rich.details if rich else ():
        message = getattr(error_details_pb2, detail.TypeName().rpartition(".")[2])()
        assert detail.Unpack(message)
        found[message.DESCRIPTOR.name] = message
    return found


async def cancelled_inside() -> None:
    """What a call or task of ours that something cancelled looks like from outside."""
    task = asyncio.ensure_future(asyncio.Event().wait())
    asyncio.get_running_loop().call_soon(task.cancel)
    await task


@contextmanager
def listening_but_dead() -> Iterator[str]:
    """Connections are accepted by the kernel and never answered."""
    with socket.create_server(("127.0.0.1", 0)) as dead:
        yield f"127.0.0.1:{dead.getsockname()[1]}"
