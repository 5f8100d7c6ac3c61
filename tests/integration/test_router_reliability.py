"""A router whose backends fail, hang, restart or drain, and one that has more to do than it takes."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import router_pb2
from router_service.admission import Admission, AdmissionLimits
from router_service.backend import State
from service_kit.identity import Caller, Scope
from tests.integration.stub_backend import SLOW, StubBackend, answers, fails, hangs, request, router

INTERNAL = grpc.StatusCode.INTERNAL


async def entry(routed, name: str) -> router_pb2.BackendEntry:
    response = await routed.admin.ListBackends(router_pb2.ListBackendsRequest())
    return next(each for each in response.backends if each.name == name)


async def failure(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in call:
            pass
    return raised.value


def retry_after_s(error: grpc.aio.AioRpcError) -> float:
    for detail in rpc_status.from_call(error).details:
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            return retry.retry_delay.ToNanoseconds() / 1e9
    raise AssertionError("no RetryInfo")


async def rest(call) -> list[pb.GenerateResponse]:
    """Of an answer that was begun with `read`."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def half_open(routed) -> None:
    while (await entry(routed, "gpu")).breaker.state == router_pb2.BREAKER_STATE_OPEN:
        pass


async def served_by(routed) -> str:
    return (await routed.generate())[-1].finished.routing.backend


# Breakers


async def test_a_backend_that_fails_again_and_again_is_left_alone_and_tried_again():
    gpu, cpu = StubBackend(), StubBackend(SLOW)
    gpu.generate = fails(INTERNAL)
    with structlog.testing.capture_logs() as logs:
        async with router({"gpu": gpu, "cpu": cpu}, breaker_open_s=0.3) as routed:
            for _ in range(6):
                assert await served_by(routed) == "cpu"
            assert len(gpu.requests) == 3
            breaker = (await entry(routed, "gpu")).breaker
            assert (breaker.state, breaker.failures) == (router_pb2.BREAKER_STATE_OPEN, 3)
            assert 0 < breaker.retry_in_s <= 0.36
            assert (await entry(routed, "cpu")).breaker.state == router_pb2.BREAKER_STATE_CLOSED
            route = await routed.admin.Route(router_pb2.RouteRequest(request=request()))
            (out,) = [each.excluded for each in route.decision.candidates if each.excluded]
            assert out.startswith("failed 3 times without an answer; it is tried again in")

            gpu.generate = answers(1)
            await half_open(routed)
            assert await served_by(routed) == "gpu"
            assert (await entry(routed, "gpu")).breaker == router_pb2.Breaker(state="BREAKER_STATE_CLOSED")
    states = [(line["backend"], line["state"]) for line in logs if line["event"] == "breaker"]
    assert states == [("gpu", "open"), ("gpu", "closed")]


async def test_half_open_only_one_request_goes_there():
    gpu, cpu = StubBackend(), StubBackend(SLOW)
    gpu.generate = fails(INTERNAL)
    async with router({"gpu": gpu, "cpu": cpu}, breaker_open_s=0.05) as routed:
        for _ in range(3):
            await served_by(routed)
        await half_open(routed)
        gpu.generate, gpu.requests = hangs(), []
        trial = routed.inference.Generate(request())
        await gpu.wait(lambda stub: stub.hanging == 1)
        assert [await served_by(routed) for _ in range(3)] == ["cpu"] * 3
        assert len(gpu.requests) == 1

        # Its client goes: the place is free again, and nothing is known of the backend.
        trial.cancel()
        await routed.wait(lambda router: len(router.ledger) == 0)
        gpu.generate = answers(1)
        assert await served_by(routed) == "gpu"


