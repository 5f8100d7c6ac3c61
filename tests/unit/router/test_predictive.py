"""The predictive policy: what it minimises, whom it leaves out, and what it does without a step model."""

from __future__ import annotations

import pytest

from router_service.decision import RoutingRequest
from router_service.exploration import ExplorationLimits
from router_service.forecast import Job, Load
from router_service.policies.predictive import Objective, Predictive
from router_service.policies.registry import make_policy
from router_service.policies.two_phase import price as two_phase_price
from service_kit.requests import RoutingHints
from service_kit.step_time import StepModel, StepShape
from tests.unit.router.router_values import candidate, rng

FAST = StepModel(0.001, 0.0004, 0.0, 0.0, 100, 0.0, ((1, 0.002), (3, 0.034), (4, 0.041)))
"""Alone 3.4 ms a step, four rows 43 ms: an engine that gains nothing from batching."""
SLOW = StepModel(0.0, 0.0137, 0.0124, 0.0, 100, 0.0)
"""Alone 26 ms a step."""


def books(model: StepModel, *decoding: int, waiting: int = 0, **changes) -> Load:
    """Requests that decode with so many tokens to come, and others that wait with 20 + 128 tokens."""
    values = {
        "model": model,
        "max_active": 4,
        "step_tokens": 512,
        "step_target_s": None,
        "free_kv_tokens": 60_000,
        "active": tuple(Job(0, tokens, 516, 148) for tokens in decoding),
        "waiting": (Job(20, 128, 496, 148),) * waiting,
        **changes,
    }
    return Load(**values)


def warm(name: str, load: Load | None, **changes):
    """A candidate that holds 496 of the prompt's 516 tokens."""
    return candidate(name, prompt_tokens=516, reusable_tokens=496, load=load, **changes)


def choose(request: RoutingRequest, *candidates, **objective):
    return Predictive(rng(), Objective(**{"latest_weight": 0.0, **objective}))(request, candidates)


def test_an_idle_fleet_gives_a_request_to_the_fastest_backend():
    choice = choose(RoutingRequest(128), warm("fast", books(FAST)), warm("slow", books(SLOW)))
    price = choice.prices["fast"]
    assert choice.selected == "fast"
    assert price.priced_by == "forecast"
    assert price.delay_of_others_s == 0.0
    own_s = FAST.seconds(StepShape(20, 1, 0)) + 127 * FAST.seconds(StepShape(1, 1, 0))
    assert price.predicted_finish_s == pytest.approx(own_s)
    assert price.score_s == price.predicted_finish_s


def test_a_request_goes_where_it_delays_others_least_although_it_would_finish_sooner_among_them():
    candidates = (warm("fast", books(FAST, 60, 60)), warm("slow", books(SLOW)))
    request = RoutingRequest(8)
    together, alone = choose(request, *candidates), choose(request, *candidates, others_weight=0.0)
    assert alone.selected == "fast"
    assert together.selected == "slow"
    fast = together.prices["fast"]
    assert fast.predicted_finish_s < together.prices["slow"].predicted_finish_s
    assert fast.score_s == pytest.approx(fast.predicted_finish_s + fast.delay_of_others_s)
    assert alone.prices["fast"].score_s == fast.predicted_finish_s


def test_it_counts_a_little_that_the_last_request_of_all_finishes_later():
    even = StepModel(0.01, 1e-6, 0.0, 0.0, 100, 0.0)
    candidates = (warm("free", books(even)), warm("busy", books(even, 400)))
    price = choose(RoutingRequest(500), *candidates, latest_weight=0.25).prices["free"]
    assert price.delay_of_last_s == pytest.approx(5.0 - 4.0, abs=0.02)
    assert price.score_s == pytest.approx(price.predicted_finish_s + 0.25 * price.delay_of_last_s)
    short = choose(RoutingRequest(300), *candidates, latest_weight=0.25).prices["free"]
    assert short.delay_of_last_s == 0.0


def test_requests_that_are_likely_to_come_delay_this_one_and_count_for_nothing_themselves():
    request, quiet = RoutingRequest(64), warm("fast", books(FAST, 10))
    busy = warm("fast", books(FAST, 10), coming_in_s=(0.05, 0.1))
    alone, among = (choose(request, each).prices["fast"] for each in (quiet, busy))
    assert among.predicted_finish_s > 2 * alone.predicted_finish_s
    assert [job.weight for job in among.load.jobs] == [1.0, 0.0, 0.0]
    assert among.score_s == pytest.approx(among.predicted_finish_s + among.delay_of_others_s)


