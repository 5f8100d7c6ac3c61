from __future__ import annotations

import statistics

import pytest

from phaseroute.scenarios.bounds import BadScenario
from phaseroute.scenarios.incidents import parse_incident
from phaseroute.scenarios.planned import Incident, IncidentKind
from phaseroute.scenarios.presets import PRESETS, ScenarioOptions, build
from phaseroute.scenarios.trace import write_trace

FEWER = {"wide": ScenarioOptions(requests=500)}


@pytest.mark.parametrize("name", PRESETS)
def test_a_scenario_is_sound_and_the_same_for_the_same_seed(name):
    scenario = build(name, options=FEWER.get(name), seed=5)
    assert scenario == build(name, options=FEWER.get(name), seed=5)
    assert scenario.name == name
    times_s = [planned.at_s for planned in scenario.requests]
    assert times_s == sorted(times_s)
    for planned in scenario.requests:
        assert planned.prompt_tokens >= 2
        assert 1 <= planned.new_tokens <= planned.max_new_tokens
        assert 0 <= planned.prefix_tokens < planned.prompt_tokens


def test_another_seed_is_another_draw():
    assert build("poisson", seed=0).requests != build("poisson", seed=1).requests


@pytest.mark.parametrize("requests", [8, 48])
def test_the_articles_bursts_are_as_published(requests):
    scenario = build(f"article{requests}")
    assert len(scenario.requests) == requests
    assert scenario.warm == (0,)
    for index, planned in enumerate(scenario.requests):
        assert planned.at_s == pytest.approx(0.05 * index)
        assert (planned.prompt_tokens, planned.prefix, planned.prefix_tokens) == (516, 0, 496)
        assert (planned.max_new_tokens, planned.new_tokens) == (128, 128)


@pytest.mark.parametrize(("name", "budget"), [("shorter", 128), ("longer", 512)])
def test_answers_are_free_to_end_where_estimates_are_tried(name, budget):
    requests = build(name).requests
    assert {planned.max_new_tokens for planned in requests} == {budget}
    assert all(planned.new_tokens < budget for planned in requests)
    assert statistics.median(planned.new_tokens for planned in requests) == pytest.approx(43, abs=8)
    assert {planned.workload for planned in requests} == {"chat"}


def test_a_change_of_one_thing_leaves_the_others():
    def parts(options):
        requests = build("prefixes", options=options, seed=2).requests
        return (
            [planned.at_s for planned in requests],
            [planned.prompt_tokens for planned in requests],
            [planned.prefix for planned in requests],
        )

    arrivals, prompts, prefixes = parts(None)
    other = parts(ScenarioOptions(arrivals="gamma:rate=1,cv=4"))
    assert other[0] != arrivals
    assert other[1:] == (prompts, prefixes)
    other = parts(ScenarioOptions(prompts="uniform:low=450,high=500"))
    assert other[1] != prompts
    assert (other[0], other[2]) == (arrivals, prefixes)
    other = parts(ScenarioOptions(sharing="none"))
    assert other[2] != prefixes
    assert other[:2] == (arrivals, prompts)


@pytest.mark.parametrize(
    ("name", "changes", "of_all"),
    [
        ("article8", {"prompt_tokens": 600}, {"prompt_tokens": 600, "prefix_tokens": 496}),
        ("article8", {"prompt_tokens": 100}, {"prompt_tokens": 100, "prefix_tokens": 99}),
        ("article8", {"new_tokens": 64}, {"new_tokens": 64, "max_new_tokens": 64}),
        ("article8", {"new_tokens": 64, "max_new_tokens": 128}, {"new_tokens": 64, "max_new_tokens": 128}),
        ("article8", {"new_tokens": 99, "max_new_tokens": 99}, {"new_tokens": 99, "max_new_tokens": 99}),
        ("article8", {"max_new_tokens": 99}, {"new_tokens": 99, "max_new_tokens": 99}),
        ("shorter", {"new_tokens": 30}, {"new_tokens": 30, "max_new_tokens": 128}),
        ("article8", {"answers": "30"}, {"new_tokens": 30, "max_new_tokens": 128}),
        ("article8", {"budgets": "40"}, {"new_tokens": 40, "max_new_tokens": 40}),
        ("article8", {"prefix_tokens": 100}, {"prefix_tokens": 100}),
        ("article8", {"sharing": "none"}, {"prefix": -1, "prefix_tokens": 0}),
        ("article8", {"deadline_s": 3.0, "ttft_slo_s": 0.5}, {"deadline_s": 3.0, "ttft_slo_s": 0.5}),
    ],
)
def test_options_take_the_place_of_a_scenarios_own_values(name, changes, of_all):
    scenario = build(name, options=ScenarioOptions(**changes))
    for planned in scenario.requests:
        assert {field: getattr(planned, field) for field in of_all} == of_all
    assert all(f"{option} {value}" in scenario.description for option, value in changes.items())