async def test_a_trial_that_generates_is_answer_enough():
    gpu, cpu = StubBackend(), StubBackend(SLOW)
    gpu.generate = fails(INTERNAL)
    async with router({"gpu": gpu, "cpu": cpu}, breaker_open_s=0.05) as routed:
        for _ in range(3):
            await served_by(routed)
        await half_open(routed)
        gpu.generate, gpu.requests = hangs(after=1), []
        trial = routed.inference.Generate(request())
        await trial.read()
        gpu.push(
            requests=[
                pb.RequestStatus(
                    attempt_id=gpu.requests[0].attempt.id, phase=pb.REQUEST_PHASE_DECODE, generated_tokens=1
                )
            ]
        )
        breaker = routed.router.fleet.backends["gpu"].breaker
        await routed.wait(lambda router: not breaker.failures)
        gpu.release.set()


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_refused_requests_trip_nothing(code):
    gpu = StubBackend()
    gpu.generate = fails(code)
    async with router({"gpu": gpu}) as routed:
        for _ in range(5):
            assert (await failure(routed.inference.Generate(request()))).code() is code
        assert (await entry(routed, "gpu")).breaker == router_pb2.Breaker(state="BREAKER_STATE_CLOSED")


async def test_where_every_breaker_is_open_requests_go_on_being_tried():
    one, other = StubBackend(), StubBackend()
    one.generate = other.generate = fails(INTERNAL)
    async with router({"one": one, "other": other}, breaker_open_s=30) as routed:
        for _ in range(4):
            assert (await failure(routed.inference.Generate(request()))).code() is grpc.StatusCode.UNAVAILABLE
        for name in ("one", "other"):
            assert (await entry(routed, name)).breaker.state == router_pb2.BREAKER_STATE_OPEN
        one.generate = other.generate = answers(1)
        assert await served_by(routed) in ("one", "other")
        assert not (await routed.inference.Status(pb.StatusRequest())).status.draining


# Loss, stalls, restarts


async def test_a_restarted_backend_is_clean_and_back_soon_after_it_listens():
    stub = StubBackend()
    stub.generate = fails(INTERNAL)
    async with stub.serving():
        address = stub.target
        async with router({"gpu": address}, breaker_open_s=30) as routed:
            for _ in range(3):
                await failure(routed.inference.Generate(request()))
            assert (await entry(routed, "gpu")).breaker.state == router_pb2.BREAKER_STATE_OPEN
            await stub.server.stop(None)
            await tries_to_connect(address, 3)
            reborn = StubBackend()
            reborn.status.incarnation = "second"
            async with reborn.serving(address):
                began_s = time.monotonic()
                await routed.wait_state("gpu", State.SERVING)
                assert time.monotonic() - began_s < 2.0
                assert (await entry(routed, "gpu")).breaker.state == router_pb2.BREAKER_STATE_CLOSED
                assert await served_by(routed) == "gpu"


async def tries_to_connect(address: str, count: int) -> None:
    """Until so many connections to an address were refused: waits have grown by then."""
    done = asyncio.Event()
    tries = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tries
        tries += 1
        writer.close()
        if tries == count:
            done.set()

    host, port = address.split(":")
    async with await asyncio.start_server(refuse, host, int(port)):
        await done.wait()


async def test_a_status_stream_that_breaks_alone_gives_nothing_up():
    stub = StubBackend()
    async with router({"gpu": stub}) as routed:
        waiting = asyncio.create_task(routed.router.fleet.until_lost("gpu", "first"))
        stub.end_watches()
        await routed.wait_state("gpu", State.UNREACHABLE)
        await routed.wait_state("gpu", State.SERVING)
        assert not waiting.done()
        waiting.cancel()


async def test_silence_gives_up_what_runs_there():
    stub = StubBackend()
    async with router({"gpu": stub}, status_silence_s=0.2) as routed:
        why = await routed.router.fleet.until_lost("gpu", "first")
        assert why == "Backend gpu is lost: no Status for 0.2 s"


