"""The predictive policy in a served router: forecasts, refusals, what is learned, and backends that talk nonsense."""

from __future__ import annotations

import asyncio
import math

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import router_pb2
from router_service.backend import State
from router_service.forecast_record import replay
from tests.integration.stub_backend import StubBackend, delta, hangs, request, router

PREDICTIVE = pb.RoutingHints(policy="predictive")


def predictable(step_s: float = 0.01, **options) -> StubBackend:
    """Every step takes so long, whatever it computes."""
    stub = StubBackend(**options)
    stub.status.step_model.CopyFrom(pb.StepModel(base_s=step_s, per_token_s=1e-6, samples=99))
    stub.status.step_rules.step_tokens = 512
    return stub


def queued(count: int, tokens: int = 100) -> list[pb.RequestStatus]:
    return [
        pb.RequestStatus(
            attempt_id=f"elsewhere-{index}",
            phase=pb.REQUEST_PHASE_QUEUED,
            remaining_prefill_tokens=10,
            remaining_decode_tokens=tokens,
            prompt_tokens=10,
        )
        for index in range(count)
    ]


async def route(routed, **options) -> router_pb2.Decision:
    options.setdefault("routing", PREDICTIVE)
    return (await routed.admin.Route(router_pb2.RouteRequest(request=request(**options)))).decision


def by_name(decision: router_pb2.Decision) -> dict[str, router_pb2.Candidate]:
    return {candidate.backend: candidate for candidate in decision.candidates}


def retry_after_s(error: grpc.aio.AioRpcError) -> float:
    for detail in rpc_status.from_call(error).details:
        retry = error_details_pb2.RetryInfo()
        if detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
            return retry.retry_delay.ToMilliseconds() / 1000
    raise AssertionError("no RetryInfo")


async def test_candidates_are_played_forward_and_the_record_says_from_what():
    fast, slow = predictable(0.01), predictable(0.03)
    async with router({"fast": fast, "slow": slow}) as routed:
        fast.push(requests=queued(12))
        await routed.wait(lambda r: r.fleet.backends["fast"].snapshot.queued == 12)
        decision = await route(routed, max_new_tokens=16)
    candidates = by_name(decision)
    assert decision.selected == "slow"
    assert {candidate.priced_by for candidate in candidates.values()} == {"forecast"}
    assert candidates["slow"].predicted_finish_s == pytest.approx(16 * 0.03, abs=0.01)
    assert len(candidates["fast"].forecast.prefill_tokens) == 12
    assert replay(candidates["fast"]).finish_s == candidates["fast"].predicted_finish_s


async def test_bookings_of_a_burst_are_in_the_next_forecast():
    one = predictable()
    one.generate = hangs()
    async with router({"one": one}, policy="predictive") as routed:
        calls = [routed.inference.Generate(request(max_new_tokens=100)) for _ in range(8)]
        readers = [asyncio.ensure_future(call.read()) for call in calls]
        await one.wait(lambda stub: stub.hanging == 8)
        decision = await route(routed, max_new_tokens=100)
        one.release.set()
        await asyncio.gather(*readers)
    candidate = decision.candidates[0]
    # Two rounds of four, 100 steps of 10 ms each, before its own.
    assert list(candidate.forecast.weights).count(1.0) == 8
    assert candidate.predicted_finish_s == pytest.approx(3.0, rel=0.25)


async def test_a_deadline_that_nobody_can_meet_is_refused_at_once_with_the_earliest_finish():
    stub = predictable(0.1)
    async with router({"one": stub}, policy="predictive") as routed:
        call = routed.inference.Generate(request(max_new_tokens=100), timeout=4.0)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        error = raised.value
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_after_s(error) == pytest.approx(10.0, rel=0.05)
        assert "No backend can answer in time" in error.details()
        assert stub.requests == []
        answered = [r async for r in routed.inference.Generate(request(max_new_tokens=10), timeout=4.0)]
        assert answered[-1].WhichOneof("event") == "finished"


async def test_a_time_to_first_token_that_nobody_keeps_is_refused_and_one_that_somebody_keeps_is_not():
    busy, slow = predictable(0.01), predictable(0.05)
    async with router({"busy": busy, "slow": slow}, policy="predictive") as routed:
        busy.push(requests=queued(8, tokens=300))
        await routed.wait(lambda r: r.fleet.backends["busy"].snapshot.queued == 8)
        kept = await route(routed, routing=pb.RoutingHints(policy="predictive", ttft_slo_s=0.5))
        refused = await route(routed, routing=pb.RoutingHints(policy="predictive", ttft_slo_s=0.01))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await routed.inference.Generate(request(routing=pb.RoutingHints(ttft_slo_s=0.01))).read()
    assert kept.selected == "slow"
    assert "first token would come after" in by_name(kept)["busy"].unfit
    assert refused.selected == ""
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("slo_s", [0.0, -1.0, math.nan, math.inf])
async def test_a_time_to_first_token_that_is_none_is_refused_as_such(slo_s):
    async with router({"one": predictable()}) as routed:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await routed.inference.Generate(request(routing=pb.RoutingHints(ttft_slo_s=slo_s))).read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "routing.ttft_slo_s" in raised.value.details()


