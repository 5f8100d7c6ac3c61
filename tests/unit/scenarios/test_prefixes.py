from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseroute.scenarios.bounds import BadScenario
from phaseroute.scenarios.prefixes import Pool, Prompt, Shared, Turns, Unshared, parse_prefixes

PATTERNS = st.one_of(
    st.just(Unshared()),
    st.builds(Shared, st.integers(1, 300)),
    st.builds(Pool, st.integers(1, 20), st.integers(1, 300), st.floats(0, 1), st.floats(0, 3)),
    st.builds(Turns, st.integers(1, 5), st.integers(2, 500)),
)


def shared(pattern, lengths, seed=0):
    return list(pattern.share(lengths, random.Random(seed)))


@given(PATTERNS, st.lists(st.integers(2, 400), max_size=30), st.integers())
def test_a_prompt_has_at_least_one_token_of_its_own(pattern, lengths, seed):
    prompts = shared(pattern, lengths, seed)
    assert len(prompts) == len(lengths)
    for prompt in prompts:
        assert 0 <= prompt.prefix_tokens < prompt.tokens
        assert (prompt.prefix >= 0) == (prompt.prefix_tokens > 0)
    assert prompts == shared(pattern, lengths, seed)


def test_a_shared_prefix_is_warm_unless_told_otherwise():
    assert shared(Shared(496), [516, 100]) == [Prompt(516, 0, 496), Prompt(100, 0, 99)]
    assert (Shared(496).warm, Shared(496, held=0).warm) == ((0,), ())


def test_a_pool_hits_as_often_as_asked_for():
    prompts = shared(Pool(20, 40, 0.6), [100] * 20_000)
    assert sum(prompt.prefix >= 0 for prompt in prompts) / len(prompts) == pytest.approx(0.6, abs=0.015)
    assert all(prompt.prefix_tokens == 40 for prompt in prompts if prompt.prefix >= 0)


def test_known_prefixes_are_taken_by_zipfs_law():
    counts = Counter(prompt.prefix for prompt in shared(Pool(4, 40, 1.0, skew=1.0), [100] * 20_000))
    assert [counts[place] / counts[0] for place in range(4)] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4], abs=0.03)
    even = Counter(prompt.prefix for prompt in shared(Pool(4, 40, 1.0, skew=0.0), [100] * 20_000))
    assert max(even.values()) / min(even.values()) < 1.1


def test_another_hit_rate_leaves_the_hits_that_stay_alike():
    low, high = (shared(Pool(20, 40, rate), [100] * 300) for rate in (0.3, 0.7))
    for before, after in zip(low, high, strict=True):
        if before.prefix >= 0:
            assert before == after


def test_a_turn_repeats_the_one_before_it_and_adds_to_it():
    prompts = shared(Turns(3, most=400), [30] * 200)
    last: dict[int, int] = {}
    for prompt in prompts:
        assert prompt.tokens == last.get(prompt.prefix, 0) + 30
        assert prompt.prefix_tokens == prompt.tokens - 1
        assert prompt.tokens <= 400
        last[prompt.prefix] = prompt.tokens
    assert len(last) > 3


def test_patterns_as_people_write_them():
    assert parse_prefixes("none") == Unshared()
    assert parse_prefixes("shared:tokens=496") == parse_prefixes("shared:496") == Shared(496)
    assert parse_prefixes("pool:prefixes=20,tokens=400,hit_rate=0.6") == Pool(20, 400, 0.6)
    assert parse_prefixes("turns:8") == Turns(8)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("some", "use one of none, shared:tokens=...,held=1, pool:"),
        ("none:3", "'3' is not expected there; write none"),
        ("pool:prefixes=20,tokens=400,hit_rate=1.5", "hit_rate is 1.5; give a number from 0 to 1"),
        ("pool:prefixes=2.5,tokens=400,hit_rate=1", "prefixes is 2.5; give a whole number"),
    ],
)
def test_wrong_patterns_name_the_value_and_what_is_allowed(text, says):
    with pytest.raises(BadScenario) as raised:
        parse_prefixes(text)
    assert says in str(raised.value)
