"""Simulated: where policies send one more request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phaseroute.scenarios.presets import build
from service_kit.faults import InvalidRequest, UnknownName
from simulator.crossover import Asked, after, crossover_map
from simulator.devices import fleet
from simulator.maps import fastest, maps_of, typical

ARTICLE = Asked(prompt_tokens=516, max_new_tokens=128)
FREE = replace(ARTICLE, workload="chat", ignore_eos=False)
PAIR = fleet("article")
BACKLOG = range(0, 20, 2)


def chart(policy, **others):
    values = {"asked": ARTICLE, "backlog": BACKLOG, "cached_tokens": (0, 496), **others}
    return crossover_map(policy, PAIR, "gpu", **values)


def to_busy(made):
    """Cells in which the request joins the backlog, by column."""
    busy = made.backends.index(made.busy)
    return [sum(row[column] == busy for row in made.choice) for column in range(len(made.cached_tokens))]


@pytest.mark.parametrize("policy", ["two_phase", "predictive"])
def test_an_idle_gpu_gets_the_request_and_a_loaded_one_keeps_it_longer_when_it_holds_the_prefix(policy):
    made = chart(policy, backlog=range(0, 80, 4))
    assert made.choice[0] == (1, 1)
    cold, warm = to_busy(made)
    assert 0 < cold <= warm < len(made.backlog)


def test_two_phase_prices_a_backlog_at_isolated_rates_as_the_article_does():
    """(n + 1) * (20 / 2551 + 128 / 293) on the GPU against 516 / 73 + 128 / 45 on the CPU, which is cold."""
    made = chart("two_phase", backlog=range(40), cached_tokens=(496,))
    cpu_s = 516 / 73 + 128 / 45
    expected = [int((requests + 1) * (20 / 2551 + 128 / 293) < cpu_s) for requests in made.backlog]
    assert [row[0] for row in made.choice] == expected
    assert 0 < sum(expected) < 40


def test_predictive_knows_that_a_batch_is_slow_and_leaves_the_gpu_earlier_than_two_phase():
    assert to_busy(chart("predictive"))[1] < to_busy(chart("two_phase"))[1]


def test_the_crossover_moves_up_where_answers_are_known_to_be_short():
    short = build("shorter").requests
    by_budget, by_history = (
        to_busy(chart("predictive", asked=FREE, lengths=after(way, short))) for way in ("budget", "history")
    )
    assert all(longer > before for longer, before in zip(by_history, by_budget, strict=True))


def test_answers_that_have_their_whole_budget_teach_nothing():
    assert after("history", build("article8").requests).version == 0
    assert after("history", build("shorter").requests).version > 0


def test_a_map_says_what_it_is_of_and_repeats_exactly():
    made = chart("predictive", note="a note")
    assert (made.policy, made.backends, made.busy, made.note) == ("predictive", ("cpu", "gpu"), "gpu", "a note")
    assert (made.prompt_tokens, made.new_tokens) == (516, 128)
    assert (len(made.choice), len(made.choice[0])) == (len(made.backlog), len(made.cached_tokens))
    assert made == chart("predictive", note="a note")


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(UnknownName, match="there are cpu, gpu"):
        crossover_map("predictive", PAIR, "tpu", asked=ARTICLE, backlog=(0,), cached_tokens=(0,))
    with pytest.raises(InvalidRequest):
        chart("no such policy")
    with pytest.raises(ValueError, match="from 0 to 515"):
        chart("predictive", cached_tokens=(516,))
    with pytest.raises(ValueError, match="backlog of 0 or more"):
        chart("predictive", backlog=(-1,))


def test_the_typical_request_of_a_scenario_is_its_median_one():
    assert typical(build("article48")) == ARTICLE
    assert typical(build("shorter")) == FREE
    assert fastest(PAIR, ARTICLE) == "gpu"


def test_scenarios_of_equal_requests_share_a_map_and_fixed_policies_have_none():
    scenarios = [build("article8"), build("article48")]
    made = dict(maps_of(scenarios, PAIR, ("forced:gpu", "round_robin", "two_phase", "predictive"), "history"))
    assert list(made) == ["article8_two_phase_crossover", "article8_predictive_crossover"]
    assert made["article8_two_phase_crossover"].busy == "gpu"


def test_where_answers_end_early_every_way_to_estimate_them_has_a_map():
    made = dict(maps_of([build("shorter")], PAIR, ("two_phase", "predictive"), "budget"))
    notes = [chart.note for chart in made.values()]
    assert notes == ["", "answers by history", "answers by ratio", "answers by budget"]


def test_a_wide_fleet_has_no_map():
    assert list(maps_of([build("article8")], fleet("wide:9"), ("predictive",), "history")) == []