def answers_of(tokens: int):
    """Ends by itself after so many tokens."""

    async def script(stub, wire, context):
        yield delta(*range(tokens))
        yield pb.GenerateResponse(
            finished=pb.Finished(
                finish_reason=pb.FINISH_REASON_EOS, usage=pb.Usage(prompt_tokens=100, generated_tokens=tokens)
            )
        )

    return script


async def test_lengths_of_answers_are_learned_by_workload_unless_the_end_is_ignored():
    stub = predictable()
    stub.generate = answers_of(5)
    async with router({"one": stub}, policy="predictive") as routed:
        for _ in range(30):
            await routed.generate(max_new_tokens=200, workload="short")
            await routed.generate(max_new_tokens=200, workload="fixed", ignore_eos=True)
        short = await route(routed, max_new_tokens=200, workload="short")
        exact = await route(routed, max_new_tokens=200, workload="short", ignore_eos=True)
        last = (await routed.generate(max_new_tokens=200, workload="short"))[-1].finished.routing
    assert short.candidates[0].forecast.expected_new_tokens < 25
    assert exact.candidates[0].forecast.expected_new_tokens == 200
    assert 5 <= last.predicted_new_tokens < 25


async def test_with_budgets_as_lengths_nothing_is_learned():
    stub = predictable()
    stub.generate = answers_of(5)
    async with router({"one": stub}, policy="predictive", output_lengths="budget") as routed:
        for _ in range(10):
            await routed.generate(max_new_tokens=200)
        decision = await route(routed, max_new_tokens=200)
    assert decision.candidates[0].forecast.expected_new_tokens == 200


async def test_a_backend_without_rates_is_measured_by_requests_that_have_time_one_at_a_time():
    known, unknown = predictable(), StubBackend(rates=None)
    unknown.generate = hangs()
    async with router({"known": known, "unknown": unknown}, policy="predictive") as routed:
        await routed.generate()
        assert unknown.requests == []
        call = routed.inference.Generate(request(priority=pb.PRIORITY_BATCH))
        reader = asyncio.ensure_future(call.read())
        await unknown.wait(lambda stub: stub.hanging == 1)
        await routed.generate(priority=pb.PRIORITY_BATCH)
        assert len(unknown.requests) == 1
        unknown.release.set()
        await reader


NONSENSE = {
    "a model of NaNs": {"step_model": pb.StepModel(base_s=math.nan, per_token_s=math.nan)},
    "negative times": {"step_model": pb.StepModel(base_s=-1.0, per_token_s=-1.0)},
    "a step that takes no time": {"step_model": pb.StepModel()},
    "infinite rates": {"isolated_rates": pb.IsolatedRates(prefill_tokens_per_s=math.inf, decode_tokens_per_s=math.inf)},
    "negative rates": {"isolated_rates": pb.IsolatedRates(prefill_tokens_per_s=-9, decode_tokens_per_s=-9)},
    "progress in the future": {"seconds_since_progress": -1e9},
    "no progress since for ever": {"seconds_since_progress": math.inf},
}


@pytest.mark.parametrize("policy", ["predictive", "two_phase"])
@pytest.mark.parametrize("nonsense", NONSENSE)
async def test_a_backend_that_talks_nonsense_does_not_win(nonsense, policy):
    sane, mad = predictable(), predictable(10.0)
    mad.status.isolated_rates.CopyFrom(pb.IsolatedRates(prefill_tokens_per_s=math.nan, decode_tokens_per_s=math.nan))
    for name, value in NONSENSE[nonsense].items():
        if isinstance(value, float):
            setattr(mad.status, name, value)
        else:
            getattr(mad.status, name).CopyFrom(value)
    async with router({"sane": sane, "mad": mad}, policy=policy) as routed:
        for _ in range(3):
            await routed.generate()
    assert len(sane.requests) == 3
    assert mad.requests == []


async def test_a_million_queued_requests_take_a_backend_out_and_not_the_router():
    sane, mad = predictable(), predictable(0.0001)
    async with router({"sane": sane, "mad": mad}, policy="predictive") as routed:
        mad.push(requests=[pb.RequestStatus(phase=pb.REQUEST_PHASE_QUEUED, remaining_decode_tokens=1)] * 1_000_000)
        await routed.wait_state("mad", State.UNREACHABLE)
        assert "1000000 requests" in routed.router.fleet.backends["mad"].detail
        await routed.generate()
        mad.push(requests=[])
        await routed.wait_state("mad", State.SERVING)
    assert len(sane.requests) == 1


async def test_a_status_that_goes_back_is_dropped_and_unknown_attempts_count_as_work():
    stub = predictable()
    async with router({"one": stub}, policy="predictive") as routed:
        stub.push(sequence=10, requests=queued(3))
        await routed.wait(lambda r: r.fleet.backends["one"].snapshot.queued == 3)
        stub.push(sequence=9, requests=[])
        stub.push(sequence=11, requests=queued(5))
        await routed.wait(lambda r: r.fleet.backends["one"].snapshot.queued == 5)
        decision = await route(routed)
    assert len(decision.candidates[0].forecast.prefill_tokens) == 5