def test_rates_gaps_and_hits_are_those_of_the_scenarios_own_kind():
    assert build("article8", options=ScenarioOptions(gap_s=1.0)).duration_s == pytest.approx(7)
    slow = build("poisson", options=ScenarioOptions(rate=0.1)).duration_s
    assert slow == pytest.approx(10 * build("poisson").duration_s)
    none = build("prefixes", options=ScenarioOptions(hit_rate=0.0, prefixes=3))
    assert all(planned.prefix == -1 for planned in none.requests)


@pytest.mark.parametrize(
    ("name", "changes", "blamed", "says"),
    [
        ("nothing", {}, "", "'nothing' is no scenario; use one of article8, article48,"),
        ("article8", {"requests": 0}, "requests", "requests is 0; give 1 to 1000000"),
        ("article8", {"rate": 1.0}, "rate", "there is no rate to the arrivals of article8: they are gap"),
        (
            "article8",
            {"hit_rate": 0.5},
            "hit_rate",
            "there is no hit_rate to the prefixes of article8: they are shared",
        ),
        ("poisson", {"rate": -1.0}, "rate", "rate is -1; give a number from 0.0001"),
        ("poisson", {"rate": float("nan")}, "rate", "rate is nan; give"),
        ("article8", {"gap_s": float("inf")}, "gap_s", "gap_s is inf; give a number from 0 to 86400"),
        ("gamma", {"cv": 0.0}, "cv", "cv is 0; give a number from 0.01 to 100"),
        ("article8", {"prompt_tokens": 1}, "prompt_tokens", "prompt_tokens is 1; give 2 to"),
        ("article8", {"new_tokens": 5, "max_new_tokens": 4}, "new_tokens", "new_tokens is 5; give 1 to 4"),
        ("article8", {"deadline_s": 0.0}, "deadline_s", "deadline_s is 0; give seconds above 0"),
        ("article8", {"arrivals": "x"}, "arrivals", "no known kind"),
        ("article8", {"answers": "x"}, "answers", "no known kind"),
        ("trace:/nowhere.csv", {}, "", "/nowhere.csv cannot be read"),
        ("trace:/nowhere.csv", {"rate": 1.0}, "rate", "a trace is played as it was recorded, without rate"),
    ],
)
def test_impossible_values_are_refused_with_what_is_allowed_and_who_is_to_blame(name, changes, blamed, says):
    with pytest.raises(BadScenario) as raised:
        build(name, options=ScenarioOptions(**changes))
    assert says in str(raised.value)
    assert raised.value.option == blamed


def test_of_a_trace_the_first_requests_can_be_played(tmp_path):
    path = tmp_path / "day.csv"
    write_trace(path, build("poisson"))
    short = build(f"trace:{path}", options=ScenarioOptions(requests=5))
    assert short.requests == build("poisson").requests[:5]
    assert short.name == "trace:day"
    with pytest.raises(BadScenario, match="requests is 49; give 1 to 48"):
        build(f"trace:{path}", options=ScenarioOptions(requests=49))
    replayed = build("long", options=ScenarioOptions(arrivals=f"trace:{path}"))
    assert [planned.at_s for planned in replayed.requests] == [planned.at_s for planned in short.requests] + [
        planned.at_s for planned in build("poisson").requests[5:8]
    ]


def test_incidents_as_people_write_them():
    assert parse_incident(IncidentKind.FAIL, "gpu@12.5") == Incident(12.5, "gpu", IncidentKind.FAIL)
    assert parse_incident(IncidentKind.SLOW, "a@b@3:2") == Incident(3.0, "a@b", IncidentKind.SLOW, 2.0)


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (IncidentKind.FAIL, "gpu", "write it like gpu@12.5"),
        (IncidentKind.FAIL, "@3", "write it like gpu@12.5"),
        (IncidentKind.RETURN, "gpu@3:2", "write it like gpu@12.5"),
        (IncidentKind.SLOW, "gpu@3", "write it like gpu@12.5:2"),
        (IncidentKind.FAIL, "gpu@-1", "the time is '-1'; give 0 to 1e+09"),
        (IncidentKind.SLOW, "gpu@1:0", "the factor is '0'; give 0.001 to 1000"),
        (IncidentKind.SLOW, "gpu@1:nan", "the factor is 'nan'"),
    ],
)
def test_wrong_incidents_name_the_value_and_what_is_allowed(kind, text, says):
    with pytest.raises(BadScenario) as raised:
        parse_incident(kind, text)
    assert says in str(raised.value)
