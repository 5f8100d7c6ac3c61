from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router_service.decision import ProbeOutcome, RoutingRequest
from router_service.eligibility import within_context
from router_service.policies.least_loaded import LeastLoaded
from router_service.policies.two_phase import TwoPhase
from router_service.pruning import worth_asking
from service_kit.faults import InvalidRequest
from tests.unit.router.router_values import CPU, GPU, candidate, rng

REQUEST = RoutingRequest(max_new_tokens=50)


def asked(candidates, at_most_tokens, policy=None, request=REQUEST):
    return {c.name for c in worth_asking(policy or TwoPhase(rng()), request, candidates, at_most_tokens)}


def test_a_candidate_that_loses_even_with_a_full_hit_is_not_asked():
    idle, swamped = candidate("idle", GPU), candidate("swamped", GPU, waiting_decode_tokens=5000)

    assert asked([idle, swamped], at_most_tokens=100) == {"idle"}


def test_a_candidate_that_a_hit_could_save_is_asked():
    idle, warm = candidate("idle", CPU), candidate("warm", CPU, waiting_decode_tokens=45)

    assert asked([idle, warm], at_most_tokens=100) == {"idle", "warm"}


def test_without_a_bound_everybody_is_asked():
    candidates = [candidate("idle", GPU), candidate("swamped", GPU, waiting_decode_tokens=5000)]

    assert asked(candidates, at_most_tokens=None) == {"idle", "swamped"}


def test_a_policy_that_does_not_price_reuse_prunes_nobody():
    candidates = [candidate("idle", GPU), candidate("swamped", GPU, waiting_decode_tokens=5000)]

    assert asked(candidates, at_most_tokens=100, policy=LeastLoaded(rng())) == {"idle", "swamped"}


def test_a_candidate_that_may_yet_drop_out_sets_no_bar():
    small = candidate("small", GPU, context_tokens=140)
    big = candidate("big", GPU, waiting_decode_tokens=5000)

    assert asked([small, big], at_most_tokens=100) == {"small", "big"}
    assert asked([replace(small, context_tokens=150), big], at_most_tokens=100) == {"small"}


rates = st.sampled_from([CPU, GPU, None])
tokens = st.integers(0, 4000)


@st.composite
def situations(draw):
    """Candidates, the prompt's true length and bound, and what each would answer."""
    true_tokens = draw(st.integers(1, 3000))
    at_most_tokens = true_tokens + draw(st.integers(0, 3000))
    candidates = [
        candidate(
            f"b{i}",
            draw(rates),
            waiting_prefill_tokens=draw(tokens),
            waiting_decode_tokens=draw(tokens),
            context_tokens=draw(st.sampled_from([200, 1500, 8192])),
            prompt_tokens_estimated=True,
        )
        for i in range(draw(st.integers(1, 6)))
    ]
    reusable = {c.name: draw(st.integers(0, true_tokens - 1)) for c in candidates}
    return candidates, true_tokens, at_most_tokens, reusable, draw(st.integers(0, 9))


def choose(candidates, answers, true_tokens, seed):
    """As routing does, given the answers of those who were asked."""
    filled = [
        replace(
            c,
            prompt_tokens=true_tokens,
            prompt_tokens_estimated=c.name not in answers,
            reusable_tokens=answers.get(c.name, 0),
            probe=ProbeOutcome.ANSWERED if c.name in answers else ProbeOutcome.SKIPPED,
        )
        for c in candidates
    ]
    try:
        fitting, _ = within_context(filled, REQUEST, prompt_tokens=true_tokens, context_tokens=0)
    except InvalidRequest:
        return None
    return TwoPhase(rng(seed))(REQUEST, fitting).selected


@given(situations())
def test_pruning_never_changes_the_choice(situation):
    candidates, true_tokens, at_most_tokens, reusable, seed = situation
    names = asked(candidates, at_most_tokens)

    pruned = choose(candidates, {name: reusable[name] for name in names}, true_tokens, seed)

    assert pruned == choose(candidates, reusable, true_tokens, seed)


@given(situations(), st.data())
def test_whoever_is_skipped_loses_whatever_becomes_of_the_other_probes(situation, data):
    candidates, true_tokens, at_most_tokens, reusable, seed = situation
    names = asked(candidates, at_most_tokens)
    answering = {name for name in names if data.draw(st.booleans())}
    counted = true_tokens if answering else data.draw(st.integers(1, at_most_tokens))
    possible = {name: min(reusable[name], counted - 1) for name in answering}
    priced = [c for c in candidates if c.rates is not None and counted + REQUEST.max_new_tokens <= c.context_tokens]

    selected = choose(candidates, possible, counted, seed)

    if priced and selected is not None:
        assert selected in names
