"""Where an answer goes on, and what is booked for it: its beginning is computed again behind the prompt."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseroute.v1 import inference_pb2 as pb
from router_service.decision import ProbeOutcome
from router_service.experience import Experience
from router_service.fleet import Fleet
from router_service.ledger import Ledger
from router_service.lengths import LengthOutcome, make_lengths
from router_service.routing import Routing
from router_service.snapshot import Snapshot
from service_kit.faults import InvalidRequest
from service_kit.identity import Caller, Scope
from service_kit.requests import parse_generate
from service_kit.telemetry import Telemetry
from tests.unit.router.router_values import status
from tests.unit.router.test_wide_routing import Stub

ALICE = Caller("alice", frozenset({Scope.GENERATE}), cache_salt="pepper")


class Over:
    """Routing over two backends that count 100 tokens in any prompt."""

    def __init__(self, lengths: str = "budget", reusable: int = 0, context_tokens: int = 4096) -> None:
        self.ledger = Ledger()
        self.fleet = Fleet(dict.fromkeys("ab", "127.0.0.1:1"), self.ledger)
        for made in self.fleet.backends.values():
            message = status(step_rules=pb.StepRules(step_tokens=64), context_tokens=context_tokens)
            message.step_model.CopyFrom(pb.StepModel(base_s=0.01, per_token_s=1e-3, samples=50))
            made.hear(Snapshot.of(message), 0.0)
            made.stub = Stub(reusable)
        self.experience = Experience(make_lengths(lengths))
        self.routing = Routing(
            self.fleet,
            self.ledger,
            policy="predictive",
            probe_timeout_s=1.0,
            telemetry=Telemetry(),
            experience=self.experience,
            rng=random.Random(0),
            clock=lambda: 0.0,
        )

    async def decide(self, generated: int = 0, max_new_tokens: int = 50, text: str = "word " * 80, **options):
        request = pb.GenerateRequest(prompt=pb.Prompt(text=text), max_new_tokens=max_new_tokens, workload="chat")
        return await self.routing.decide(
            request.prompt, parse_generate(request), book=True, generated=generated, **options
        )


async def test_the_beginning_is_prefill_and_the_rest_is_the_budget():
    routed = await Over(reusable=90).decide(generated=30)
    lease = routed.lease
    assert (lease.prompt_tokens, lease.reusable_tokens, lease.prefill_tokens) == (130, 90, 40)
    assert (lease.max_new_tokens, lease.generated_tokens) == (20, 30)
    assert routed.decision.choice.reason.endswith("; it goes on after 30 tokens")
    candidate = routed.decision.candidates[0]
    assert (candidate.prompt_tokens, candidate.probe) == (130, ProbeOutcome.ANSWERED)
    assert routed.decision.log_fields()["generated_tokens"] == 30


async def test_it_costs_what_a_longer_prompt_and_a_shorter_answer_cost():
    continued = (await Over().decide(generated=30)).decision.price
    assert continued.own.prefill_tokens == 130
    assert continued.own.decode_tokens == 20
    assert continued.own.kv_tokens == 150


async def test_how_long_the_rest_is_taken_to_be_depends_on_what_there_is():
    over = Over("history")
    for _ in range(200):
        over.experience.lengths.observe(LengthOutcome("chat", 100, 200, 80, ended=True))
    fresh = (await over.decide(max_new_tokens=200)).decision.request
    late = (await over.decide(max_new_tokens=200, generated=60)).decision.request
    assert fresh.expected_new_tokens == pytest.approx(80, abs=3)
    assert late.expected_new_tokens == pytest.approx(20, abs=3)


async def test_what_it_teaches_is_the_whole_answers_length():
    over = Over("history")
    seen = []
    over.experience.lengths.observe = seen.append
    routed = await over.decide(generated=30)
    usage = pb.Usage(prompt_tokens=100, generated_tokens=45)
    over.routing.release(routed.lease, pb.Finished(finish_reason=pb.FINISH_REASON_EOS, usage=usage))
    assert seen == [LengthOutcome("chat", 100, 50, 45, ended=True)]


async def test_it_is_no_arrival():
    over = Over()
    times = []
    over.experience.arrived = times.append
    await over.decide(generated=1)
    assert times == []
    await over.decide()
    assert times == [0.0]


@pytest.mark.parametrize("generated", [0, 1, 49, 50])
async def test_the_context_that_it_needs_stays_the_same(generated):
    assert (await Over(context_tokens=150).decide(generated=generated)).lease is not None
    with pytest.raises(InvalidRequest, match=r"prompt of \d+ \+ max_new_tokens of \d+ = 150"):
        await Over(context_tokens=149).decide(generated=generated)


async def test_a_lease_tells_whose_it_is_and_when_it_should_be_done():
    over = Over()
    routed = await over.decide(caller=ALICE)
    assert routed.lease.client == "alice"
    assert routed.lease.finish_s == routed.decision.price.predicted_finish_s > 0
    assert over.ledger.finish_s("alice", 0.0) == routed.lease.finish_s


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 50), st.integers(0, 99))
async def test_sums_hold_for_any_cut(generated, reusable):
    over = Over(reusable=reusable)
    lease = (await over.decide(generated=generated)).lease
    assert lease.prompt_tokens + lease.max_new_tokens == 150
    assert lease.prefill_tokens == 100 + generated - reusable
    over.routing.release(lease, None)
    assert len(over.ledger) == 0
