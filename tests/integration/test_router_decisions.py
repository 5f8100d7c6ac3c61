"""Decisions over scripted backends: bookings, probes, policies, and every place where a decision shows."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import router_pb2
from service_kit.logs import configure_logs
from service_kit.telemetry import Telemetry
from tests.integration.stub_backend import FAST, SLOW, StubBackend, fails, hangs, request, router


def hints(**fields) -> pb.RoutingHints:
    return pb.RoutingHints(**fields)


async def route(routed, **options) -> router_pb2.Decision:
    response = await routed.admin.Route(router_pb2.RouteRequest(request=request(**options)))
    return response.decision


async def route_error(routed, **options) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await route(routed, **options)
    return raised.value


def by_name(decision: router_pb2.Decision) -> dict[str, router_pb2.Candidate]:
    return {candidate.backend: candidate for candidate in decision.candidates}


async def watching(routed):
    """A WatchDecisions call that misses nothing from here on."""
    call = routed.admin.WatchDecisions(router_pb2.WatchDecisionsRequest())
    await call.initial_metadata()
    return call


# Bookings


async def test_simultaneous_requests_see_each_others_bookings():
    one, other = StubBackend(), StubBackend()
    one.generate = other.generate = hangs()
    async with router({"one": one, "other": other}) as routed:
        news = await watching(routed)
        calls = [routed.inference.Generate(request()) for _ in range(8)]
        readers = [asyncio.ensure_future(call.read()) for call in calls]
        decisions = [(await news.read()).decision for _ in range(8)]

        seen = [sum(c.active + c.queued for c in decision.candidates) for decision in decisions]
        assert seen == list(range(8))
        prefill_tokens = [sum(c.prefill_tokens for c in decision.candidates) for decision in decisions]
        assert prefill_tokens == [200 + 100 * i for i in range(8)]
        assert Counter(decision.selected for decision in decisions) == {"one": 4, "other": 4}

        one.release.set()
        other.release.set()
        await asyncio.gather(*readers)


async def test_dry_run_books_and_sends_nothing():
    stub = StubBackend()
    async with router({"gpu": stub}) as routed:
        news = await watching(routed)
        for _ in range(3):
            decision = await route(routed, routing=hints(policy="round_robin"))
            assert (decision.selected, decision.candidates[0].queued) == ("gpu", 0)
        await routed.generate()

        assert (await news.read()).decision.candidates[0].active == 0
        assert len(stub.requests) == 1


async def test_status_takes_over_what_was_booked():
    stub = StubBackend()
    stub.generate = hangs()
    async with router({"gpu": stub}) as routed:
        call = routed.inference.Generate(request())
        reading = asyncio.ensure_future(call.read())
        await stub.wait(lambda stub: stub.hanging == 1)
        entry = (await routed.admin.ListBackends(router_pb2.ListBackendsRequest())).backends[0]
        assert entry.booked_requests == 1

        running = pb.RequestStatus(
            attempt_id=stub.requests[0].attempt.id, phase=pb.REQUEST_PHASE_DECODE, remaining_decode_tokens=9
        )
        stub.push(requests=[running])
        await routed.wait(lambda router: router.ledger.pending("gpu").requests == 0)
        candidate = by_name(await route(routed))["gpu"]
        assert (candidate.active, candidate.queued, candidate.decode_tokens) == (1, 0, 9 + 16)

        # Its end: not counted in Status any more, and not booked again.
        stub.push(requests=[])
        await routed.wait(lambda router: router.fleet.backends["gpu"].snapshot.active == 0)
        assert by_name(await route(routed))["gpu"].active == 0
        stub.release.set()
        await reading


async def test_restart_voids_what_was_booked_on_the_old_process():
    stub = StubBackend()
    stub.generate = hangs()
    async with router({"gpu": stub}) as routed:
        readers = [asyncio.ensure_future(routed.inference.Generate(request()).read()) for _ in range(3)]
        await stub.wait(lambda stub: stub.hanging == 3)
        assert routed.router.ledger.pending("gpu").requests == 3

        stub.push(incarnation="second", sequence=1)
        # Given up there, and booked anew on the process that is there now.
        await stub.wait(lambda stub: stub.hanging == 6)

        bookings = list(routed.router.fleet.bookings("gpu"))
        assert [lease.incarnation for lease in bookings] == ["second"] * 3
        candidate = by_name(await route(routed))["gpu"]
        assert (candidate.active, candidate.queued, candidate.decode_tokens) == (3, 0, 4 * 16)
        stub.release.set()
        await asyncio.gather(*readers)
        await routed.wait(lambda router: not router.ledger.pending("gpu").requests)


# Probes


async def test_reusable_prefix_decides():
    cold, warm = StubBackend(), StubBackend()
    cold.probe, warm.probe = cold.tells(1000, 0), warm.tells(1000, 900)
    async with router({"cold": cold, "warm": warm}) as routed:
        decision = await route(routed)

        assert decision.selected == "warm"
        assert by_name(decision)["warm"].prefill_tokens == 100
        assert by_name(decision)["warm"].probe == router_pb2.PROBE_OUTCOME_ANSWERED


async def test_late_probe_counts_no_prefix_and_is_cancelled():
    ended = asyncio.Event()
    late, prompt = StubBackend(), StubBackend(SLOW)

    async def never(request, context):
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    late.probe, prompt.probe = never, prompt.tells(300, 200)
    async with router({"late": late, "prompt": prompt}, probe_timeout_s=0.2) as routed:
        candidates = by_name(await route(routed, text="x" * 2000))

        assert candidates["late"].probe == router_pb2.PROBE_OUTCOME_LATE
        assert (candidates["late"].reusable_tokens, candidates["late"].prompt_tokens) == (0, 300)
        assert candidates["late"].prompt_tokens_estimated
        assert not candidates["prompt"].prompt_tokens_estimated
        await ended.wait()


async def test_failing_probe_counts_no_prefix():
    stub = StubBackend()
    stub.probe = stub.probe_fails(grpc.StatusCode.UNIMPLEMENTED)
    async with router({"gpu": stub}) as routed:
        decision = await route(routed, text="x" * 400)

        (candidate,) = decision.candidates
        assert decision.selected == "gpu"
        assert candidate.probe == router_pb2.PROBE_OUTCOME_FAILED
        assert (candidate.prompt_tokens, candidate.prompt_tokens_estimated) == (100, True)

        await routed.generate()
        assert not stub.requests[0].attempt.HasField("reusable_tokens")


async def test_token_ids_are_counted_whatever_the_probes_do():
    stub = StubBackend()
    stub.probe = stub.probe_fails(grpc.StatusCode.INTERNAL)
    async with router({"gpu": stub}) as routed:
        decision = await route(routed, prompt=pb.Prompt(token_ids=pb.TokenIds(ids=range(77))))

        assert (decision.candidates[0].prompt_tokens, decision.candidates[0].prompt_tokens_estimated) == (77, False)


async def test_hopeless_candidate_is_not_asked():
    idle, swamped = StubBackend(), StubBackend()
    work = pb.RequestStatus(attempt_id="a", phase=pb.REQUEST_PHASE_DECODE, remaining_decode_tokens=9000)
    swamped.push(requests=[work])
    async with router({"idle": idle, "swamped": swamped}, policy="two_phase") as routed:
        decision = await route(routed)

        assert decision.selected == "idle"
        assert by_name(decision)["swamped"].probe == router_pb2.PROBE_OUTCOME_SKIPPED
        assert by_name(decision)["swamped"].HasField("score_s")
        assert (idle.probes, swamped.probes) == (1, 0)

        # A chat's length has no bound.
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")])
        await route(routed, prompt=pb.Prompt(chat=chat))
        assert (idle.probes, swamped.probes) == (2, 1)


async def test_prompt_that_every_backend_refuses_is_the_clients_error():
    one, other = StubBackend(), StubBackend()
    one.probe = other.probe = one.probe_fails(
        grpc.StatusCode.INVALID_ARGUMENT, "prompt.token_ids[0]: out of vocabulary"
    )
    async with router({"one": one, "other": other}) as routed:
        error = await route_error(routed)

        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "prompt.token_ids[0]: out of vocabulary"


async def test_prompt_that_one_backend_refuses_goes_to_the_other():
    small, large = StubBackend(), StubBackend(SLOW)
    small.probe = small.probe_fails(grpc.StatusCode.INVALID_ARGUMENT, "prompt: too long")
    async with router({"small": small, "large": large}) as routed:
        decision = await route(routed)

        assert decision.selected == "large"
        assert "too long" in by_name(decision)["small"].excluded


async def test_context_decides_who_is_a_candidate():
    small, large = StubBackend(context_tokens=128), StubBackend(SLOW, context_tokens=2048)
    async with router({"small": small, "large": large}) as routed:
        assert (await route(routed, max_new_tokens=28)).selected == "small"
        decision = await route(routed, max_new_tokens=29)
        assert decision.selected == "large"
        assert "over its context of 128" in by_name(decision)["small"].excluded

        error = await route_error(routed, max_new_tokens=2000)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "prompt of 100 + max_new_tokens of 2000 = 2100 tokens is over the context of 2048" in error.details()


# Policies and names


async def test_unequal_pair_round_robin_alternates():
    fast, slow = StubBackend(FAST), StubBackend(SLOW)
    async with router({"fast": fast, "slow": slow}, policy="round_robin") as routed:
        for _ in range(6):
            await routed.generate()

        assert (len(fast.requests), len(slow.requests)) == (3, 3)


async def test_unequal_pair_two_phase_prefers_the_fast_one_until_it_is_behind():
    fast, slow = StubBackend(FAST), StubBackend(SLOW)
    fast.generate = slow.generate = hangs()
    async with router({"fast": fast, "slow": slow}) as routed:
        readers = [asyncio.ensure_future(routed.inference.Generate(request()).read()) for _ in range(6)]
        await fast.wait(lambda stub: stub.hanging == 6)

        assert slow.requests == []
        fast.release.set()
        await asyncio.gather(*readers)


async def test_unequal_pair_least_loaded_halves():
    fast, slow = StubBackend(FAST), StubBackend(SLOW)
    fast.generate = slow.generate = hangs()
    async with router({"fast": fast, "slow": slow}, policy="least_loaded") as routed:
        readers = [asyncio.ensure_future(routed.inference.Generate(request()).read()) for _ in range(6)]
        await fast.wait(lambda stub: stub.hanging == 3)
        await slow.wait(lambda stub: stub.hanging == 3)

        fast.release.set()
        slow.release.set()
        await asyncio.gather(*readers)


async def test_request_may_name_its_policy():
    fast, slow = StubBackend(FAST), StubBackend(SLOW)
    async with router({"fast": fast, "slow": slow}) as routed:
        decision = await route(routed, routing=hints(policy="forced:slow"))

        assert (decision.policy, decision.selected) == ("forced:slow", "slow")
        assert by_name(decision)["fast"].score_s < by_name(decision)["slow"].score_s


async def test_forced_to_a_backend_that_is_away_is_unavailable():
    fast, slow = StubBackend(FAST), StubBackend(SLOW)
    slow.push(draining=True)
    async with router({"fast": fast, "slow": slow}, ready=False) as routed:
        await routed.wait(lambda router: all(b.snapshot for b in router.fleet.backends.values()))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await routed.generate(routing=hints(policy="forced:slow"))

        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "slow is out: draining" in raised.value.details()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"routing": hints(policy="fastest")}, grpc.StatusCode.INVALID_ARGUMENT, "two_phase, forced:<backend>"),
        ({"routing": hints(policy="forced:tpu")}, grpc.StatusCode.INVALID_ARGUMENT, "there are cpu, gpu"),
        ({"routing": hints(backend="tpu")}, grpc.StatusCode.NOT_FOUND, "there are cpu, gpu"),
        ({"model": "gpt"}, grpc.StatusCode.NOT_FOUND, "there are m"),
        (
            {"routing": hints(precision="bf16")},
            grpc.StatusCode.NOT_FOUND,
            "Model 'm' is not held in precision 'bf16' here; there are q4_1.",
        ),
    ],
)
async def test_unknown_names_list_the_known(options, code, message):
    async with router({"cpu": StubBackend(), "gpu": StubBackend()}) as routed:
        for error in (await route_error(routed, **options), await generate_error(routed, **options)):
            assert error.code() is code
            assert message in error.details()


async def generate_error(routed, **options) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await routed.generate(**options)
    return raised.value


async def test_pinned_and_excluded_backends():
    async with router({"cpu": StubBackend(SLOW), "gpu": StubBackend(FAST)}) as routed:
        assert (await route(routed, routing=hints(backend="cpu"))).selected == "cpu"
        decision = await route(routed, routing=hints(excluded_backends=["gpu"]))
        assert decision.selected == "cpu"
        assert by_name(decision)["gpu"].excluded == "the request excludes it"


async def test_backends_that_tokenize_differently_get_nothing_beside_the_larger_group():
    odd = StubBackend(FAST, tokenizer="other")
    odd.probe = odd.tells(100, 99)
    backends = {"odd": odd, "b": StubBackend(SLOW), "c": StubBackend(SLOW)}
    async with router(backends) as routed:
        for prompt in (pb.Prompt(text="hello"), pb.Prompt(token_ids=pb.TokenIds(ids=[1, 2, 3]))):
            for policy in ("two_phase", "least_loaded", "round_robin"):
                decision = await route(routed, prompt=prompt, routing=hints(policy=policy))
                assert decision.selected in ("b", "c")
                assert by_name(decision)["odd"].excluded == (
                    "tokenizes differently: its tokenizer is other, the one in use for this model is t; "
                    "only pinned requests go there"
                )
        await routed.generate()
        assert (odd.probes, odd.requests) == (0, [])

        assert (await route(routed, routing=hints(backend="odd"))).selected == "odd"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await routed.generate(routing=hints(excluded_backends=["b", "c"]))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "odd is out: tokenizes differently: its tokenizer is other" in raised.value.details()


async def test_a_demanded_precision_decides_who_is_a_candidate():
    coarse, exact = StubBackend(FAST, precision="q4_1 as f32"), StubBackend(SLOW, precision="bf16")
    async with router({"coarse": coarse, "exact": exact}) as routed:
        free = await route(routed)
        assert free.selected == "coarse"
        assert {name: row.precision for name, row in by_name(free).items()} == {
            "coarse": "q4_1 as f32",
            "exact": "bf16",
        }

        bound = await route(routed, routing=hints(precision="bf16"))
        assert bound.selected == "exact"
        assert by_name(bound)["coarse"].excluded == "holds its weights in precision q4_1 as f32, not bf16"

        probes = coarse.probes
        for _ in range(3):
            await routed.generate(routing=hints(precision="bf16"))
        assert (len(coarse.requests), len(exact.requests), coarse.probes) == (0, 3, probes)


async def test_several_models():
    small, large = StubBackend(model="small"), StubBackend(model="large")
    async with router({"a": small, "b": large}) as routed:
        assert (await route(routed, model="large")).selected == "b"
        error = await route_error(routed)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "large, small" in error.details()


# Where a decision shows


async def test_watchers_see_decisions_and_outcomes_in_order():
    first, second = StubBackend(FAST), StubBackend(SLOW)
    first.generate = fails(grpc.StatusCode.UNAVAILABLE, "gone")
    async with router({"first": first, "second": second}) as routed:
        news = await watching(routed)
        await routed.generate(workload="chat")
        events = [await news.read() for _ in range(4)]

        assert [event.WhichOneof("event") for event in events] == ["decision", "outcome"] * 2
        failed, failure, chosen, success = (getattr(event, event.WhichOneof("event")) for event in events)
        assert (failed.selected, failed.attempt, failed.workload) == ("first", 1, "chat")
        assert (failure.decision_id, failure.code) == (failed.id, "UNAVAILABLE")
        assert (chosen.selected, chosen.attempt) == ("second", 2)
        assert "failed this request: UNAVAILABLE: gone" in by_name(chosen)["first"].excluded
        assert (success.decision_id, success.code) == (chosen.id, "OK")
        assert (success.routing.attempts, success.usage.generated_tokens) == (2, 3)


async def test_watchers_see_a_request_that_nobody_could_take_and_one_that_was_cancelled():
    stub = StubBackend()
    async with router({"gpu": stub}) as routed:
        news = await watching(routed)
        await generate_error(routed, routing=hints(excluded_backends=["gpu"]))
        decision, outcome = (await news.read()).decision, (await news.read()).outcome
        assert (decision.selected, outcome.code) == ("", "UNAVAILABLE")

        stub.generate = hangs()
        call = routed.inference.Generate(request())
        assert (await news.read()).decision.selected == "gpu"
        await stub.wait(lambda stub: stub.hanging == 1)
        call.cancel()
        assert (await news.read()).outcome.code == "CANCELLED"


async def test_watcher_that_leaves_is_forgotten():
    async with router({"gpu": StubBackend()}) as routed:
        news = await watching(routed)
        assert routed.router.relay.decisions.listeners == 1
        news.cancel()
        while routed.router.relay.decisions.listeners:
            await routed.generate()


async def test_every_decision_is_one_log_line(capsys):
    root = logging.getLogger()
    before, level = root.handlers, root.level
    configure_logs("json")
    try:
        async with router({"cpu": StubBackend(SLOW), "gpu": StubBackend(FAST)}) as routed:
            await routed.generate()
            await route(routed)
    finally:
        root.handlers = before
        root.setLevel(level)

    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (line,) = [line for line in lines if line["event"] == "decision"]
    assert line["selected"] == "gpu"
    assert {row["backend"]: row["prefill_tokens"] for row in line["candidates"]} == {"cpu": 100, "gpu": 100}
    assert all(row["score_s"] > 0 for row in line["candidates"])


async def test_spans_of_a_request():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    first, second = StubBackend(FAST), StubBackend(SLOW)
    first.generate = fails(grpc.StatusCode.UNAVAILABLE)
    async with router({"first": first, "second": second}, telemetry=Telemetry(provider)) as routed:
        await routed.generate()

    spans = {span.name: [] for span in exporter.get_finished_spans()}
    for span in exporter.get_finished_spans():
        spans[span.name].append(span)
    server, *attempts = sorted(spans["phaseroute.v1.InferenceService/Generate"], key=lambda span: span.start_time)
    routes = sorted(spans["route"], key=lambda span: span.start_time)
    assert [span.parent.span_id for span in (*routes, *attempts)] == [server.context.span_id] * 4
    assert [span.attributes["rpc.response.status_code"] for span in attempts] == ["UNAVAILABLE", "OK"]
    assert routes[0].attributes["phaseroute.candidates.names"] == ("first", "second")
    assert [span.attributes["phaseroute.decision.selected"] for span in routes] == ["first", "second"]
    assert {span.parent.span_id for span in spans["phaseroute.v1.InferenceService/CacheProbe"]} == {
        span.context.span_id for span in routes
    }
    sent = second.metadata[0]["traceparent"]
    assert f"{attempts[1].context.span_id:016x}" in sent
