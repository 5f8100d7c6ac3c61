from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_service.decision import Rates, RoutingRequest
from router_service.policies.forced import Forced
from router_service.policies.least_loaded import LeastLoaded
from router_service.policies.registry import make_policy
from router_service.policies.round_robin import RoundRobin
from router_service.policies.two_phase import TwoPhase
from service_kit.faults import InvalidRequest
from tests.unit.router.router_values import CPU, GPU, candidate, rng

ARTICLE = json.loads((Path(__file__).parents[2] / "data" / "article.json").read_text())
REQUEST = RoutingRequest(max_new_tokens=128)


def article_candidate(name: str, row: dict):
    """The printed work includes the incoming request."""
    profile, workload = ARTICLE["profile_512_in_128_out_tok_s"][name], ARTICLE["workload"]
    uncached = workload["prompt_tokens"] - workload["reusable_prefix_tokens"]
    return candidate(
        name,
        Rates(profile["prefill"], profile["decode"]),
        active=row["active"],
        queued=row["queued"],
        waiting_prefill_tokens=row["prefill_tokens"] - uncached,
        waiting_decode_tokens=row["decode_tokens"] - workload["max_new_tokens"],
        prompt_tokens=workload["prompt_tokens"],
        reusable_tokens=workload["reusable_prefix_tokens"],
    )


@pytest.mark.parametrize("printed", ARTICLE["decisions_run1"], ids=lambda row: f"request {row['request']}")
def test_two_phase_reproduces_the_articles_scores_and_selections(printed):
    candidates = [article_candidate(name, printed[name]) for name in ("cpu", "gpu")]

    choice = TwoPhase(rng())(RoutingRequest(ARTICLE["workload"]["max_new_tokens"]), candidates)

    assert {name: round(price.score_s, 3) for name, price in choice.prices.items()} == {
        name: printed[name]["score_s"] for name in ("cpu", "gpu")
    }
    assert choice.selected == printed["selected"]
    assert f"{printed[choice.selected]['score_s']:.3f} s" in choice.reason


def test_two_phase_expects_the_first_token_before_its_own_decode():
    busy = candidate("gpu", GPU, waiting_decode_tokens=293, prompt_tokens=2551)

    price = TwoPhase(rng())(REQUEST, [busy]).prices["gpu"]

    assert price.predicted_ttft_s == pytest.approx(2.0)
    assert price.predicted_finish_s == price.score_s == pytest.approx(2.0 + 128 / 293)


def test_two_phase_never_prices_what_has_no_rates():
    idle, swamped = candidate("new", None), candidate("cpu", CPU, waiting_decode_tokens=10_000)

    choice = TwoPhase(rng())(REQUEST, [idle, swamped])

    assert choice.selected == "cpu"
    assert choice.prices["new"].score_s is None
    assert "without measured rates: new" in choice.reason


def test_two_phase_without_any_rates_takes_the_fewest_requests_and_says_so():
    choice = TwoPhase(rng())(REQUEST, [candidate("a", None, active=2), candidate("b", None, queued=1)])

    assert choice.selected == "b"
    assert "no candidate has measured rates" in choice.reason
    assert "fewest requests" in choice.reason


@given(
    waiting=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), min_size=1, max_size=6),
    prompt=st.integers(1, 4000),
    seed=st.integers(0, 99),
)
def test_two_phase_selects_a_lowest_score(waiting, prompt, seed):
    candidates = [
        candidate(
            f"b{i}",
            (CPU, GPU)[i % 2],
            waiting_prefill_tokens=prefill,
            waiting_decode_tokens=decode,
            prompt_tokens=prompt,
            reusable_tokens=prompt * i // 7,
        )
        for i, (prefill, decode) in enumerate(waiting)
    ]

    choice = TwoPhase(rng(seed))(REQUEST, candidates)

    assert choice.prices[choice.selected].score_s == min(price.score_s for price in choice.prices.values())


@pytest.mark.parametrize("make", [TwoPhase, LeastLoaded, RoundRobin])
def test_ties_are_broken_at_random(make):
    policy = make(rng())

    chosen = Counter(policy(REQUEST, [candidate("a"), candidate("b")]).selected for _ in range(200))

    assert min(chosen["a"], chosen["b"]) > 60


def test_unequal_pair_least_loaded_counts_requests_where_two_phase_counts_seconds():
    fast = candidate("gpu", GPU, active=2, waiting_decode_tokens=256)
    slow = candidate("cpu", CPU, active=1, waiting_decode_tokens=128)

    assert LeastLoaded(rng())(REQUEST, [fast, slow]).selected == "cpu"
    assert TwoPhase(rng())(REQUEST, [fast, slow]).selected == "gpu"


def test_round_robin_takes_the_longest_waiting_whatever_its_load():
    last_turn = {"a": 3, "b": 1, "c": 2}
    candidates = [candidate(name, last_turn=turn, active=9 * turn) for name, turn in last_turn.items()]

    assert RoundRobin(rng())(REQUEST, candidates).selected == "b"


def test_forced_takes_its_backend_and_prices_all_for_the_record():
    choice = Forced("cpu")(REQUEST, [candidate("cpu", CPU, queued=50), candidate("gpu", GPU)])

    assert choice.selected == "cpu"
    assert choice.prices["gpu"].score_s < choice.prices["cpu"].score_s


def test_forced_takes_nobody_else():
    choice = Forced("cpu")(REQUEST, [candidate("gpu", GPU)])

    assert choice.selected == ""
    assert "cpu is no candidate" in choice.reason


@pytest.mark.parametrize("name", ["two_phase", "round_robin", "least_loaded", "forced:cpu"])
def test_registry_makes_each_policy_by_its_own_name(name):
    assert make_policy(name, {"cpu", "gpu"}, rng()).name == name


def test_registry_lists_what_there_is():
    with pytest.raises(
        InvalidRequest, match="least_loaded, predictive, predictive_own, round_robin, two_phase, forced:<backend>"
    ):
        make_policy("fastest", {"cpu"}, rng())
    with pytest.raises(InvalidRequest, match="'forced:tpu' names no backend here; there are cpu, gpu"):
        make_policy("forced:tpu", {"gpu", "cpu"}, rng())
