"""Cancels and deadlines, the client's and the service's own."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from phaseroute.v1 import inference_pb2 as pb
from tests.integration.kit import PATIENCE_S, ask, cancelled_inside, collect, delta, details_of, failure, probe, serving

pytestmark = pytest.mark.timeout(60)


async def test_a_local_cancel_does_not_leave_the_client_hanging() -> None:
    async def generate(request: object, context: object) -> AsyncIterator[pb.GenerateResponse]:
        yield delta("first")
        await cancelled_inside()

    async def cache_probe(request: object, context: object) -> pb.CacheProbeResponse:
        await cancelled_inside()
        raise AssertionError

    async with serving(Generate=generate, CacheProbe=cache_probe) as running:
        for error in (
            await failure(collect(running.stub.Generate(ask()))),
            await failure(running.stub.CacheProbe(probe())),
        ):
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert details_of(error)["ErrorInfo"].reason == "UNAVAILABLE"


@pytest.mark.parametrize("blocked_in", ["handler", "write"])
async def test_a_clients_cancel_runs_the_handlers_finally(blocked_in: str) -> None:
    entered, left = asyncio.Event(), asyncio.Event()

    async def generate(request: object, context: object) -> AsyncIterator[pb.GenerateResponse]:
        try:
            yield delta("first")
            entered.set()
            if blocked_in == "handler":
                await asyncio.Event().wait()
            while True:
                yield delta("x" * 1_000_000)
        finally:
            left.set()

    async with serving(Generate=generate) as running:
        call = running.stub.Generate(ask())
        await call.read()
        async with asyncio.timeout(PATIENCE_S):
            await entered.wait()
            call.cancel()
            await left.wait()
        # And the server is as good as new.
        assert (await running.stub.CacheProbe(probe())).prompt_tokens == 2


async def test_a_deadline_runs_the_handlers_finally() -> None:
    left = asyncio.Event()

    async def cache_probe(request: object, context: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    async with serving(CacheProbe=cache_probe) as running:
        error = await failure(running.stub.CacheProbe(probe(), timeout=0.1))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(PATIENCE_S):
            await left.wait()


async def test_a_generator_is_closed_before_the_call_ends() -> None:
    order: list[str] = []

    async def generate(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[object]:
        context.add_done_callback(lambda _: order.append("call over"))
        try:
            yield "not a message"
        finally:
            for _ in range(20):
                await asyncio.sleep(0)  # cleaning up takes a while
            order.append("generator closed")

    async with serving(Generate=generate) as running:
        await failure(collect(running.stub.Generate(ask())))
        await running.server.drain()
    assert order == ["generator closed", "call over"]
