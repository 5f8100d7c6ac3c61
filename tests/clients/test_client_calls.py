"""Both clients against the fake service, behind one adapter, so that each rule is written once."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import grpc
import pytest

from phaseroute.aio import AsyncClient
from phaseroute.client import Client
from phaseroute.errors import PhaserouteError
from phaseroute.results import Completion, Delta, Finished
from phaseroute.v1 import router_pb2
from tests.clients.fake_service import FakeService

WAIT_S = 10


class Blocking:
    """The blocking client behind awaitable names."""

    def __init__(self, target: str) -> None:
        self.client = Client(target)

    def __getattr__(self, name: str):
        async def call(*args, **options):
            return await asyncio.to_thread(getattr(self.client, name), *args, **options)

        return call

    async def events(self, *args, **options) -> list[Delta | Finished]:
        return await asyncio.to_thread(lambda: list(self.client.generate(*args, **options)))

    async def shut(self) -> None:
        self.client.close()


class Awaited:
    """The asyncio client under the same names."""

    def __init__(self, target: str) -> None:
        self.client = AsyncClient(target)

    def __getattr__(self, name: str):
        return getattr(self.client, name)

    async def events(self, *args, **options) -> list[Delta | Finished]:
        return [event async for event in self.client.generate(*args, **options)]

    async def shut(self) -> None:
        await self.client.close()


@pytest.fixture(params=[Blocking, Awaited])
async def client(request: pytest.FixtureRequest, target: str):
    adapter = request.param(target)
    yield adapter
    await adapter.shut()


async def test_a_stream_is_deltas_and_one_last_finished(client):
    *deltas, last = await client.events("echo a b c")
    assert deltas == [Delta("a", (10,)), Delta(" b", (11,)), Delta(" c", (12,))]
    assert isinstance(last, Finished)


async def test_complete_collects_the_stream(client):
    answer = await client.complete("echo a b c", max_new_tokens=3)
    assert isinstance(answer, Completion)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("a b c", (10, 11, 12), "length")
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens, answer.usage.generated_tokens) == (516, 496, 3)
    assert answer.timings.decode_s == 2.0
    assert answer.routing is not None
    assert answer.routing.predicted_ttft_s is None
    assert answer.routing.predicted_finish_s == 3.118


async def test_options_reach_the_wire(client, service: FakeService):
    await client.complete("echo x", max_new_tokens=0, temperature=0.0, stop="END", backend="fast", workload="chat")
    sent = service.requests[-1]
    assert sent.HasField("max_new_tokens")
    assert sent.sampling.HasField("temperature")
    assert not sent.sampling.HasField("top_p")
    assert (list(sent.stop), sent.routing.backend, sent.workload) == (["END"], "fast", "chat")


async def test_everything_else_answers(client):
    assert (await client.status()).max_active == 4
    assert (await client.probe([1, 2, 3])).reusable_tokens == 496
    assert (await client.route("echo x", policy="two_phase")).selected == "small"
    assert [entry.name for entry in await client.backends()] == ["fast", "small"]
    assert (await client.drain("fast")).state == router_pb2.BACKEND_STATE_DRAINING
    assert (await client.drain("fast", undo=True)).state == router_pb2.BACKEND_STATE_SERVING


async def test_a_refused_field_is_named(client):
    with pytest.raises(PhaserouteError, match="choose a value") as caught:
        await client.complete("refuse")
    error = caught.value
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p")
    assert error.reason == "INVALID_REQUEST"


async def test_an_overload_says_when_to_retry(client, service: FakeService):
    with pytest.raises(PhaserouteError) as caught:
        await client.complete("busy")
    assert (caught.value.code, caught.value.retry_after_s) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 1.5)
    assert len(service.requests) == 1


async def test_an_unknown_backend_is_not_found(client):
    with pytest.raises(PhaserouteError, match="choose from fast") as caught:
        await client.drain("slow")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND


async def test_an_error_without_words_gets_some(client):
    with pytest.raises(PhaserouteError, match="INTERNAL"):
        await client.complete("crash")


async def test_unavailable_before_the_first_token_is_retried(client, service: FakeService):
    assert (await client.complete("flaky a b")).text == "a b"
    assert len(service.requests) == 3


async def test_unavailable_after_the_first_token_is_not(client, service: FakeService):
    with pytest.raises(PhaserouteError) as caught:
        await client.complete("break")
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert len(service.requests) == 1


async def test_a_stream_without_its_last_message_is_an_error(client):
    with pytest.raises(PhaserouteError, match="last message"):
        await client.complete("truncated")


async def test_a_deadline_ends_the_call_on_both_sides(client, service: FakeService):
    with pytest.raises(PhaserouteError, match="time limit") as caught:
        await client.complete("hang", timeout_s=0.3)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await asyncio.to_thread(service.ended.wait, WAIT_S)


async def test_nobody_there(client):
    nobody = type(client)("127.0.0.1:1")
    with pytest.raises(PhaserouteError, match=r"No connection to 127\.0\.0\.1:1") as caught:
        await nobody.status()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    await nobody.shut()


class TestLeavingABlockingStreamHalfRead:
    @pytest.fixture
    def blocking(self, target: str) -> Iterator[Client]:
        with Client(target) as client:
            yield client

    def test_close(self, blocking: Client, service: FakeService):
        with blocking.generate("hang") as stream:
            assert next(stream) == Delta("waiting", (1,))
        assert service.ended.wait(WAIT_S)
        assert list(stream) == []

    def test_dropped(self, blocking: Client, service: FakeService):
        for _ in blocking.generate("hang"):
            break
        gc.collect()
        assert service.ended.wait(WAIT_S)


class TestLeavingAnAsyncStreamHalfRead:
    @pytest.fixture
    async def awaited(self, target: str):
        async with AsyncClient(target) as client:
            yield client

    async def test_close(self, awaited: AsyncClient, service: FakeService):
        async with awaited.generate("hang") as stream:
            assert await anext(stream) == Delta("waiting", (1,))
        assert await asyncio.to_thread(service.ended.wait, WAIT_S)
        assert [event async for event in stream] == []

    async def test_dropped(self, awaited: AsyncClient, service: FakeService):
        async for _ in awaited.generate("hang"):
            break
        gc.collect()
        assert await asyncio.to_thread(service.ended.wait, WAIT_S)

    async def test_reading_task_cancelled(self, awaited: AsyncClient, service: FakeService):
        reader = asyncio.create_task(awaited.complete("hang"))
        async with asyncio.timeout(WAIT_S):
            while not service.requests:  # noqa: ASYNC110 - the service runs in threads
                await asyncio.sleep(0.01)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await asyncio.to_thread(service.ended.wait, WAIT_S)

    async def test_closed_by_another_task_ends_the_reader_quietly(self, awaited: AsyncClient):
        stream = awaited.generate("hang")
        await anext(stream)

        async def read_on() -> list[Delta | Finished]:
            return [event async for event in stream]

        reader = asyncio.create_task(read_on())
        await asyncio.sleep(0)
        stream.close()
        assert await asyncio.wait_for(reader, WAIT_S) == []


async def test_decisions_are_watched_from_the_start(target: str):
    async with AsyncClient(target) as client, client.watch_decisions() as decisions:
        await decisions.wait_started()
        await client.complete("echo a")
        decided = await anext(decisions)
        outcome = await anext(decisions)
    assert isinstance(decided, router_pb2.Decision)
    assert isinstance(outcome, router_pb2.Outcome)
    assert decided.id == outcome.decision_id


def test_decisions_are_watched_from_the_start_blocking(target: str):
    with Client(target) as client, client.watch_decisions() as decisions:
        decisions.wait_started()
        client.complete("echo a")
        decided, outcome = next(decisions), next(decisions)
    assert isinstance(decided, router_pb2.Decision)
    assert isinstance(outcome, router_pb2.Outcome)
