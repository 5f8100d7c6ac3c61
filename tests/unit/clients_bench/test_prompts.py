"""The token ids that stand for a scenario's prompts."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from phaseroute.bench.prompts import FIRST_ID, LAST_ID, ScenarioPrompts
from phaseroute.scenarios.planned import Planned, Scenario


def planned(prompt_tokens: int, prefix: int = -1, prefix_tokens: int = 0) -> Planned:
    return Planned(
        at_s=0.0,
        prompt_tokens=prompt_tokens,
        prefix=prefix,
        prefix_tokens=prefix_tokens,
        max_new_tokens=8,
        new_tokens=8,
    )


def prompts_of(scenario: Scenario, *, seed: int = 0, play: int = 0) -> list[tuple[int, ...]]:
    made = ScenarioPrompts(scenario, seed=seed, play=play)
    return [made.prompt(index, item) for index, item in enumerate(scenario.requests)]


def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


requests = st.builds(
    lambda own, prefix, length: planned(own + length, prefix, length) if length else planned(own + 1),
    st.integers(1, 40), st.integers(0, 3), st.integers(0, 60),
)  # fmt: skip


@given(st.lists(requests, min_size=1, max_size=8), st.integers(0, 5), st.integers(0, 5))
def test_lengths_are_exact_and_equal_prefixes_are_equal_tokens(items, seed, play):
    made = prompts_of(Scenario("s", "", tuple(items), warm=(1,)), seed=seed, play=play)
    for item, prompt in zip(items, made, strict=True):
        assert len(prompt) == item.prompt_tokens
        assert all(FIRST_ID <= token <= LAST_ID for token in prompt)
    for (one, first), (other, second) in itertools.combinations(zip(items, made, strict=True), 2):
        if one.prefix == other.prefix >= 0:
            assert shared(first, second) >= min(one.prefix_tokens, other.prefix_tokens)


def test_suffixes_and_other_prefixes_differ():
    made = prompts_of(Scenario("s", "", (planned(60, 0, 40), planned(60, 0, 40), planned(60, 1, 40), planned(60))))
    assert 40 <= shared(made[0], made[1]) < 44
    assert all(shared(one, other) < 4 for one, other in itertools.combinations([made[0], made[2], made[3]], 2))


def test_only_warm_prefixes_are_the_same_in_every_play():
    scenario = Scenario("s", "", (planned(60, 0, 40), planned(60, 1, 40)), warm=(0,))
    first, second = prompts_of(scenario, play=0), prompts_of(scenario, play=1)
    assert 40 <= shared(first[0], second[0]) < 44
    assert shared(first[1], second[1]) < 4
    assert prompts_of(scenario, play=1) == second


def test_what_warms_is_the_longest_use_of_a_prefix_and_one_token():
    scenario = Scenario("s", "", (planned(60, 3, 20), planned(60, 3, 40), planned(60, 5, 30)), warm=(3, 9))
    made = ScenarioPrompts(scenario, seed=0, play=0)
    (one,), (other,) = made.warm_prompts(0), made.warm_prompts(1)
    assert shared(one, made.prompt(1, scenario.requests[1])) >= 40
    assert (len(one), shared(one, other)) == (41, 40)
