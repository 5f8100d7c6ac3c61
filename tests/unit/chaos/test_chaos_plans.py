"""What is planned from a seed: requests, faults, and what the answers must be."""

from __future__ import annotations

import asyncio

import pytest

from backend_service.engines.simulated import END_TOKEN
from phaseroute.v1 import inference_pb2 as pb
from service_kit.requests import parse_generate
from tests.chaos.pace import LEAD_FAULTS, Pace
from tests.chaos.plan import ROUTER_FREE_TAIL, FaultKind, plan_faults
from tests.chaos.reference import Reference
from tests.chaos.runner import CONTEXT_TOKENS
from tests.chaos.workload import PlannedRequest, mixed_load, small_load


def test_equal_seeds_plan_equal_runs():
    assert list(mixed_load(3, 50)) == list(mixed_load(3, 50)) != list(mixed_load(4, 50))
    assert list(small_load(3, 5)) == list(small_load(3, 5)) != list(small_load(4, 5))
    assert plan_faults(3, 40, 3) == plan_faults(3, 40, 3) != plan_faults(4, 40, 3)


def test_load_is_valid_and_mixed():
    load = list(mixed_load(1, 400))
    prompts = {parse_generate(planned.to_proto()).prompt.__class__.__name__ for planned in load}
    assert prompts == {"TextPrompt", "ChatPrompt", "TokenPrompt"}
    assert len({planned.client for planned in load}) == 4
    assert any(planned.cancel_after_tokens for planned in load)
    assert any(planned.cancel_after_s for planned in load)
    assert any(planned.deadline_s for planned in load)
    assert any(planned.stop for planned in load)


@pytest.mark.parametrize("router_faults", [True, False])
def test_every_kind_of_fault_comes_and_the_last_router_lives_a_while(router_faults):
    plan = plan_faults(1, 100, 3, router_faults=router_faults)
    kinds = {fault.kind for fault in plan}
    assert kinds == {kind for kind in FaultKind if router_faults or not kind.of_router}
    assert not any(fault.kind.of_router for fault in plan[int(100 * (1 - ROUTER_FREE_TAIL)) :])
    assert plan[0].kind is FaultKind.KILL
    assert {fault.backend for fault in plan} == {0, 1, 2}


def test_reference_answers_end_by_length_end_token_or_stop_string():
    reference = Reference(CONTEXT_TOKENS)
    answers = {planned.index: (planned, reference.answer(planned)) for planned in mixed_load(1, 200)}
    assert {answer.finish_reason for _, answer in answers.values()} == {
        pb.FINISH_REASON_LENGTH,
        pb.FINISH_REASON_EOS,
        pb.FINISH_REASON_STOP,
    }
    for planned, answer in answers.values():
        assert len(answer.token_ids) <= planned.max_new_tokens
        assert END_TOKEN not in answer.token_ids
        assert not any(string in answer.text for string in planned.stop)


def test_reference_cuts_the_text_before_the_stop_string():
    reference = Reference(CONTEXT_TOKENS)
    whole = reference.answer(PlannedRequest(0, "ada", "hello", 60))
    stop = whole.text[20:23]
    cut = reference.answer(PlannedRequest(0, "ada", "hello", 60, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.text) + 3]


async def test_faults_and_requests_wait_for_each_other():
    pace = Pace(requests=100, faults=10)
    async with asyncio.timeout(10):
        for _ in range(10 * LEAD_FAULTS + 10):
            await pace.request()
    ahead = asyncio.ensure_future(pace.request())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not ahead.done(), "the load is two faults ahead and waits"
    async with asyncio.timeout(10):
        await pace.fault()
        await ahead
        for _ in range(3):
            await pace.fault()
    early = asyncio.ensure_future(pace.fault())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not early.done(), "31 requests were started, the fifth fault is due after 40"
    await pace.end_faults()
    async with asyncio.timeout(10):
        for _ in range(69):
            await pace.request()
        await early