async def test_a_backend_without_progress_gets_no_work_until_it_has_some():
    stub = StubBackend()
    async with router({"gpu": stub, "cpu": StubBackend(SLOW)}, stall_s=5) as routed:
        waiting = asyncio.create_task(routed.router.fleet.until_lost("gpu", "first"))
        work = [pb.RequestStatus(attempt_id="x", phase=pb.REQUEST_PHASE_DECODE, remaining_decode_tokens=9)]
        stub.push(requests=work, seconds_since_progress=7.0)
        assert "no step has ended for 7 s" in await waiting
        assert (await entry(routed, "gpu")).state == router_pb2.BACKEND_STATE_UNREACHABLE
        assert await served_by(routed) == "cpu"
        stub.push(requests=[], seconds_since_progress=0.0)
        await routed.wait_state("gpu", State.SERVING)


# Drains


async def drain(routed, **fields) -> router_pb2.BackendEntry:
    return (await routed.admin.DrainBackend(router_pb2.DrainBackendRequest(backend="gpu", **fields))).backend


async def test_what_runs_on_past_the_grace_of_a_drain_goes_on_elsewhere():
    gpu, cpu = StubBackend(), StubBackend(SLOW)
    gpu.generate, cpu.generate = hangs(after=2), answers(2, 3)
    async with router({"gpu": gpu, "cpu": cpu}) as routed:
        call = routed.inference.Generate(request())
        ids = [(await call.read()).delta.token_ids[0] for _ in range(2)]
        assert (await drain(routed, grace_s=0.05)).state == router_pb2.BACKEND_STATE_DRAINING
        responses = await rest(call)
        assert ids + [id_ for response in responses for id_ in response.delta.token_ids] == [0, 1, 2, 3]
        assert responses[-1].finished.routing.backend == "cpu"
        assert list(cpu.requests[0].attempt.generated_token_ids) == [0, 1]
        await gpu.wait(lambda stub: stub.cancelled == 1)
        assert (await entry(routed, "gpu")).breaker.failures == 0


async def test_a_drain_taken_back_in_time_ends_nothing():
    gpu = StubBackend()
    gpu.generate = hangs(after=1)
    async with router({"gpu": gpu}) as routed:
        call = routed.inference.Generate(request())
        await call.read()
        await drain(routed, grace_s=3600)
        await drain(routed, undo=True)
        assert not routed.router.fleet._drain_timers
        await drain(routed, grace_s=3600)
        await drain(routed)
        assert not routed.router.fleet._drain_timers
        await drain(routed, undo=True)
        gpu.release.set()
        assert (await rest(call))[-1].finished.routing.continuations == 0


@pytest.mark.parametrize("grace_s", [-1.0, float("nan"), float("inf")])
async def test_a_grace_that_is_no_time_is_refused(grace_s):
    async with router({"gpu": StubBackend()}) as routed:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await drain(routed, grace_s=grace_s)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "grace_s" in raised.value.details()


async def test_a_router_that_is_told_to_stop_takes_nothing_new_and_ends_what_it_has():
    gpu = StubBackend()
    gpu.generate = hangs(after=1)
    async with router({"gpu": gpu}) as routed:
        call = routed.inference.Generate(request())
        await call.read()
        draining = asyncio.create_task(routed.server.drain())
        health = health_pb2_grpc.HealthStub(routed.channel)
        wanted = health_pb2.HealthCheckRequest(service="phaseroute.v1.RouterService")
        while (await health.Check(wanted)).status != health_pb2.HealthCheckResponse.NOT_SERVING:
            pass
        assert (await failure(routed.inference.Generate(request()))).code() is grpc.StatusCode.UNAVAILABLE
        gpu.release.set()
        assert (await rest(call))[-1].HasField("finished")
        await draining


# Bounds


