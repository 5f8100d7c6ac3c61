"""One prefill for a prefix that several waiting requests need."""

from __future__ import annotations

import pytest

from backend_service.engines.base import Admission
from backend_service.engines.simulated import SimulatedEngine, SimulatedSpeed
from backend_service.kv_pool import PoolLimits
from backend_service.request import Ended, Request
from backend_service.scheduler import Scheduler, SchedulerLimits
from backend_service.single_flight import MIN_GAIN_TOKENS, SingleFlight
from backend_service.step_plan import StepLimits
from backend_service.text import TextStream
from service_kit.requests import Sampling
from simulator.clock import VirtualClock

PREFIX = list(range(200))


def request(name, tokens, max_new_tokens=4, cache_salt=""):
    return Request(
        id=name,
        tokens=tokens,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(),
        ignore_eos=True,
        text=TextStream([b"x"] * 257),
        eos=frozenset(),
        reusable_estimate=0,
        submitted_s=0.0,
        cache_salt=cache_salt,
    )


def running(name, tokens, computed, cache_salt=""):
    leader = request(name, tokens, cache_salt=cache_salt)
    leader.admit(Admission(0, 0), 0.0)
    leader.computed_tokens = computed
    return leader


def flight(reusable=0, max_wait_s=10.0):
    return SingleFlight(lambda tokens, salt: reusable, max_wait_s=max_wait_s)


def test_a_request_waits_for_a_prefix_that_is_being_computed():
    waiting = request("b", [*PREFIX, 7])
    assert flight().holds(waiting, [running("a", [*PREFIX, 9], computed=0)], now_s=0.0)
    assert waiting.reusable_estimate == len(PREFIX)
    assert waiting.remaining_prefill_tokens == 1


@pytest.mark.parametrize(
    ("own", "computed", "reusable"),
    [
        ([*range(1000, 1200)], 0, 0),
        ([*PREFIX[: MIN_GAIN_TOKENS - 1], *range(1000, 1100)], 0, 0),
        ([*PREFIX, 7], len(PREFIX) - MIN_GAIN_TOKENS + 1, len(PREFIX) - MIN_GAIN_TOKENS + 1),
        ([*PREFIX, 7], 0, len(PREFIX)),
    ],
    ids=["nothing in common", "too little in common", "nearly computed", "resident anyway"],
)
def test_it_does_not_wait_for_less_than_it_is_worth(own, computed, reusable):
    waiting = request("b", own)
    assert not flight(reusable).holds(waiting, [running("a", [*PREFIX, 9], computed)], now_s=0.0)
    assert waiting.held_s is None


def test_a_decoding_request_computes_no_prefix_for_others():
    leader = running("a", [*PREFIX, 9], computed=0)
    leader.accept(5, 0.0)
    assert not flight().holds(request("b", [*PREFIX, 7]), [leader], now_s=0.0)


@pytest.mark.parametrize(
    ("mine", "theirs", "held"), [("a", "b", False), ("a", "", False), ("", "a", False), ("a", "a", True)]
)
def test_only_a_prefix_of_its_own_salt_is_waited_for(mine, theirs, held):
    asked = []

    def probe(tokens, salt):
        asked.append(salt)
        return 0

    waiting = request("b", [*PREFIX, 7], cache_salt=mine)
    leader = running("a", [*PREFIX, 9], computed=0, cache_salt=theirs)
    assert SingleFlight(probe, max_wait_s=10.0).holds(waiting, [leader], now_s=0.0) is held
    assert set(asked) <= {mine}
    assert (waiting.reusable_estimate > 0) is held


def test_the_wait_is_bounded_and_starts_anew_after_it_was_over():
    waiting, leader = request("b", [*PREFIX, 7]), running("a", [*PREFIX, 9], computed=0)
    rule = flight(max_wait_s=5.0)
    assert rule.holds(waiting, [leader], now_s=1.0)
    assert rule.holds(waiting, [leader], now_s=5.9)
    assert not rule.holds(waiting, [leader], now_s=6.0)
    assert not rule.holds(waiting, [], now_s=7.0)
    assert rule.holds(waiting, [leader], now_s=8.0)


def test_no_wait_allowed_holds_nobody():
    assert not flight(max_wait_s=0.0).holds(request("b", PREFIX), [running("a", PREFIX, computed=0)], now_s=0.0)


class CountingEngine(SimulatedEngine):
    """Counts the prompt tokens that were computed."""

    prefilled = 0

    def step(self, slices):
        self.prefilled += sum(piece.tokens for piece in slices if piece.tokens > 1)
        return super().step(slices)


def run(scheduler):
    ends = []
    while scheduler.busy:
        ends += [event for event in scheduler.tick() if isinstance(event, Ended)]
    return {end.request_id: end for end in ends}


def bench(**limits):
    clock = VirtualClock()
    engine = CountingEngine(SimulatedSpeed(1000, {1: 0.01}), PoolLimits(8192, max_live=4), sleep=clock.sleep)
    return engine, Scheduler(engine, SchedulerLimits(4, StepLimits(40), **limits), clock=clock)


def test_identical_prompts_that_arrive_together_are_prefilled_once():
    engine, scheduler = bench()
    for index in range(8):
        scheduler.submit(request(f"r{index}", PREFIX))
    ends = run(scheduler)
    assert len(ends) == 8
    assert engine.prefilled == len(PREFIX)
    assert sorted(end.cached_tokens for end in ends.values()) == [0] + [len(PREFIX) - 1] * 7


def test_without_the_wait_each_of_a_full_batch_prefills():
    engine, scheduler = bench(prefix_wait_s=0.0)
    for index in range(8):
        scheduler.submit(request(f"r{index}", PREFIX))
    run(scheduler)
    assert engine.prefilled == 4 * len(PREFIX)


def test_requests_with_other_prompts_go_ahead_of_those_that_wait_for_a_prefix():
    _, scheduler = bench()
    scheduler.submit(request("leader", PREFIX))
    scheduler.submit(request("follower", PREFIX))
    scheduler.submit(request("other", list(range(1000, 1010))))
    scheduler.tick()
    phases = {view.id: view.phase.name for view in scheduler.snapshot().requests}
    assert phases["follower"] == "QUEUED"
    assert phases["other"] != "QUEUED"
    assert run(scheduler)["follower"].cached_tokens == len(PREFIX) - 1


def test_the_next_in_line_leads_when_the_leader_is_cancelled():
    engine, scheduler = bench()
    for name in ("leader", "second", "third"):
        scheduler.submit(request(name, PREFIX))
    scheduler.tick()
    scheduler.cancel("leader")
    ends = run(scheduler)
    assert sorted(ends) == ["second", "third"]
    assert engine.prefilled == len(PREFIX)  # what the leader had computed was not computed again
