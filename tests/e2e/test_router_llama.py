"""Router and real llama.cpp backends together."""

from __future__ import annotations

import asyncio
import signal

import grpc
import pytest

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from phaseroute.v1 import router_pb2, router_pb2_grpc
from service_kit.channels import open_channel
from tests.e2e.processes import SIMULATED, serving, started, until_serving
from tests.e2e.stacks import stack
from tests.integration.backends import backend, collect, request

STORY = "The old lighthouse keeper wrote in his diary every night about the ships that passed. " * 12
OPTIONS = {"max_new_tokens": 32, "ignore_eos": True}


async def test_greedy_output_is_the_same_through_the_router_as_alone():
    async with backend() as alone:
        expected = await alone.generate(STORY, **OPTIONS)
    async with stack({"first": {}, "second": {}}) as router:
        answers = await asyncio.gather(*(router.generate(STORY, **OPTIONS) for _ in range(4)))
        assert [answer.token_ids for answer in answers] == [expected.token_ids] * 4
        assert {answer.text for answer in answers} == {expected.text}
        used = {answer.finished.routing.backend for answer in answers}
    assert used == {"first", "second"}  # equal backends share a burst of four


async def test_warm_backend_wins_and_the_record_says_why():
    async with stack({"cold": {}, "warm": {}}, policy="two_phase") as router:
        await router.backends["warm"].generate(STORY, max_new_tokens=1)
        decision = await router.route(STORY + "One evening", **OPTIONS)
        assert decision.selected == "warm"
        table = {candidate.backend: candidate for candidate in decision.candidates}
        assert table["warm"].reusable_tokens > 150
        assert table["cold"].reusable_tokens == 0
        assert table["warm"].probe == router_pb2.PROBE_OUTCOME_ANSWERED
        for candidate in table.values():
            rates = candidate.isolated_rates
            assert candidate.score_s == pytest.approx(
                candidate.prefill_tokens / rates.prefill_tokens_per_s
                + candidate.decode_tokens / rates.decode_tokens_per_s
            )
        answer = await router.generate(STORY + "One evening", **OPTIONS)
        record = answer.finished.routing
        assert (record.backend, record.policy, record.attempts) == ("warm", "two_phase", 1)
        assert answer.finished.usage.cached_tokens == table["warm"].reusable_tokens
        assert 0 < record.predicted_ttft_s < record.predicted_finish_s
        assert 0 < record.actual_ttft_s < record.actual_finish_s


async def test_burst_spreads_over_unequal_backends_and_every_prefix_is_reused():
    backends = {"fast": {}, "small": {"kv_type": "q4_0", "step_tokens": 8}}
    async with stack(backends) as router:
        for one in router.backends.values():
            await one.generate(STORY, max_new_tokens=1)
        calls = [router.generate(f"{STORY} Ship number {index}", **OPTIONS) for index in range(8)]
        answers = await asyncio.gather(*calls)
        used = [answer.finished.routing.backend for answer in answers]
        assert set(used) == {"fast", "small"}
        assert all(answer.finished.usage.cached_tokens > 150 for answer in answers)
        for one in router.backends.values():
            await one.wait_status(lambda status: not status.requests)
            one.engine.check_integrity()


async def test_cancel_through_the_router_frees_the_backends_slot():
    async with stack({"only": {}}) as router:
        call = router.stub.Generate(request(STORY, max_new_tokens=2000, ignore_eos=True))
        await call.read()
        call.cancel()
        await router.backends["only"].wait_status(lambda status: not status.requests)
        assert len(router.hosted.router.ledger) == 0


async def test_killed_backend_is_replaced_before_the_first_token_and_after_it():
    # The doomed one is the faster: it gets the work for as long as it lives.
    slow = (*SIMULATED, "--simulated-decode-ms", "1:30", "--simulated-prefill-rate", "2000")
    fast = (*SIMULATED, "--simulated-decode-ms", "1:20", "--simulated-prefill-rate", "2000")
    async with started("backend_service", *fast) as doomed, started("backend_service", *slow) as other:
        names = {"doomed": await serving(doomed), "other": await serving(other)}
        flags = [flag for name, target in names.items() for flag in ("--backend", f"{name}={target}")]
        async with (
            started("router_service", *flags, "--listen", "127.0.0.1:0", "--log-format", "json") as router,
            open_channel(await serving(router)) as channel,
        ):
            stub = pb_grpc.InferenceServiceStub(channel)
            await until_serving(router_pb2_grpc.RouterServiceStub(channel), 2)
            begun = stub.Generate(request("a" * 20, max_new_tokens=200, ignore_eos=True))
            assert (await begun.read()).delta.token_ids
            prompt = "b" * 2000  # a second of prefill: no token before the kill
            waiting = asyncio.ensure_future(
                collect(stub.Generate(request(prompt, max_new_tokens=5, routing=pb.RoutingHints(policy="two_phase"))))
            )
            await router.wait_line('"decision".*"selected": "doomed"')
            await router.wait_line('"decision"')
            await doomed.end(signal.SIGKILL)
            finished = (await last_message(begun)).finished
            assert (finished.routing.backend, finished.routing.continuations) == ("other", 1)
            assert finished.usage.generated_tokens == 200
            answer = await waiting
            assert answer.finished.routing.backend == "other"
            after = await collect(stub.Generate(request("c", max_new_tokens=2)))
            assert after.finished.routing.backend == "other"


async def last_message(call) -> pb.GenerateResponse:
    last = None
    while (response := await call.read()) is not grpc.aio.EOF:
        last = response
    return last