async def test_a_router_that_is_full_refuses_at_once_and_says_when_to_come_back():
    gpu = StubBackend()
    gpu.generate = hangs(after=1)
    async with router({"gpu": gpu}, max_in_flight=2) as routed:
        calls = [routed.inference.Generate(request()) for _ in range(2)]
        for call in calls:
            await call.read()
        error = await failure(routed.inference.Generate(request()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-in-flight" in error.details()
        # Two answers of 16 tokens, by rates: some hundredths of a second, so the least that is told.
        assert 0 < retry_after_s(error) <= 1
        assert len(gpu.requests) == 2

        calls[0].cancel()
        await routed.wait(lambda router: router.admission.requests == 1)
        third = routed.inference.Generate(request())
        await third.read()
        gpu.release.set()
        for call in (calls[1], third):
            assert (await rest(call))[-1].HasField("finished")
        assert (routed.router.admission.requests, routed.router.admission.tokens) == (0, 0)


@pytest.mark.parametrize("sent", [0, 1])
async def test_who_gives_up_makes_room(sent):
    gpu = StubBackend()
    gpu.generate = hangs(after=sent)
    async with router({"gpu": gpu}, max_in_flight=5, max_in_flight_tokens=200) as routed:
        for number in range(1, 11):
            call = routed.inference.Generate(request())
            await gpu.wait(lambda stub, number=number: stub.hanging == number)
            call.cancel()
            await routed.wait(lambda router: len(router.ledger) == 0)
        await gpu.wait(lambda stub: stub.cancelled == 10)
        assert (routed.router.admission.requests, routed.router.admission.tokens) == (0, 0)


async def test_tokens_are_bounded_too():
    gpu = StubBackend()
    gpu.generate = hangs(after=1)
    async with router({"gpu": gpu}, max_in_flight_tokens=100) as routed:
        call = routed.inference.Generate(request(max_new_tokens=90))
        await call.read()
        error = await failure(routed.inference.Generate(request(max_new_tokens=90)))
        assert "--max-in-flight-tokens" in error.details()
        assert retry_after_s(error) > 0
        call.cancel()


async def test_a_request_that_fails_costs_its_client_nothing(monkeypatch):
    alice = Caller("alice", frozenset(Scope), tokens_per_minute=100)
    monkeypatch.setattr("router_service.servicer.current_caller", lambda: alice)
    gpu = StubBackend()
    gpu.generate = fails(grpc.StatusCode.RESOURCE_EXHAUSTED)
    async with router({"gpu": gpu}) as routed:
        routed.router.admission = Admission(AdmissionLimits(), finish_s=lambda *_: None, clock=lambda: 0.0)
        for _ in range(20):
            await failure(routed.inference.Generate(request(max_new_tokens=90)))
        gpu.generate = answers(*range(16))
        # Of 100 tokens it uses 2 for the prompt and 16 for the answer.
        await routed.generate(max_new_tokens=90)
        error = await failure(routed.inference.Generate(request(max_new_tokens=90)))
        assert "Client alice has used its 100 tokens a minute" in error.details()


# Whose request it is


async def test_probes_and_requests_carry_the_callers_salt(monkeypatch):
    alice = Caller("alice", frozenset({Scope.GENERATE}), cache_salt="pepper")
    monkeypatch.setattr("router_service.servicer.current_caller", lambda: alice)
    gpu = StubBackend()
    salts = []

    async def probe(asked, context):
        salts.append(asked.cache_salt)
        return 100, 0

    gpu.probe = probe
    async with router({"gpu": gpu}) as routed:
        claimed = pb.Attempt(client="bob", cache_salt="bob's", generated_token_ids=[1, 2])
        await routed.generate(attempt=claimed)
        await routed.inference.CacheProbe(pb.CacheProbeRequest(prompt=pb.Prompt(text="hello"), cache_salt="bob's"))
        await routed.admin.Route(router_pb2.RouteRequest(request=request(attempt=claimed)))
        assert salts == ["pepper"] * 3
        (sent,) = gpu.requests
        assert (sent.attempt.client, sent.attempt.cache_salt) == ("alice", "pepper")