def test_a_batch_request_counts_by_its_weight():
    candidates = (warm("fast", books(FAST, 60, 60)),)
    prices = [
        choose(RoutingRequest(32, batch=batch), *candidates, batch_weight=0.25).prices["fast"]
        for batch in (False, True)
    ]
    assert prices[0].score_s - prices[1].score_s == pytest.approx(0.75 * prices[0].predicted_finish_s)


def test_the_expected_length_decides_where_the_budget_would_decide_otherwise():
    candidates = (warm("fast", books(FAST, 100, 100, 100, 100)), warm("slow", books(SLOW)))
    short = RoutingRequest(512, expected_new_tokens=40)
    assert choose(short, *candidates).selected == "slow"
    assert choose(RoutingRequest(512), *candidates).selected == "fast"


def test_candidates_that_would_miss_the_time_to_first_token_are_left_out():
    request = RoutingRequest(128, hints=RoutingHints(ttft_slo_s=1.0))
    # A long line on the fast one: it would still cost least, were it not for the first token.
    candidates = (warm("fast", books(FAST, 128, 128, 128, 128)), warm("slow", books(SLOW)))
    choice = choose(request, *candidates)
    assert choice.selected == "slow"
    assert "first token would come after" in choice.prices["fast"].unfit
    assert "too late: fast" in choice.reason


def test_when_all_would_miss_the_deadline_the_earliest_finish_says_when_to_ask_again():
    request = RoutingRequest(128, deadline_s=0.1)
    choice = choose(request, warm("fast", books(FAST)), warm("slow", books(SLOW)))
    assert choice.selected == ""
    assert choice.retry_after_s == choice.prices["fast"].predicted_finish_s
    assert "past the deadline" in choice.reason


def test_a_deadline_that_somebody_meets_refuses_nothing():
    choice = choose(RoutingRequest(128, deadline_s=2.0), warm("fast", books(FAST)), warm("slow", books(SLOW)))
    assert choice.selected == "fast"
    assert choice.prices["slow"].unfit


def test_without_a_step_model_a_candidate_is_priced_as_two_phase_does_and_marked():
    crude = warm("crude", None, active=1, waiting_decode_tokens=100)
    request = RoutingRequest(128)
    choice = choose(request, crude, warm("slow", books(SLOW, 10, 10, 10, 10)))
    assert choice.prices["crude"].priced_by == "two_phase"
    assert choice.prices["crude"].score_s == two_phase_price(request, crude).score_s
    assert "priced as two_phase does: crude" in choice.reason


def test_without_any_price_the_fewest_requests_decide():
    choice = choose(RoutingRequest(8), candidate("a", None, active=2), candidate("b", None, active=1))
    assert choice.selected == "b"
    assert "no candidate has measured rates" in choice.reason


def test_an_unmeasured_backend_gets_a_request_that_has_time_and_no_other():
    candidates = (warm("fast", books(FAST)), candidate("new", None, unmeasured="its rates are unknown"))
    assert choose(RoutingRequest(32), *candidates).selected == "fast"
    explored = choose(RoutingRequest(32, batch=True), *candidates)
    assert explored.selected == "new"
    assert explored.prices["new"].priced_by == "exploration"
    assert "its rates are unknown" in explored.reason
    assert choose(RoutingRequest(32, deadline_s=60.0), *candidates).selected == "new"
    assert choose(RoutingRequest(32, deadline_s=0.2), *candidates).selected == "fast"
    hurried = RoutingRequest(32, batch=True, hints=RoutingHints(ttft_slo_s=5.0))
    assert choose(hurried, *candidates).selected == "fast"


def test_ties_are_drawn():
    policy = Predictive(rng(1))
    candidates = [warm(name, books(SLOW)) for name in "abcd"]
    chosen = {policy(RoutingRequest(16), candidates).selected for _ in range(60)}
    assert chosen == set("abcd")


def test_the_registry_knows_both_objectives():
    objective = Objective(others_weight=0.5, exploration=ExplorationLimits(per_incarnation=0))
    both = make_policy("predictive", ["a"], rng(), objective)
    own = make_policy("predictive_own", ["a"], rng(), objective)
    assert (both.name, both.objective.others_weight) == ("predictive", 0.5)
    assert (own.name, own.objective.others_weight) == ("predictive_own", 0.0)
    assert own.objective.exploration.per_incarnation == 0
