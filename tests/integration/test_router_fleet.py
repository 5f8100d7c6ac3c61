"""How a router follows its backends, and what it tells of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import router_pb2
from router_service.backend import State
from router_service.snapshot import Snapshot
from tests.integration.stub_backend import SLOW, StubBackend, hangs, request, router


async def listed(routed) -> dict[str, router_pb2.BackendEntry]:
    response = await routed.admin.ListBackends(router_pb2.ListBackendsRequest())
    return {entry.name: entry for entry in response.backends}


async def generate_error(routed, **options) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await routed.generate(**options)
    return raised.value


async def test_an_older_sequence_is_ignored():
    stub = StubBackend()
    stub.push(sequence=10)
    async with router({"gpu": stub}) as routed:
        backend = routed.router.fleet.backends["gpu"]
        stub.push(sequence=9, draining=True)
        stub.push(sequence=11, draining=False, max_active=7)
        await routed.wait(lambda router: backend.snapshot.max_active == 7)

        assert (backend.snapshot.sequence, backend.state) == (11, State.SERVING)


async def test_restarted_backend_is_followed_again():
    stub = StubBackend()
    async with stub.serving():
        address = stub.target
        async with router({"gpu": address}) as routed:
            # The same port, another process.
            reborn = StubBackend()
            reborn.status.incarnation = "second"
            await stub_stops(stub, routed)
            async with reborn.serving(address):
                await routed.wait_state("gpu", State.SERVING)
                assert routed.router.fleet.backends["gpu"].snapshot.incarnation == "second"
                assert (await routed.generate())[-1].finished.routing.backend == "gpu"


async def stub_stops(stub: StubBackend, routed) -> None:
    await stub.server.stop(None)
    await routed.wait_state("gpu", State.UNREACHABLE)
    error = await generate_error(routed)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "gpu is out: unreachable (UNAVAILABLE" in error.details()


async def test_status_is_polled_where_it_cannot_be_watched():
    stub = StubBackend()
    stub.watches = False
    async with router({"gpu": stub}, status_poll_s=0.01) as routed:
        stub.push(max_active=9)
        await routed.wait(lambda router: router.fleet.backends["gpu"].snapshot.max_active == 9)
        assert (await routed.generate())[-1].finished.routing.backend == "gpu"

        await stub.server.stop(None)
        await routed.wait_state("gpu", State.UNREACHABLE)


async def test_silent_backend_is_unreachable_until_it_speaks():
    stub = StubBackend()
    async with router({"gpu": stub}, status_silence_s=0.2) as routed:
        # It answers each new stream once and is silent then.
        await routed.wait_state("gpu", State.UNREACHABLE)
        assert (await listed(routed))["gpu"].detail in ("no Status for 0.2 s", "")
        await routed.wait_state("gpu", State.SERVING)


async def test_address_that_never_answers_delays_nobody():
    # Takes connections and says nothing.
    silent = await asyncio.start_server(lambda reader, writer: asyncio.Event().wait(), "127.0.0.1", 0)
    target = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with router({"dead": target, "live": StubBackend()}, ready=False) as routed:
        await routed.wait_state("live", State.SERVING)
        assert (await routed.generate())[-1].finished.routing.backend == "live"
        assert (await listed(routed))["dead"].state == router_pb2.BACKEND_STATE_CONNECTING
    silent.close()


async def test_nobody_there_is_unavailable_at_once():
    async with router({"dead": "127.0.0.1:1", "gone": "unix:/nowhere"}, ready=False) as routed:
        began = time.monotonic()
        error = await generate_error(routed)

        assert time.monotonic() - began < 2
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "dead is out: connecting" in error.details()
        assert "gone is out: connecting" in error.details()
        decision = (await routed.admin.Route(router_pb2.RouteRequest(request=request()))).decision
        assert (decision.selected, len(decision.candidates)) == ("", 2)
        assert decision.reason.startswith("No backend can take this request")


async def test_nobody_there_names_every_one_of_many():
    async with router({f"backend-{i}": "127.0.0.1:1" for i in range(8)}, ready=False) as routed:
        for i in range(8):
            await routed.wait(lambda router, i=i: "UNAVAILABLE" in router.fleet.backends[f"backend-{i}"].detail)
        error = await generate_error(routed)

        for i in range(8):
            assert f"backend-{i} is out: connecting" in error.details()


async def test_backend_that_is_no_longer_followed_gets_no_work(monkeypatch):
    stub = StubBackend()
    async with router({"gpu": stub}) as routed:

        def bug(status):
            raise AssertionError("a bug")

        monkeypatch.setattr(Snapshot, "of", bug)
        stub.push()
        await routed.wait_state("gpu", State.UNREACHABLE)
        assert "restart the router" in (await listed(routed))["gpu"].detail


async def test_drain_and_its_undoing():
    stub = StubBackend()
    stub.generate = hangs(after=1)
    async with router({"gpu": stub, "cpu": StubBackend(SLOW)}) as routed:
        running = routed.inference.Generate(request())
        await running.read()

        drained = await routed.admin.DrainBackend(router_pb2.DrainBackendRequest(backend="gpu"))
        assert drained.backend.state == router_pb2.BACKEND_STATE_DRAINING
        assert (await routed.generate())[-1].finished.routing.backend == "cpu"
        stub.release.set()
        assert (await running.read()).delta.token_ids == [99]

        undone = await routed.admin.DrainBackend(router_pb2.DrainBackendRequest(backend="gpu", undo=True))
        assert undone.backend.state == router_pb2.BACKEND_STATE_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await routed.admin.DrainBackend(router_pb2.DrainBackendRequest(backend="tpu"))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_backend_that_drains_gets_no_work():
    draining, other = StubBackend(), StubBackend(SLOW)
    async with router({"draining": draining, "other": other}) as routed:
        draining.push(draining=True)
        await routed.wait_state("draining", State.DRAINING)

        assert (await routed.generate())[-1].finished.routing.backend == "other"
        assert (await listed(routed))["draining"].detail == "it says so itself"


async def test_health_follows_the_fleet():
    stub = StubBackend()
    async with router({"gpu": stub}) as routed:
        call = health_pb2_grpc.HealthStub(routed.channel).Watch(
            health_pb2.HealthCheckRequest(service="phaseroute.v1.RouterService")
        )

        async def becomes(status):
            while (await call.read()).status != status:
                pass

        await becomes(health_pb2.HealthCheckResponse.SERVING)
        stub.push(draining=True)
        await becomes(health_pb2.HealthCheckResponse.NOT_SERVING)
        stub.push(draining=False)
        await becomes(health_pb2.HealthCheckResponse.SERVING)
        call.cancel()


async def differences_logged(one: StubBackend, other: StubBackend) -> list[dict]:
    """What a router of the two says of unequal backends while Status after Status comes in."""
    with structlog.testing.capture_logs() as logs:
        async with router({"one": one, "other": other}) as routed:
            for max_active in (5, 6):
                one.push(max_active=max_active)
                await routed.wait(lambda router, n=max_active: router.fleet.backends["one"].snapshot.max_active == n)
    return [line for line in logs if line["event"].startswith("one model name")]


async def test_equal_backends_are_nothing_to_tell():
    assert await differences_logged(StubBackend(), StubBackend()) == []


async def test_one_model_name_with_different_weights_is_warned_of_once():
    other = StubBackend()
    other.status.model.fingerprint = "else"

    (line,) = await differences_logged(StubBackend(), other)

    assert line["log_level"] == "warning"
    assert "interchangeable unless a request demands a precision" in line["event"]
    assert line["fingerprints"] == {"one": "f", "other": "else"}


async def test_one_model_name_in_different_precisions_is_told_once():
    (line,) = await differences_logged(StubBackend(), StubBackend(precision="bf16"))

    assert line["log_level"] == "info"
    assert "interchangeable unless a request demands a precision" in line["event"]
    assert line["precisions"] == {"one": "q4_1", "other": "bf16"}


async def test_one_model_name_with_different_tokenizers_is_warned_of_once():
    # Its weights are of no interest: it gets no work beside the other.
    other = StubBackend(tokenizer="else", precision="bf16")
    other.status.model.fingerprint = "else"

    (line,) = await differences_logged(StubBackend(), other)

    assert line["log_level"] == "warning"
    assert "only the backends in use get work" in line["event"]
    assert line["tokenizers"] == {"one": "t", "other": "else"}
    assert line["used"] == ("one",)


async def test_a_difference_that_changes_is_told_again():
    one, other = StubBackend(), StubBackend(precision="bf16")
    with structlog.testing.capture_logs() as logs:
        async with router({"one": one, "other": other}) as routed:
            for number, precision in enumerate(("f32", "q4_1", "f32"), start=5):
                other.status.model.precision = precision
                other.push(max_active=number)
                await routed.wait(lambda router, n=number: router.fleet.backends["other"].snapshot.max_active == n)

    told = [line["precisions"]["other"] for line in logs if line["event"].startswith("one model name")]
    assert told == ["bf16", "f32", "f32"]


async def test_list_shows_precisions_and_who_is_left_out():
    backends = {
        "a": StubBackend(precision="q4_1"),
        "b": StubBackend(precision="bf16"),
        "c": StubBackend(tokenizer="else"),
        "d": StubBackend(tokenizer="other's", model="other"),
    }
    async with router(backends) as routed:
        entries = await listed(routed)
        assert {name: entry.status.model.precision for name, entry in entries.items()} == {
            "a": "q4_1", "b": "bf16", "c": "q4_1", "d": "q4_1",
        }  # fmt: skip
        assert {name for name, entry in entries.items() if entry.left_out} == {"c"}
        assert "its tokenizer is else, the one in use for this model is t" in entries["c"].left_out
        assert entries["c"].state == router_pb2.BACKEND_STATE_SERVING

        backends["c"].push(draining=True)
        await routed.wait_state("c", State.DRAINING)
        assert (await listed(routed))["c"].left_out == ""


# A router's own Status, and a router behind a router


async def test_status_is_the_fleets():
    fast, slow = StubBackend(), StubBackend(SLOW, context_tokens=8192, max_active=2)
    fast.status.kv_cache.capacity_tokens = 1000
    slow.status.kv_cache.capacity_tokens = 500
    for stub, host_tokens in ((fast, 30), (slow, 4)):
        stub.status.kv_cache.host_tokens = host_tokens
        stub.status.kv_cache.host_capacity_tokens = 10 * host_tokens
        stub.status.scheduling_policy = "priority"
        stub.status.max_queued_tokens = 1000
        stub.status.seconds_since_progress = 3.0
    work = pb.RequestStatus(attempt_id="other router's", phase=pb.REQUEST_PHASE_DECODE, priority=pb.PRIORITY_BATCH)
    fast.push(requests=[work])
    async with router({"fast": fast, "slow": slow}) as routed:
        status = (await routed.inference.Status(pb.StatusRequest())).status

        assert (status.engine.name, status.model.name, status.model.fingerprint) == ("router", "m", "f")
        assert (status.model.tokenizer_fingerprint, status.model.precision) == ("t", "q4_1")
        assert (status.max_active, status.max_queued, status.kv_cache.capacity_tokens) == (6, 16, 1500)
        assert status.model.context_tokens == 8192
        assert status.isolated_rates.decode_tokens_per_s == 293
        assert (status.kv_cache.host_tokens, status.kv_cache.host_capacity_tokens) == (34, 340)
        assert list(status.requests) == [work]
        assert status.scheduling_policy == "priority"
        assert (status.max_queued_tokens, status.seconds_since_progress) == (2000, 0)
        assert not status.draining
        later = (await routed.inference.Status(pb.StatusRequest())).status
        assert later.sequence > status.sequence
        assert later.incarnation == status.incarnation


async def test_status_is_silent_where_backends_differ():
    one, other = StubBackend(), StubBackend(tokenizer="else", precision="bf16")
    one.status.scheduling_policy, other.status.scheduling_policy = "fcfs", "priority"
    other.status.model.fingerprint = "else"
    async with router({"one": one, "other": other}) as routed:
        status = (await routed.inference.Status(pb.StatusRequest())).status
        assert status.scheduling_policy == ""
        assert (status.model.name, status.model.fingerprint) == ("m", "")
        assert (status.model.tokenizer_fingerprint, status.model.precision) == ("", "")


async def test_status_shows_the_priority_of_what_is_on_its_way():
    stub = StubBackend()
    stub.generate = hangs()
    async with router({"gpu": stub}) as routed:
        call = routed.inference.Generate(request(priority=pb.PRIORITY_BATCH))
        await stub.wait(lambda stub: stub.hanging == 1)
        (entry,) = (await routed.inference.Status(pb.StatusRequest())).status.requests
        assert (entry.phase, entry.priority) == (pb.REQUEST_PHASE_QUEUED, pb.PRIORITY_BATCH)
        call.cancel()


async def test_status_without_a_serving_backend_takes_no_work():
    async with router({"dead": "127.0.0.1:1"}, ready=False) as routed:
        assert (await routed.inference.Status(pb.StatusRequest())).status.draining


async def test_probe_answers_the_fleets_best():
    one, other = StubBackend(), StubBackend()
    one.probe, other.probe = one.tells(100, 30), other.tells(100, 80)
    async with router({"one": one, "other": other}) as routed:
        answer = await routed.inference.CacheProbe(pb.CacheProbeRequest(prompt=pb.Prompt(text="hello")))
        assert (answer.prompt_tokens, answer.reusable_tokens) == (100, 80)

        one.probe = other.probe = one.probe_fails(grpc.StatusCode.INVALID_ARGUMENT, "prompt: no")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await routed.inference.CacheProbe(pb.CacheProbeRequest(prompt=pb.Prompt(text="hello")))
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt: no")


async def test_probe_asks_nobody_who_would_not_get_the_request():
    used, left_out = StubBackend(), StubBackend(tokenizer="else")
    used.probe, left_out.probe = used.tells(100, 30), left_out.tells(100, 80)
    async with router({"used": used, "left_out": left_out}) as routed:
        answer = await routed.inference.CacheProbe(pb.CacheProbeRequest(prompt=pb.Prompt(text="hello")))
        assert (answer.reusable_tokens, left_out.probes) == (30, 0)


async def test_watch_status_tells_of_changes():
    stub = StubBackend()
    async with router({"gpu": stub}) as routed:
        call = routed.inference.WatchStatus(pb.WatchStatusRequest())
        first = (await call.read()).status
        stub.push(max_active=9)
        while (status := (await call.read()).status).max_active != 9:
            pass
        assert status.sequence > first.sequence
        call.cancel()


async def test_router_behind_a_router():
    stub = StubBackend()
    stub.probe = stub.tells(100, 40)
    stub.generate = hangs(after=1)
    async with (
        router({"gpu": stub}) as inner,
        router({"site": inner.server.target, "cpu": StubBackend(SLOW)}) as outer,
    ):
        call = outer.inference.Generate(request())
        assert (await call.read()).delta.token_ids == [0]
        # The outer attempt shows in the inner router's Status under the outer id, and is counted once.
        await outer.wait(lambda router: router.ledger.pending("site").requests == 0)
        snapshot = outer.router.fleet.backends["site"].snapshot
        assert (snapshot.active + snapshot.queued, snapshot.waiting_prefill_tokens) == (1, 60)
        assert stub.requests[0].attempt.id not in snapshot.attempt_ids
        assert stub.requests[0].attempt.reusable_tokens == 40

        # Still so once the inner router knows it from its backend's Status only.
        (outer_id,) = snapshot.attempt_ids
        running = pb.RequestStatus(attempt_id=stub.requests[0].attempt.id, phase=pb.REQUEST_PHASE_DECODE)
        stub.push(requests=[running])
        await outer.wait(lambda router: router.fleet.backends["site"].snapshot.active == 1)
        assert outer.router.fleet.backends["site"].snapshot.attempt_ids == {outer_id}

        stub.release.set()
        rest = [await call.read(), await call.read()]
        assert rest[0].delta.token_ids == [99]
        assert rest[1].finished.routing.backend == "site"
        await outer.wait(lambda router: len(router.ledger) == 0)
        await inner.wait(lambda router: len(router.ledger) == 0)


async def test_a_demanded_precision_is_kept_to_by_both_routers():
    exact, coarse = StubBackend(SLOW, precision="bf16"), StubBackend(precision="q4_1")
    async with (
        router({"exact": exact}) as inner,
        router({"site": inner.server.target, "coarse": coarse}) as outer,
    ):
        responses = await outer.generate(routing=pb.RoutingHints(precision="bf16"))

        assert responses[-1].finished.routing.backend == "site"
        assert coarse.requests == []
        (arrived,) = exact.requests
        assert arrived.routing == pb.RoutingHints(precision="bf16")


async def test_cancel_goes_through_both_routers():
    stub = StubBackend()
    stub.generate = hangs()
    async with router({"gpu": stub}) as inner, router({"site": inner.server.target}) as outer:
        call = outer.inference.Generate(request())
        await stub.wait(lambda stub: stub.hanging == 1)
        call.cancel()

        await stub.wait(lambda stub: stub.cancelled == 1)
        await inner.wait(lambda router: len(router.ledger) == 0)


async def test_inner_router_without_backends_is_no_candidate():
    async with (
        router({"dead": "127.0.0.1:1"}, ready=False) as inner,
        router({"site": inner.server.target}, ready=False) as outer,
    ):
        await outer.wait_state("site", State.DRAINING)


# The process


def run_router(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "router_service", *argv], capture_output=True, text=True, timeout=60, check=False
    )


def test_process_refuses_what_it_cannot_do_in_one_line():
    for argv in ([], ["--backend", "cpu"], ["--backend", "cpu=127.0.0.1:1", "--policy", "forced:gpu"]):
        ended = run_router(*argv)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr.startswith("error: ")
        assert ended.stderr.count("\n") == 1


async def test_process_refuses_a_port_in_use():
    async with StubBackend().serving() as stub:
        ended = await asyncio.to_thread(run_router, "--backend", "cpu=127.0.0.1:1", "--listen", stub.target)

        assert ended.returncode == 2
        assert "in use" in ended.stderr
