"""What one client can take of a server, and that the others go on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from service_kit.calls import CallLimits
from service_kit.channels import ConnectionLimits, open_channel
from service_kit.identity import Scope
from service_kit.protection import Protection
from tests.integration.kit import PATIENCE_S, Running, ask, collect, delta, details_of, failure, probe, serving
from tests.tokens import bearer, write_tokens

pytestmark = pytest.mark.timeout(60)

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


async def forever(request: object, context: object) -> AsyncIterator[pb.GenerateResponse]:
    yield delta("first")
    await asyncio.Event().wait()


async def watch(request: object, context: object) -> AsyncIterator[pb.WatchStatusResponse]:
    yield pb.WatchStatusResponse()
    await asyncio.Event().wait()


async def started(call: grpc.aio.UnaryStreamCall) -> grpc.aio.UnaryStreamCall:
    async with asyncio.timeout(PATIENCE_S):
        assert await call.read() is not grpc.aio.EOF
    return call


async def ends(running: Running, call: grpc.aio.UnaryStreamCall) -> None:
    """Cancel a call, and wait until the server has noticed."""
    call.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await running.server._calls.wait_idle()


def limited(token_file: Path | None = None, **limits: int) -> Protection:
    return Protection(token_file=token_file, calls=CallLimits(**limits))


async def test_calls_beyond_the_limit_are_told_when_to_come_again() -> None:
    async with serving(protection=limited(calls=2), Generate=forever, WatchStatus=watch) as running:
        [first, second] = [await started(running.stub.Generate(ask())) for _ in range(2)]
        for call in (collect(running.stub.Generate(ask())), running.stub.CacheProbe(probe())):
            error = await failure(call)
            assert (error.code(), "2 calls already" in error.details()) == (EXHAUSTED, True)
            assert details_of(error)["RetryInfo"].retry_delay.seconds == 1
        # Observers are counted apart.
        assert (await running.stub.Status(pb.StatusRequest())).status
        first.cancel()
        await ends(running, second)
        assert (await running.stub.CacheProbe(probe())).prompt_tokens == 2


async def test_observers_beyond_the_limit_are_refused_and_requests_are_not() -> None:
    async with serving(protection=limited(observers=2), WatchStatus=watch) as running:
        watches = [await started(running.stub.WatchStatus(pb.WatchStatusRequest())) for _ in range(2)]
        error = await failure(running.stub.Status(pb.StatusRequest()))
        assert (error.code(), "watch or ask" in error.details()) == (EXHAUSTED, True)
        assert await collect(running.stub.Generate(ask()))
        for each in watches:
            each.cancel()


async def test_one_client_cannot_take_all_places_but_a_router_may(tmp_path: Path) -> None:
    clients = {
        "alice": [Scope.GENERATE],
        "bob": [Scope.GENERATE],
        "router": [Scope.GENERATE, Scope.ROUTE],
    }
    path = write_tokens(tmp_path / "tokens.toml", clients)
    async with serving(protection=limited(path, calls=4), Generate=forever) as running:

        async def begin(name: str) -> grpc.aio.UnaryStreamCall:
            return await started(running.stub.Generate(ask(), metadata=bearer(name)))

        hers = [await begin("alice") for _ in range(2)]
        error = await failure(collect(running.stub.Generate(ask(), metadata=bearer("alice"))))
        assert (error.code(), "alice has 2 calls here already" in error.details()) == (EXHAUSTED, True)
        his = await begin("bob")
        his.cancel()
        hers[0].cancel()
        await ends(running, hers[1])
        for call in [await begin("router") for _ in range(4)]:
            call.cancel()


async def test_refused_calls_leave_nothing_behind() -> None:
    async with serving(protection=limited(calls=1), Generate=forever) as running:
        stream = await started(running.stub.Generate(ask()))
        await asyncio.gather(*(failure(running.stub.CacheProbe(probe())) for _ in range(100)))
        await ends(running, stream)
        for _ in range(3):
            assert (await running.stub.CacheProbe(probe())).prompt_tokens == 2


async def test_calls_that_one_connection_may_not_have_wait_and_others_go_on() -> None:
    protection = Protection(connections=ConnectionLimits(streams=2))
    async with serving(protection=protection, Generate=forever) as running:
        streams = [await started(running.stub.Generate(ask())) for _ in range(2)]
        waits = running.stub.CacheProbe(probe())
        async with open_channel(running.server.target) as other:
            assert (await pb_grpc.InferenceServiceStub(other).CacheProbe(probe())).prompt_tokens == 2
        assert not waits.done()
        for each in streams:
            each.cancel()
        assert (await waits).prompt_tokens == 2


async def test_connections_beyond_the_limit_are_closed_and_the_others_go_on() -> None:
    protection = Protection(connections=ConnectionLimits(connections=2))
    async with serving(protection=protection) as running, AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(open_channel(running.server.target)) for _ in range(2)]
        first, second = [pb_grpc.InferenceServiceStub(channel) for channel in channels]
        assert (await running.stub.CacheProbe(probe())).prompt_tokens == 2
        assert (await first.CacheProbe(probe())).prompt_tokens == 2
        assert (await failure(second.CacheProbe(probe()))).code() is grpc.StatusCode.UNAVAILABLE
        assert (await first.CacheProbe(probe())).prompt_tokens == 2
        await channels[0].close()
        assert (await second.CacheProbe(probe(), wait_for_ready=True, timeout=PATIENCE_S)).prompt_tokens == 2


@pytest.mark.parametrize("kind", ["one value", "many"])
async def test_large_metadata_is_refused(kind: str) -> None:
    metadata = [("x", "y" * 20_000)] if kind == "one value" else [(f"x{n}", "y" * 100) for n in range(200)]
    async with serving() as running:
        for _ in range(5):
            error = await failure(running.stub.CacheProbe(probe(), metadata=metadata))
            assert (error.code(), "metadata size" in error.details()) == (EXHAUSTED, True)
        assert (await running.stub.CacheProbe(probe(), metadata=[("x", "y" * 8000)])).prompt_tokens == 2


async def test_a_connection_that_says_nothing_is_closed() -> None:
    protection = Protection(connections=ConnectionLimits(handshake_s=0.2))
    async with serving(protection=protection) as running, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
        await reader.read()  # until it is closed
        writer.close()
        assert (await running.stub.CacheProbe(probe())).prompt_tokens == 2


async def test_an_idle_connection_is_closed_and_a_silent_call_is_not_idle() -> None:
    go_on = asyncio.Event()

    async def generate(request: object, context: object) -> AsyncIterator[pb.GenerateResponse]:
        await go_on.wait()
        yield delta("late")

    protection = Protection(connections=ConnectionLimits(idle_s=0.2))
    async with (
        serving(protection=protection, Generate=generate) as running,
        open_channel(running.server.target) as idle,
        asyncio.timeout(PATIENCE_S),
    ):
        stub = pb_grpc.InferenceServiceStub(idle)
        stream = running.stub.Generate(ask())
        await stub.CacheProbe(probe())
        while (state := idle.get_state()) is grpc.ChannelConnectivity.READY:
            await idle.wait_for_state_change(state)
        go_on.set()
        assert (await stream.read()).delta.text == "late"
        assert (await stub.CacheProbe(probe())).prompt_tokens == 2


async def test_a_smaller_limit_for_messages() -> None:
    async with serving(protection=Protection(connections=ConnectionLimits(message_bytes=1000))) as running:
        error = await failure(running.stub.CacheProbe(probe("x" * 2000)))
        assert error.code() is EXHAUSTED
        assert (await running.stub.CacheProbe(probe("x" * 900))).prompt_tokens == 900
