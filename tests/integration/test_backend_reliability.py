"""The backend over gRPC when things go wrong: answers begun elsewhere, full queues, clients that do not read, drains,
engines that die or hang. Simulated engine."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from backend_service import runner as runner_module
from backend_service import servicer as servicer_module
from backend_service.engines.simulated import END_TOKEN, SimulatedEngine
from backend_service.host import host
from backend_service.request import Ended, Request
from backend_service.settings import BackendSettings
from backend_service.text import TextStream
from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from service_kit.channels import open_channel
from service_kit.identity import Caller, Scope
from service_kit.requests import Sampling
from tests.integration.backends import FAST, backend, collect, first_status, request

SLOW = {**FAST, "simulated_decode_ms": "1:20"}
ENDLESS = {"max_new_tokens": 3000, "ignore_eos": True}
ALICE = Caller("alice", frozenset({Scope.GENERATE, Scope.STATUS}), cache_salt="of alice", weight=2.0)
ROUTER = Caller("router", frozenset({Scope.GENERATE, Scope.STATUS, Scope.ROUTE}))
ADMIN = Caller("admin", frozenset({Scope.STATUS, Scope.ADMIN}))


def reason_of(error: grpc.aio.AioRpcError) -> str:
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in rpc_status.from_call(error).details)
    return info.reason


def retry_after_s(error: grpc.aio.AioRpcError) -> float:
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in rpc_status.from_call(error).details)
    return retry.retry_delay.ToTimedelta().total_seconds()


async def refused(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


async def ended(call) -> tuple[list[int], grpc.aio.AioRpcError]:
    """The tokens of a stream that is to break, and how it does."""
    tokens: list[int] = []
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            tokens += response.delta.token_ids
    except grpc.aio.AioRpcError as error:
        return tokens, error
    raise AssertionError("it ended well")


@pytest.fixture
def calling(monkeypatch):
    """Be this caller from now on."""
    return lambda caller: monkeypatch.setattr(servicer_module, "current_caller", lambda: caller)


# -- answers that another backend began -----------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 20, 39])
async def test_an_answer_goes_on_on_a_fresh_backend_as_if_nothing_had_happened(cut):
    async with backend(**FAST) as first:
        whole = await first.generate("Hello", max_new_tokens=40, ignore_eos=True)
    attempt = pb.Attempt(id="second", generated_token_ids=whole.token_ids[:cut])
    async with backend(**FAST) as second:
        rest = await second.generate("Hello", max_new_tokens=40, ignore_eos=True, attempt=attempt)
    assert rest.token_ids == whole.token_ids[cut:]
    assert rest.text == whole.text[cut:]
    usage = rest.finished.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens) == (5, 0, 40)


async def test_it_goes_on_on_the_same_backend_from_its_cache():
    async with backend(**FAST) as server:
        whole = await server.generate("Hello there", max_new_tokens=40, ignore_eos=True)
        attempt = pb.Attempt(generated_token_ids=whole.token_ids[:20])
        rest = await server.generate("Hello there", max_new_tokens=40, ignore_eos=True, attempt=attempt)
    assert rest.token_ids == whole.token_ids[20:]
    assert rest.finished.usage.cached_tokens == 11


@pytest.mark.parametrize(
    ("generated", "options", "reason"),
    [
        (list(b"abc"), {"max_new_tokens": 3}, "LENGTH"),
        (list(b"abSTOP"), {"stop": ["STOP"]}, "STOP"),
        ([*b"ab", END_TOKEN], {}, "EOS"),
    ],
)
async def test_an_answer_of_which_only_the_end_was_lost_ends_without_the_engine(
    monkeypatch, generated, options, reason
):
    monkeypatch.setattr(SimulatedEngine, "admit", lambda *args, **options: pytest.fail("the engine was asked"))
    async with backend(**FAST) as server:
        answer = await server.generate("Hello", attempt=pb.Attempt(generated_token_ids=generated), **options)
    assert (answer.reason, answer.token_ids, answer.text) == (reason, [], "")
    assert answer.finished.usage.generated_tokens == len(generated)
    assert answer.finished.usage.prompt_tokens == 5


async def test_an_id_that_is_no_token_is_named():
    async with backend(**FAST) as server:
        error = await refused(server.generate("Hello", attempt=pb.Attempt(generated_token_ids=[1, 999])))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "attempt.generated_token_ids[1]" in error.details()


async def test_status_counts_what_must_be_computed_again():
    async with backend(**SLOW, max_active=1) as server:
        running = server.stub.Generate(request("running", attempt=pb.Attempt(id="one"), **ENDLESS))
        await server.wait_status(lambda status: len(status.requests) == 1)
        attempt = pb.Attempt(id="two", generated_token_ids=b"so far", reusable_tokens=0)
        waiting = server.stub.Generate(request("p" * 50, attempt=attempt, **ENDLESS))
        status = await server.wait_status(lambda status: len(status.requests) == 2)
        running.cancel()
        waiting.cancel()
    two = status.requests[1]
    assert (two.prompt_tokens, two.generated_tokens) == (50, 6)
    assert (two.remaining_prefill_tokens, two.remaining_decode_tokens) == (56, 2994)


# -- who asks -------------------------------------------------------------------------------------------------------


async def test_an_attempt_is_heeded_only_from_a_router(calling):
    attempt = pb.Attempt(id="mine", generated_token_ids=b"abc", reusable_tokens=3, client="bob", cache_salt="of bob")
    async with backend(**SLOW) as server:
        calling(ALICE)
        call = server.stub.Generate(request("Hello", attempt=attempt, workload="chat", **ENDLESS))
        await server.wait_status(lambda status: bool(status.requests))
        calling(ADMIN)
        (seen,) = (await server.status()).requests
        call.cancel()
        assert (seen.client, seen.prompt_tokens) == ("alice", 5)
        assert seen.attempt_id not in ("", "mine")
        assert seen.generated_tokens + seen.remaining_decode_tokens == 3000
        await server.wait_status(lambda status: not status.requests)
        calling(ROUTER)
        call = server.stub.Generate(request("Hello", attempt=replace_salt(attempt, ""), **ENDLESS))
        status = await server.wait_status(lambda status: bool(status.requests))
        call.cancel()
        assert (status.requests[0].client, status.requests[0].attempt_id) == ("bob", "mine")


def replace_salt(attempt: pb.Attempt, salt: str) -> pb.Attempt:
    other = pb.Attempt()
    other.CopyFrom(attempt)
    other.cache_salt = salt
    return other


async def test_clients_see_of_each_others_requests_only_that_they_are_there(calling):
    plain = replace(ALICE, cache_salt="")
    async with backend(**SLOW, max_active=1) as server:
        calls = []
        for count, name in enumerate(("alice", "bob"), 1):
            calling(replace(plain, name=name))
            calls.append(server.stub.Generate(request(name, workload="chat", **ENDLESS)))
            await server.wait_status(lambda status, count=count: len(status.requests) == count)
        for caller, shown in (
            (plain, [True, False]),
            (replace(plain, name="bob"), [False, True]),
            (replace(plain, name="carol"), [False, False]),
            (ROUTER, [True, True]),
            (ADMIN, [True, True]),
        ):
            calling(caller)
            for status in (await server.status(), await server.wait_status(lambda status: True)):
                for entry, name, whole in zip(status.requests, ("alice", "bob"), shown, strict=True):
                    assert entry.remaining_decode_tokens > 0
                    assert (entry.client, entry.workload) == ((name, "chat") if whole else ("", ""))
                    assert bool(entry.attempt_id) == whole
        for call in calls:
            call.cancel()


async def test_prompts_are_looked_up_with_the_salt_of_whoever_asks(calling, monkeypatch):
    salts = []
    monkeypatch.setattr(SimulatedEngine, "probe", lambda self, tokens, cache_salt="": salts.append(cache_salt) or 0)
    async with backend(**FAST) as server:
        for caller in (ALICE, ROUTER):
            calling(caller)
            await server.stub.CacheProbe(pb.CacheProbeRequest(prompt=pb.Prompt(text="Hi"), cache_salt="of bob"))
    assert salts == ["of alice", "of bob"]


async def test_prompts_are_tokenized_with_the_salt_of_whoever_asks(calling, monkeypatch):
    """Engines remember token ids by salt: how soon they are there must not tell what others have sent."""
    prepare, salts = SimulatedEngine.prepare, []

    def recording(self, prompt, cache_salt=""):
        salts.append(cache_salt)
        return prepare(self, prompt, cache_salt)

    monkeypatch.setattr(SimulatedEngine, "prepare", recording)
    async with backend(**FAST) as server:
        for caller in (ALICE, ROUTER):
            calling(caller)
            for prompt in ("Hi", [1, 2]):
                await server.generate(prompt, max_new_tokens=1, attempt=pb.Attempt(cache_salt="of bob"))
            await server.stub.CacheProbe(pb.CacheProbeRequest(prompt=pb.Prompt(text="Hi"), cache_salt="of bob"))
    assert salts == ["of alice"] * 3 + ["of bob"] * 3


# -- bounds ---------------------------------------------------------------------------------------------------------


async def test_more_tokens_than_may_wait_are_refused_with_the_time_until_there_is_room():
    async with backend(**SLOW, max_active=1, max_queued_tokens=1500) as server:
        options = {"max_new_tokens": 990, "ignore_eos": True}
        calls = [server.stub.Generate(request("p" * 10, **options))]
        await server.wait_status(lambda status: any(entry.generated_tokens for entry in status.requests))
        calls.append(server.stub.Generate(request("q" * 10, **options)))
        status = await server.wait_status(lambda status: len(status.requests) == 2)
        assert status.max_queued_tokens == 1500
        error = await refused(server.generate("r" * 10, **options))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 10 < retry_after_s(error) < 21  # 990 tokens at 20 ms, as far as they were not made yet
        calls.append(server.stub.Generate(request("s" * 10, max_new_tokens=400, ignore_eos=True)))
        await server.wait_status(lambda status: len(status.requests) == 3)
        for call in calls:
            call.cancel()


async def test_a_client_with_all_the_places_gives_one_up_to_another(calling):
    async with backend(**SLOW, max_active=1, max_queued=2) as server:
        calling(replace(ALICE, cache_salt=""))
        hers = []
        for count in (1, 2, 3):
            hers.append(server.stub.Generate(request("a", **ENDLESS)))
            await server.wait_status(lambda status, count=count: len(status.requests) == count)
        assert (await refused(server.generate("a", **ENDLESS))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        calling(replace(ALICE, name="bob", cache_salt=""))
        his = server.stub.Generate(request("b", **ENDLESS))
        _, error = await ended(hers[2])
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_after_s(error) > 0
        calling(ADMIN)
        status = await server.wait_status(lambda status: "bob" in [entry.client for entry in status.requests])
        assert [entry.client for entry in status.requests] == ["alice", "bob", "alice"]  # bob's is due first
        for call in (*hers, his):
            call.cancel()


async def test_a_call_that_ends_does_not_take_the_next_one_of_its_id_along():
    async with host(BackendSettings(listen="127.0.0.1:0", **FAST)) as hosted:
        runner = hosted.runner
        vocabulary = runner.engine.info.vocabulary

        def job() -> Request:
            return Request(
                id="same",
                tokens=[1, 2, 3],
                max_new_tokens=3,
                sampling=Sampling(),
                ignore_eos=True,
                text=TextStream(vocabulary.pieces),
                eos=vocabulary.eos,
                reusable_estimate=0,
                submitted_s=time.monotonic(),
            )

        async def over(stream) -> None:
            while not isinstance(await stream.get(), Ended):
                pass

        first = runner.submit(job())
        await over(first)
        second = runner.submit(job())
        runner.cancel("same", first)
        await asyncio.wait_for(over(second), 20)


# -- clients that do not read ---------------------------------------------------------------------------------------


async def test_a_client_that_does_not_read_does_not_hold_the_kv_cache():
    settings = {**FAST, "simulated_decode_ms": "1:0.2", "kv_tokens": 65536, "max_active": 1}
    limits = {"max_unread_tokens": 200, "unread_grace_s": 0.3}
    async with host(BackendSettings(listen="127.0.0.1:0", **settings, **limits)) as hosted:
        engine = hosted.runner.engine
        wide = tuple(
            piece * 2000 for piece in engine.info.vocabulary.pieces
        )  # 2 kB a token: what gRPC buffers is soon full
        engine.info = replace(engine.info, vocabulary=replace(engine.info.vocabulary, pieces=wide))
        async with open_channel(hosted.server.target) as channel:
            stub = pb_grpc.InferenceServiceStub(channel)
            call = stub.Generate(request("Hello", max_new_tokens=60_000, ignore_eos=True))
            assert (await call.read()).delta.token_ids
            status = await first_status(stub, lambda status: not status.requests)
            assert status.kv_cache.reserved_tokens == 0
            other = await collect(stub.Generate(request("Other", max_new_tokens=5, ignore_eos=True)))
            assert len(other.token_ids) == 5
            tokens, error = await ended(call)
    assert 200 < len(tokens) < 60_000
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reason_of(error) == "SLOW_READER"
    assert "read faster" in error.details()


# -- drain ----------------------------------------------------------------------------------------------------------


async def test_streams_that_a_drain_does_not_wait_for_end_with_a_status_to_go_on_from():
    async with backend(**SLOW, max_active=1, drain_grace_s=0.5) as server:
        running = asyncio.ensure_future(ended(server.stub.Generate(request("one", **ENDLESS))))
        await server.wait_status(lambda status: any(entry.generated_tokens for entry in status.requests))
        queued = asyncio.ensure_future(ended(server.stub.Generate(request("two", **ENDLESS))))
        await server.wait_status(lambda status: len(status.requests) == 2)
        drain = asyncio.ensure_future(server.server.drain())
        (tokens, first), (nothing, second) = await running, await queued
        await drain
    assert tokens
    assert not nothing
    for error in (first, second):
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(error) == "UNAVAILABLE"
        assert "another one" in error.details()


async def test_a_drain_ends_as_soon_as_the_streams_do():
    async with backend(**SLOW, drain_grace_s=600) as server:
        call = server.stub.Generate(request("one", max_new_tokens=10, ignore_eos=True))
        await server.wait_status(lambda status: bool(status.requests))
        drain = asyncio.ensure_future(server.server.drain())
        assert (await collect(call)).reason == "LENGTH"
        await asyncio.wait_for(drain, 20)


# -- engines that die or hang ---------------------------------------------------------------------------------------


async def test_a_dead_engine_fails_running_and_queued_and_new_requests_and_another_goes_on(monkeypatch):
    step, dies = SimulatedEngine.step, threading.Event()

    def step_or_die(self, slices):
        if dies.is_set():
            raise ZeroDivisionError
        return step(self, slices)

    async with backend(**FAST) as server:
        whole = await server.generate("one", max_new_tokens=500, ignore_eos=True)
    monkeypatch.setattr(SimulatedEngine, "step", step_or_die)
    async with backend(**SLOW, max_active=1) as server:
        running = asyncio.ensure_future(
            ended(server.stub.Generate(request("one", max_new_tokens=500, ignore_eos=True)))
        )
        await server.wait_status(lambda status: any(entry.generated_tokens > 3 for entry in status.requests))
        queued = asyncio.ensure_future(ended(server.stub.Generate(request("two", **ENDLESS))))
        await server.wait_status(lambda status: len(status.requests) == 2)
        dies.set()
        (tokens, first), (nothing, second) = await running, await queued
        third = await refused(server.generate("three"))
    for error in (first, second, third):
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.INTERNAL, "ENGINE_FAILED")
    assert tokens == whole.token_ids[: len(tokens)]
    assert not nothing
    dies.clear()
    async with backend(**FAST) as other:
        attempt = pb.Attempt(generated_token_ids=tokens)
        rest = await other.generate("one", max_new_tokens=500, ignore_eos=True, attempt=attempt)
    assert tokens + rest.token_ids == whole.token_ids


async def test_a_hung_engine_shows_and_does_not_keep_the_process(monkeypatch):
    step, hangs, released = SimulatedEngine.step, threading.Event(), threading.Event()

    def step_or_hang(self, slices):
        if hangs.is_set():
            released.wait(60)
        return step(self, slices)

    monkeypatch.setattr(SimulatedEngine, "step", step_or_hang)
    monkeypatch.setattr(runner_module, "LAST_STEP_S", 0.2)
    try:
        async with backend(**FAST, drain_grace_s=0.2) as server:
            await asyncio.sleep(0)
            assert (await server.status()).seconds_since_progress == 0
            hangs.set()
            stuck = asyncio.ensure_future(ended(server.stub.Generate(request("one", **ENDLESS))))
            first = await server.wait_status(lambda status: status.seconds_since_progress > 0.2)
            later = await server.wait_status(lambda status: status.seconds_since_progress > 1.2)
            assert len(first.requests) == len(later.requests) == 1
            assert (await server.stub.CacheProbe(pb.CacheProbeRequest(prompt=pb.Prompt(text="x")))).prompt_tokens == 1
            await asyncio.wait_for(server.server.drain(), 20)
            _, error = await stuck
        assert error.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        released.set()
