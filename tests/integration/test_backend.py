"""The backend service over gRPC with the simulated engine: queue, status, cancel, drain, failures."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from backend_service.engines.simulated import SimulatedEngine
from phaseroute.v1 import inference_pb2 as pb
from service_kit.faults import EngineFailed
from tests.integration.backends import FAST, backend, collect, request

SLOW = {**FAST, "simulated_decode_ms": "1:20"}
ENDLESS = {"max_new_tokens": 3000, "ignore_eos": True}


def phases(status: pb.BackendStatus) -> dict[str, int]:
    return {entry.attempt_id: entry.phase for entry in status.requests}


async def test_answer_has_tokens_usage_timings_and_reason():
    async with backend(**FAST) as server:
        answer = await server.generate("Hello there", max_new_tokens=5, ignore_eos=True)
    assert len(answer.token_ids) == 5
    assert answer.text == bytes(answer.token_ids).decode()
    assert answer.reason == "LENGTH"
    usage, timings = answer.finished.usage, answer.finished.timings
    assert (usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens) == (11, 0, 5)
    assert timings.queue_s >= 0
    assert timings.prefill_s > 0
    assert timings.decode_s >= 4 * 0.001
    assert not answer.finished.HasField("routing")


async def test_default_is_256_new_tokens():
    async with backend(**FAST) as server:
        assert (await server.generate("Hi", ignore_eos=True)).finished.usage.generated_tokens == 256


async def test_nothing_is_sent_before_the_first_token():
    async with backend(**FAST, max_active=1) as server:
        first = server.stub.Generate(request("a", **ENDLESS))
        await first.read()
        second = server.stub.Generate(request("b", **ENDLESS))
        await server.wait_status(lambda status: len(status.requests) == 2)
        metadata = asyncio.ensure_future(second.initial_metadata())
        done, _ = await asyncio.wait((metadata,), timeout=0.2)
        assert not done
        first.cancel()
        await metadata


async def test_status_is_complete():
    async with backend(**SLOW, max_active=1, max_queued=3) as server:
        calls = []
        for name, reusable in (("one", 0), ("two", 40)):
            attempt = pb.Attempt(id=name, reusable_tokens=reusable)
            calls.append(server.stub.Generate(request("p" * 50, attempt=attempt, workload="chat", **ENDLESS)))
            await server.wait_status(lambda status, name=name: name in phases(status))
        status = await server.wait_status(lambda status: any(entry.generated_tokens > 2 for entry in status.requests))
        for call in calls:
            call.cancel()
    assert status.incarnation
    assert status.sequence > 0
    assert status.model.name == "simulated"
    assert status.model.fingerprint
    assert (status.model.tokenizer_fingerprint, status.model.precision) == ("bytes", "none")
    assert status.model.context_tokens == 4096
    assert status.engine.name == "simulated"
    assert status.engine.simulated
    assert (status.max_active, status.max_queued, status.max_queued_tokens) == (1, 3, 64 * 4096)
    one, two = status.requests
    assert (one.attempt_id, one.phase) == ("one", pb.REQUEST_PHASE_DECODE)
    assert one.remaining_prefill_tokens == 0
    assert one.remaining_decode_tokens == 3000 - one.generated_tokens
    assert one.context_tokens == 50 + one.generated_tokens - 1
    assert (two.attempt_id, two.phase) == ("two", pb.REQUEST_PHASE_QUEUED)
    assert (two.remaining_prefill_tokens, two.remaining_decode_tokens) == (10, 3000)
    assert one.priority == two.priority == pb.PRIORITY_INTERACTIVE
    assert (one.workload, one.ignore_eos, one.prompt_tokens, one.cached_tokens) == ("chat", True, 50, 0)
    # In virtual time: when the first one, of the same client and nobody, has had its 3000 tokens at 50/s.
    assert one.due_in_s == 0 < two.due_in_s == pytest.approx(60, abs=0.1)
    assert status.step_rules.step_tokens == 512
    assert status.step_rules.step_target_s == pytest.approx(0.15)
    assert status.max_active_reason == ""
    assert not status.kv_cache.padded
    assert status.scheduling_policy == "fair"
    cache = status.kv_cache
    assert cache.capacity_tokens == 4096
    assert cache.used_tokens == one.context_tokens
    assert cache.used_tokens + cache.reserved_tokens == 50 + 3000
    assert cache.retained_tokens == 0
    assert cache.host_tokens == 0 < cache.host_capacity_tokens
    assert status.isolated_rates.prefill_tokens_per_s == pytest.approx(100_000)
    assert status.isolated_rates.decode_tokens_per_s == pytest.approx(50)
    assert not status.draining
    assert 0 <= status.seconds_since_progress < 5


async def test_interactive_is_admitted_before_batch_and_status_says_so():
    async with backend(**SLOW, max_active=1, scheduling="priority") as server:
        calls = {}
        for name, priority in (
            ("running", pb.PRIORITY_UNSPECIFIED),
            ("batch", pb.PRIORITY_BATCH),
            ("interactive", pb.PRIORITY_INTERACTIVE),
        ):
            sent = request(name, attempt=pb.Attempt(id=name), priority=priority, **ENDLESS)
            calls[name] = server.stub.Generate(sent)
            status = await server.wait_status(lambda status, name=name: name in phases(status))
        assert status.scheduling_policy == "priority"
        assert [(entry.attempt_id, entry.priority) for entry in status.requests] == [
            ("running", pb.PRIORITY_INTERACTIVE),
            ("interactive", pb.PRIORITY_INTERACTIVE),
            ("batch", pb.PRIORITY_BATCH),
        ]
        calls["running"].cancel()
        status = await server.wait_status(lambda status: phases(status).get("interactive") == pb.REQUEST_PHASE_DECODE)
        assert phases(status)["batch"] == pb.REQUEST_PHASE_QUEUED
        for call in calls.values():
            call.cancel()


async def test_batch_may_be_promoted_at_once():
    async with backend(**SLOW, max_active=1, scheduling="priority", promote_batch_after_s=0) as server:
        calls = []
        for name, priority in (("running", 0), ("batch", pb.PRIORITY_BATCH), ("interactive", pb.PRIORITY_INTERACTIVE)):
            sent = request(name, attempt=pb.Attempt(id=name), priority=priority, **ENDLESS)
            calls.append(server.stub.Generate(sent))
            status = await server.wait_status(lambda status, name=name: name in phases(status))
        assert list(phases(status)) == ["running", "batch", "interactive"]
        for call in calls:
            call.cancel()


async def test_a_short_prompt_is_admitted_before_a_long_one():
    settings = {**SLOW, "simulated_prefill_rate": 100.0}
    async with backend(**settings, max_active=1, scheduling="shortest_prefill_first") as server:
        calls = {}
        for name, length in (("running", 10), ("long", 900), ("short", 10)):
            calls[name] = server.stub.Generate(request(name[0] * length, attempt=pb.Attempt(id=name), **ENDLESS))
            status = await server.wait_status(lambda status, name=name: name in phases(status))
        assert list(phases(status)) == ["running", "short", "long"]
        calls["running"].cancel()
        status = await server.wait_status(lambda status: phases(status).get("short") == pb.REQUEST_PHASE_DECODE)
        assert phases(status)["long"] == pb.REQUEST_PHASE_QUEUED
        for call in calls.values():
            call.cancel()


async def test_a_step_model_is_there_from_the_start_and_learns():
    async with backend(**FAST) as server:
        first = (await server.status()).step_model
        call = server.stub.Generate(request("p" * 50, **ENDLESS))
        status = await server.wait_status(lambda status: status.step_model.samples > first.samples)
        call.cancel()
    assert first.samples >= 16
    assert first.residual_p90_s < 0.05
    assert status.step_model.samples >= 16


async def test_watch_sends_the_state_then_changes_then_heartbeats():
    async with backend(**SLOW) as server:
        watch = server.stub.WatchStatus(pb.WatchStatusRequest())
        first = (await watch.read()).status
        heartbeat = (await watch.read()).status  # nothing happened
        assert heartbeat.sequence == first.sequence
        answer = asyncio.ensure_future(server.generate("hello", max_new_tokens=20, ignore_eos=True))
        seen = [first]
        while not (answer.done() and not seen[-1].requests):
            seen.append((await watch.read()).status)
        watch.cancel()
    assert all(before.sequence <= after.sequence for before, after in pairwise(seen))
    assert {status.incarnation for status in seen} == {first.incarnation}
    progress = [status.requests[0].generated_tokens for status in seen if status.requests]
    assert progress == sorted(progress)
    # 20 tokens at 20 ms: at most one message in 50 ms for progress, and three for arrival, first token and end.
    assert len(seen) <= 20


async def test_cache_probe_counts_prompt_and_reusable_tokens_and_changes_nothing():
    async with backend(**FAST) as server:
        await server.generate("abcdefgh", max_new_tokens=1)
        before = await server.status()
        for _ in range(3):
            probe = await server.stub.CacheProbe(pb.CacheProbeRequest(prompt=pb.Prompt(text="abcdxyz")))
            assert (probe.prompt_tokens, probe.reusable_tokens) == (7, 4)
        whole = await server.stub.CacheProbe(pb.CacheProbeRequest(prompt=pb.Prompt(text="abcdefgh")))
        assert (whole.prompt_tokens, whole.reusable_tokens) == (8, 7)
        assert (await server.status()).sequence == before.sequence


async def test_full_queue_is_refused_at_once_with_a_delay_and_the_rest_goes_on():
    async with backend(**SLOW, max_active=1, max_queued=1) as server:
        calls = [server.stub.Generate(request("x", **ENDLESS)) for _ in range(2)]
        await server.wait_status(lambda status: len(status.requests) == 2)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await server.generate("y")
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = list(rpc_status.from_call(refused.value).details)
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in details)
        assert retry.retry_delay.ToTimedelta().total_seconds() > 0
        calls[0].cancel()
        await server.wait_status(lambda status: len(status.requests) == 1)
        again = server.stub.Generate(request("z", **ENDLESS))
        await server.wait_status(lambda status: len(status.requests) == 2)
        again.cancel()
        calls[1].cancel()


@pytest.mark.parametrize("phase", [pb.REQUEST_PHASE_QUEUED, pb.REQUEST_PHASE_PREFILL, pb.REQUEST_PHASE_DECODE])
async def test_cancelled_call_leaves_the_backend_in_every_phase(phase):
    prefill_rate = 500.0 if phase == pb.REQUEST_PHASE_PREFILL else 100_000.0
    settings = {**SLOW, "simulated_prefill_rate": prefill_rate, "step_tokens": 10}
    async with backend(**settings, max_active=1) as server:
        blocker = None
        if phase == pb.REQUEST_PHASE_QUEUED:
            blocker = server.stub.Generate(request("blocker", attempt=pb.Attempt(id="blocker"), **ENDLESS))
            await server.wait_status(lambda status: "blocker" in phases(status))
        victim = server.stub.Generate(request("v" * 900, attempt=pb.Attempt(id="victim"), **ENDLESS))
        await server.wait_status(lambda status: phases(status).get("victim") == phase)
        victim.cancel()
        status = await server.wait_status(lambda status: "victim" not in phases(status))
        assert status.kv_cache.reserved_tokens == (
            0 if blocker is None else 7 + 3000 - status.requests[0].context_tokens
        )
        if blocker is not None:
            blocker.cancel()
        after = await server.generate("next", max_new_tokens=2, ignore_eos=True)
        assert after.reason == "LENGTH"


async def test_one_attempt_id_cannot_run_twice():
    async with backend(**SLOW) as server:
        first = server.stub.Generate(request("x", attempt=pb.Attempt(id="same"), **ENDLESS))
        await server.wait_status(lambda status: bool(status.requests))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await server.generate("y", attempt=pb.Attempt(id="same"))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await first.read()).delta.token_ids
        first.cancel()


async def test_drain_refuses_new_work_tells_watchers_and_lets_streams_finish():
    async with backend(**SLOW) as server:
        watch = server.stub.WatchStatus(pb.WatchStatusRequest())
        await watch.read()
        call = server.stub.Generate(request("x", max_new_tokens=30, ignore_eos=True))
        await server.wait_status(lambda status: bool(status.requests))
        drain = asyncio.ensure_future(server.server.drain())
        while not (await watch.read()).status.draining:
            pass
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await server.generate("y")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await collect(call)).finished.usage.generated_tokens == 30
        await drain


async def test_broken_step_fails_its_requests_and_the_next_one_works(monkeypatch):
    step, broken = SimulatedEngine.step, []

    def break_once(self, slices):
        if not broken:
            broken.append(True)
            self._pool.clear()
            self._sequences.clear()
            raise EngineFailed("the device said no; send it again")
        return step(self, slices)

    monkeypatch.setattr(SimulatedEngine, "step", break_once)
    async with backend(**FAST) as server:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await server.generate("x")
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        assert (await server.generate("x", max_new_tokens=3, ignore_eos=True)).reason == "LENGTH"


async def test_dead_engine_thread_fails_all_requests_flips_health_and_stops_the_process(monkeypatch):
    monkeypatch.setattr(SimulatedEngine, "step", lambda self, slices: 1 / 0)
    async with backend(**FAST) as server:
        health = health_pb2_grpc.HealthStub(server.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        stopped = asyncio.ensure_future(server.server.run_until_stopped())
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await server.generate("x")
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        assert await stopped == 1


async def test_unknown_model_is_not_found():
    async with backend(**FAST, model_name="tiny") as server:
        assert (await server.generate("x", model="tiny", max_new_tokens=1)).finished
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await server.generate("x", model="huge")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert "tiny" in refused.value.details()


async def test_auto_picks_the_batch_size_and_says_why():
    gains_nothing = {**FAST, "simulated_decode_ms": "1:3.41,3:36,4:43"}
    async with backend(**gains_nothing, max_active="auto", max_active_limit=8) as server:
        calls = [server.stub.Generate(request(f"{n}", max_new_tokens=150, ignore_eos=True)) for n in range(4)]
        readers = [asyncio.ensure_future(collect(call)) for call in calls]
        status = await server.wait_status(lambda status: status.max_active == 1 and status.max_active_reason)
        assert status.max_active_reason.startswith("auto: 1 of at most 8")
        answers = await asyncio.gather(*readers)
    assert [len(answer.token_ids) for answer in answers] == [150] * 4


async def test_a_step_model_and_its_rules_are_shown_from_the_start():
    async with backend(**FAST) as server:
        status = await server.status()
    assert status.step_model.samples > 0
    assert status.step_rules.step_tokens > 0
    assert status.scheduling_policy == "fair"
