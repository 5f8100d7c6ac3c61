"""The best split of a burst: as good as trying them all, where that can be done."""

from __future__ import annotations

import itertools

import pytest

from backend_service.engines.simulated import SimulatedSpeed
from phaseroute.scenarios.planned import Planned, Scenario
from simulator.play import PlayOptions, play
from simulator.profiles import Profile
from simulator.router import AssignedRouter
from simulator.search import best_split

FLEET = {
    "slow": Profile(SimulatedSpeed(200, {1: 0.02, 2: 0.04}), max_active=2),
    "fast": Profile(SimulatedSpeed(2000, {1: 0.003, 2: 0.012, 3: 0.03}), max_active=3),
}


def burst(count):
    lengths = [20, 35, 10, 28, 22, 31, 15, 25]
    return Scenario(
        "burst",
        "",
        tuple(
            Planned(at_s=1.0 + 0.05 * place, prompt_tokens=30, max_new_tokens=40, new_tokens=lengths[place])
            for place in range(count)
        ),
    )


def completion_s(scenario, split):
    options = PlayOptions(policy="assigned", learn=False)
    return play(scenario, FLEET, options, make_router=lambda backends: AssignedRouter(backends, split)).run.completion_s


@pytest.fixture(scope="module")
def by_brute_force():
    scenario = burst(6)
    return min(completion_s(scenario, split) for split in itertools.product(FLEET, repeat=6))


def test_trying_all_finds_what_brute_force_finds(by_brute_force):
    best = best_split(burst(6), FLEET)
    assert best.exhaustive
    assert best.completion_s == pytest.approx(by_brute_force)
    assert completion_s(burst(6), best.assignment) == pytest.approx(by_brute_force)


def test_moves_and_swaps_find_it_too(by_brute_force):
    best = best_split(burst(6), FLEET, exhaustive_splits=0)
    assert not best.exhaustive
    assert best.completion_s == pytest.approx(by_brute_force)


def test_a_search_repeats_exactly():
    assert best_split(burst(8), FLEET, exhaustive_splits=0) == best_split(burst(8), FLEET, exhaustive_splits=0)


def test_a_search_ends_with_what_it_has_after_so_many_plays():
    best = best_split(burst(8), FLEET, exhaustive_splits=0, most_plays=9)
    assert best.plays == 9
    assert completion_s(burst(8), best.assignment) == pytest.approx(best.completion_s)


def test_a_scenario_without_requests_has_no_best_split():
    with pytest.raises(ValueError, match="nothing to split"):
        best_split(Scenario("none", "", ()), FLEET)


def test_a_burst_that_nobody_can_serve_has_no_best_split():
    small = {name: Profile(profile.speed, kv_tokens=50) for name, profile in FLEET.items()}
    with pytest.raises(ValueError, match="no split answers every request"):
        best_split(burst(2), small)
