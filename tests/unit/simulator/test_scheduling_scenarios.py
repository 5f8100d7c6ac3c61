"""The scheduling scenarios in virtual time: what each policy is for must show."""

from __future__ import annotations

import random
import statistics

import pytest

from simulator.scheduling import SCENARIOS, Rule, rules, simulate, work_s

FCFS, SHORTEST, PRIORITY = Rule("fcfs"), Rule("shortest_prefill_first"), Rule("priority")


def arrivals(name):
    return SCENARIOS[name](random.Random(1), small=True)


def median_ttft_s(outcomes, kind):
    return statistics.median(outcome.ttft_s for outcome in outcomes if outcome.kind == kind)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_requests_are_served_under_every_rule(name):
    coming = arrivals(name)
    kinds = sorted(arrival.kind for arrival in coming)
    assert all(sorted(outcome.kind for outcome in simulate(coming, rule)) == kinds for rule in rules(coming))


def test_shortest_first_frees_the_short_ones_behind_a_long_one():
    coming = arrivals("head_of_line")
    plain, shortest = simulate(coming, FCFS), simulate(coming, SHORTEST)
    assert median_ttft_s(shortest, "short") < median_ttft_s(plain, "short") / 2
    assert median_ttft_s(plain, "long") < median_ttft_s(shortest, "long") < 2 * median_ttft_s(plain, "long")


def test_priority_frees_the_interactive_ones_beside_a_backlog():
    coming = arrivals("backlog")
    plain, priority = simulate(coming, FCFS), simulate(coming, PRIORITY)
    assert median_ttft_s(priority, "interactive") < median_ttft_s(plain, "interactive") / 3


def test_the_mixed_load_is_what_it_says():
    coming = SCENARIOS["mixed"](random.Random(1), small=False)
    work = sum(work_s(arrival.prompt_tokens, arrival.new_tokens) for arrival in coming)
    assert work / coming[-1].at_s == pytest.approx(0.8, abs=0.1)
