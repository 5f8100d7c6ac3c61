"""Scenarios in virtual time: leaps change nothing, incidents and deadlines do what they do in a real fleet."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_service.engines.simulated import ModelSpeed, SimulatedSpeed
from backend_service.step_model import IsolatedRates
from phaseroute.scenarios.planned import Incident, IncidentKind, Planned, Scenario
from service_kit.faults import InvalidRequest, UnknownName
from service_kit.step_time import StepModel
from simulator.play import PlayOptions, play
from simulator.profiles import Profile

TABLE = SimulatedSpeed(400, {1: 0.004, 3: 0.036, 4: 0.043})
MODEL = ModelSpeed(
    StepModel(0.003, 0.0011, 0.007, 3e-5, 512, 0.0, row_corrections_s=((1, 0.0), (2, 0.005))), IsolatedRates(800, 85)
)
FIXED = PlayOptions(learn=False)


def request(at_s=0.0, prompt=40, new=10, **fields):
    return Planned(at_s=at_s, prompt_tokens=prompt, max_new_tokens=fields.pop("budget", new), new_tokens=new, **fields)


def scenario(*requests, incidents=(), warm=()):
    ordered = tuple(sorted(requests, key=lambda planned: planned.at_s))
    return Scenario("test", "", ordered, warm=warm, incidents=tuple(incidents))


times = st.floats(0, 3).map(lambda value: round(value, 3))
requests = st.builds(
    lambda at_s, prompt, budget, new, prefix, shared, batch, deadline_s: request(
        at_s,
        prompt,
        min(new, budget),
        budget=budget,
        prefix=prefix,
        prefix_tokens=min(shared, prompt - 1),
        batch=batch,
        deadline_s=deadline_s,
    ),
    times,
    st.integers(2, 150),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(-1, 2),
    st.integers(1, 120),
    st.booleans(),
    st.none() | st.floats(0.1, 5),
)
profiles = st.builds(
    Profile,
    st.sampled_from([TABLE, MODEL]),
    max_active=st.integers(1, 5),
    kv_tokens=st.sampled_from([200, 600, 4096]),
    step_tokens=st.sampled_from([16, 64, 512]),
    step_target_s=st.sampled_from([None, 0.05]),
    scheduling=st.sampled_from(["fcfs", "shortest_prefill_first", "priority"]),
)
incidents = st.builds(
    Incident, times, st.sampled_from(["a", "b"]), st.sampled_from(IncidentKind), st.sampled_from([0.5, 1.0, 3.0])
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=16),
    st.fixed_dictionaries({"a": profiles, "b": profiles}),
    st.lists(incidents, max_size=3),
    st.sampled_from(["two_phase", "least_loaded", "round_robin", "forced:b"]),
    st.sampled_from([0.05, 0.01, None]),
)
def test_leaps_change_nothing(planned, fleet, happening, policy, interval_s):
    options = PlayOptions(
        policy=policy, learn=False, progress_interval_s=interval_s, keep_gaps=True, keep_decisions=True
    )
    played = scenario(*planned, incidents=happening)
    leaping, stepping = (play(played, fleet, replace(options, leaps=leaps)) for leaps in (True, False))
    assert leaping.run == stepping.run
    assert [(routed.at_s, routed.candidates, routed.choice) for routed in leaping.decisions] == [
        (routed.at_s, routed.candidates, routed.choice) for routed in stepping.decisions
    ]


def served(planned, fleet, options=FIXED, **about):
    return play(scenario(*planned, **about), fleet, options).run.served


def test_a_request_whose_backend_fails_before_its_first_token_runs_elsewhere():
    fleet = {"a": Profile(TABLE, max_active=1), "b": Profile(TABLE)}
    failing = [Incident(0.3, "a", IncidentKind.FAIL)]
    forced = replace(FIXED, policy="round_robin")
    long = [request(0.01 * place, prompt=40, new=200) for place in range(4)]
    outcomes = served(long, fleet, forced, incidents=failing)
    by_code = {code: [item for item in outcomes if item.code == code] for code in ("OK", "UNAVAILABLE")}
    assert len(by_code["UNAVAILABLE"]) == 1  # the one that had its first token
    assert by_code["UNAVAILABLE"][0].backend == "a"
    assert [item.backend for item in by_code["OK"]] == ["b", "b", "b"]


def test_times_and_predictions_of_a_moved_request_count_from_its_arrival():
    fleet = {"fast": Profile(TABLE), "slow": Profile(SimulatedSpeed(200, {1: 0.008}))}
    failing = [Incident(0.09, "fast", IncidentKind.FAIL)]
    (moved,) = served([request()], fleet, incidents=failing)
    assert (moved.backend, moved.code) == ("slow", "OK")
    assert moved.ttft_s == pytest.approx(0.09 + 0.2)
    assert moved.predicted_ttft_s == pytest.approx(0.09 + 0.2)
    assert moved.predicted_finish_s == pytest.approx(0.09 + 0.2 + 10 * 0.008)


def test_nobody_is_left_when_the_only_backend_fails():
    failing = [Incident(0.01, "a", IncidentKind.FAIL)]
    outcomes = served([request(), request(0.5)], {"a": Profile(TABLE)}, incidents=failing)
    assert [(item.code, item.backend) for item in outcomes] == [("UNAVAILABLE", ""), ("UNAVAILABLE", "")]


def test_a_backend_comes_back_with_an_empty_cache():
    shared = {"prompt": 60, "prefix": 0, "prefix_tokens": 50}
    happening = [Incident(1.0, "a", IncidentKind.FAIL), Incident(1.5, "a", IncidentKind.RETURN)]
    planned = [request(0, **shared), request(0.9, **shared), request(2, **shared), request(2.9, **shared)]
    outcomes = served(planned, {"a": Profile(TABLE)}, incidents=happening, warm=(0,))
    assert [(item.code, item.cached_tokens) for item in outcomes] == [
        ("OK", 50),
        ("OK", 50),
        ("OK", 0),
        ("OK", 50),
    ]


def test_a_slow_down_stretches_the_steps_that_begin_after_it():
    alone = served([request(new=101)], {"a": Profile(TABLE)})[0]
    slowed = served([request(new=101)], {"a": Profile(TABLE)}, incidents=[Incident(0.2, "a", IncidentKind.SLOW, 3.0)])
    assert alone.finish_s == pytest.approx(0.1 + 100 * 0.004)
    assert slowed[0].finish_s == pytest.approx(0.1 + 25 * 0.004 + 75 * 0.012, abs=0.013)


def test_a_caller_that_gives_up_frees_its_place():
    planned = [request(0, new=500, deadline_s=1.0), request(0.1, new=5)]
    outcomes = served(planned, {"a": Profile(TABLE, max_active=1)})
    assert [item.code for item in outcomes] == ["DEADLINE_EXCEEDED", "OK"]
    assert outcomes[1].ttft_s == pytest.approx(0.9 + 0.1, abs=0.005)


def test_answers_end_where_the_scenario_says():
    outcomes = served([request(new=7, budget=100), request(new=12)], {"a": Profile(TABLE)})
    assert [item.new_tokens for item in outcomes] == [7, 12]


def test_gaps_are_the_times_between_tokens():
    planned = [request(0, new=30), request(0.15, new=5)]
    for options in (FIXED, PlayOptions()):
        outcomes = served(planned, {"a": Profile(TABLE)}, replace(options, keep_gaps=True))
        for item, plan in zip(outcomes, planned, strict=True):
            assert len(item.gaps_s) == plan.new_tokens - 1
            assert sum(item.gaps_s) == pytest.approx(item.finish_s - item.ttft_s)
        assert max(outcomes[0].gaps_s) == pytest.approx(0.004 + 0.1)  # the other one's prefill, beside a decode row
    assert served(planned, {"a": Profile(TABLE)})[0].gaps_s == ()


def test_a_request_that_fits_nowhere_is_refused():
    (outcome,) = served([request(prompt=300)], {"a": Profile(TABLE, kv_tokens=200)})
    assert (outcome.code, outcome.backend) == ("INVALID_ARGUMENT", "")


def test_a_warm_prefix_that_does_not_fit_is_refused():
    planned = [request(prompt=300, prefix=0, prefix_tokens=250)]
    with pytest.raises(ValueError, match="250 tokens does not fit the KV cache of a"):
        served(planned, {"a": Profile(TABLE, kv_tokens=200)}, warm=(0,))


def test_shorter_and_longer_parts_of_a_prefix_agree():
    planned = [
        request(0, prompt=60, prefix=3, prefix_tokens=40),
        request(5, prompt=90, prefix=3, prefix_tokens=80),
        request(10, prompt=90, prefix=3, prefix_tokens=80),
        request(15, prompt=90, prefix=4, prefix_tokens=80),
    ]
    assert [item.cached_tokens for item in served(planned, {"a": Profile(TABLE)})] == [0, 40, 80, 0]


@pytest.mark.parametrize(
    ("incident", "error", "message"),
    [
        (Incident(0, "c", IncidentKind.FAIL), UnknownName, r"incidents\[0\].*no backend is called so; there are a, b"),
        (Incident(-1, "a", IncidentKind.FAIL), InvalidRequest, r"at_s.*0 or more"),
        (Incident(0, "a", IncidentKind.SLOW, 0.0), InvalidRequest, r"factor.*more than 0"),
        (Incident(0, "a", IncidentKind.SLOW, float("nan")), InvalidRequest, r"factor.*more than 0"),
    ],
)
def test_impossible_incidents_are_refused(incident, error, message):
    with pytest.raises(error, match=message):
        served([request()], {"a": Profile(TABLE), "b": Profile(TABLE)}, incidents=[incident])


def test_an_unknown_policy_is_refused():
    with pytest.raises(InvalidRequest, match="is no policy"):
        served([request()], {"a": Profile(TABLE)}, PlayOptions(policy="best"))


def test_ties_are_drawn_by_the_seed():
    fleet = {name: Profile(TABLE) for name in "abcd"}

    def chosen(seed):
        planned = [request(float(place)) for place in range(12)]
        return [item.backend for item in served(planned, fleet, replace(FIXED, seed=seed))]

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)


def test_a_router_can_look_at_a_sample_of_a_wide_fleet():
    fleet = {str(place): Profile(TABLE) for place in range(20)}
    options = replace(FIXED, sample=3, keep_decisions=True)
    played = play(scenario(*[request(0.1 * place) for place in range(10)]), fleet, options)
    assert {len(routed.candidates) for routed in played.decisions} == {3}
    assert len({candidate.name for routed in played.decisions for candidate in routed.candidates}) > 10
