"""What a drain finishes, refuses and cuts off."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2

from phaseroute.v1 import inference_pb2 as pb
from tests.integration.kit import (
    INFERENCE,
    NOT_SERVING,
    PATIENCE_S,
    SERVING,
    ask,
    collect,
    delta,
    details_of,
    failure,
    probe,
    serving,
)

pytestmark = pytest.mark.timeout(60)


async def test_a_drain_finishes_streams_and_answers_observers() -> None:
    finish, told = asyncio.Event(), []

    async def generate(request: object, context: object) -> AsyncIterator[pb.GenerateResponse]:
        yield delta("first")
        await finish.wait()
        yield delta("last")

    async def watch_status(request: object, context: object) -> AsyncIterator[pb.WatchStatusResponse]:
        while True:
            yield pb.WatchStatusResponse()
            await asyncio.Event().wait()

    async def on_drain() -> None:
        # Health has changed before the service is told.
        told.append((await running.health.Check(health_pb2.HealthCheckRequest())).status)

    async with (
        serving(Generate=generate, WatchStatus=watch_status, on_drain=on_drain) as running,
        asyncio.timeout(PATIENCE_S),
    ):
        health = running.health.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        assert (await health.read()).status == SERVING
        # A stream without an end must not keep the drain from ending.
        watching = running.stub.WatchStatus(pb.WatchStatusRequest())
        await watching.read()
        stream = running.stub.Generate(ask())
        assert (await stream.read()).delta.text == "first"

        drain = asyncio.create_task(running.server.drain())
        assert (await health.read()).status == NOT_SERVING
        assert (await running.stub.Status(pb.StatusRequest())).status.incarnation == "i"
        assert (await running.health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
        await running.server.set_serving(True)
        assert (await running.health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
        refused = await failure(collect(running.stub.Generate(ask())))
        assert (refused.code(), "shutting down" in refused.details()) == (grpc.StatusCode.UNAVAILABLE, True)
        assert told == [NOT_SERVING]
        assert not drain.done()

        finish.set()
        assert (await stream.read()).delta.text == "last"
        assert await stream.code() is grpc.StatusCode.OK
        await drain
        assert await watching.code() is grpc.StatusCode.UNAVAILABLE
        assert (await failure(running.stub.Status(pb.StatusRequest()))).code() is grpc.StatusCode.UNAVAILABLE


async def test_what_is_left_after_the_grace_period_is_told_so() -> None:
    """With details, which gRPC's own end of a call has not: a router knows by them that it may go on elsewhere."""
    left, told = [], []

    async def generate(request: object, context: object) -> AsyncIterator[pb.GenerateResponse]:
        try:
            yield delta("first")
            await asyncio.Event().wait()
        finally:
            left.append("stream")

    async def cache_probe(request: object, context: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.append("unary")

    async with (
        serving(Generate=generate, CacheProbe=cache_probe, drain_grace_s=0.1) as running,
        asyncio.timeout(PATIENCE_S),
    ):
        stream = running.stub.Generate(ask())
        await stream.read()
        unary = running.stub.CacheProbe(probe())
        gone = running.stub.Generate(ask())
        await gone.read()
        gone.cancel()
        await running.server.drain()
        for error in (await failure(stream.read()), await failure(unary)):
            told.append((error.code(), details_of(error)["ErrorInfo"].reason, "another one" in error.details()))
    assert told == [(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", True)] * 2
    assert sorted(left) == ["stream", "stream", "unary"]


async def test_a_client_that_does_not_read_cannot_hold_up_the_end() -> None:
    left = asyncio.Event()

    async def generate(request: object, context: object) -> AsyncIterator[pb.GenerateResponse]:
        try:
            while True:
                yield delta("x" * 1_000_000)
        finally:
            left.set()

    async with serving(Generate=generate, drain_grace_s=0.1) as running, asyncio.timeout(PATIENCE_S):
        stream = running.stub.Generate(ask())
        await stream.read()
        await running.server.drain()
        await left.wait()
        assert (await failure(read_all(stream))).code() is grpc.StatusCode.UNAVAILABLE


async def read_all(stream: grpc.aio.UnaryStreamCall) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def test_an_idle_server_drains_at_once() -> None:
    async with serving(drain_grace_s=1000.0) as running:
        await running.stub.CacheProbe(probe())
        async with asyncio.timeout(PATIENCE_S):
            await running.server.drain()


async def test_a_failing_on_drain_is_heard_and_the_server_stops() -> None:
    async def on_drain() -> None:
        raise RuntimeError("could not say goodbye")

    async with serving(on_drain=on_drain) as running:
        with pytest.raises(RuntimeError, match="goodbye"):
            await running.server.drain()
        assert (await failure(running.stub.CacheProbe(probe()))).code() is grpc.StatusCode.UNAVAILABLE
