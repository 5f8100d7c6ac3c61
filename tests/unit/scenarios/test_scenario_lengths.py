from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseroute.scenarios.bounds import BadScenario
from phaseroute.scenarios.lengths import Fixed, Geometric, Lognormal, Uniform, parse_lengths
from phaseroute.scenarios.workloads import Streams, Workload, draw_workload

TOKENS = st.integers(1, 2000)
LENGTHS = st.one_of(
    st.builds(Fixed, TOKENS),
    st.builds(lambda low, more: Uniform(low, low + more), TOKENS, TOKENS),
    st.builds(Lognormal, st.floats(1, 2000), st.floats(0, 5), TOKENS),
    st.builds(Geometric, st.floats(1, 2000), TOKENS),
)


@given(LENGTHS, st.integers())
def test_a_length_is_a_whole_number_within_its_bounds(lengths, seed):
    most = getattr(lengths, "max", None) or getattr(lengths, "high", None) or lengths.tokens
    drawn = lengths.draw(random.Random(seed))
    assert isinstance(drawn, int)
    assert getattr(lengths, "low", 1) <= drawn <= most


def test_distributions_have_the_middle_that_was_asked_for():
    rng = random.Random(1)
    assert statistics.median(Lognormal(40, 0.6).draw(rng) for _ in range(20_000)) == pytest.approx(40, abs=1.5)
    assert statistics.fmean(Geometric(60).draw(rng) for _ in range(20_000)) == pytest.approx(60, rel=0.03)
    assert statistics.fmean(Uniform(10, 20).draw(rng) for _ in range(20_000)) == pytest.approx(15, rel=0.03)


def test_a_geometric_answer_may_end_after_each_token_alike():
    rng = random.Random(2)
    drawn = [Geometric(4).draw(rng) for _ in range(20_000)]
    for tokens in (1, 2, 3):
        longer = [each for each in drawn if each >= tokens]
        assert sum(each == tokens for each in longer) / len(longer) == pytest.approx(0.25, abs=0.02)


def test_lengths_as_people_write_them():
    assert parse_lengths("answers", "128") == Fixed(128)
    assert parse_lengths("answers", "uniform:low=16,high=128") == Uniform(16, 128)
    assert parse_lengths("answers", "lognormal:median=40,sigma=0.6") == Lognormal(40, 0.6)
    assert parse_lengths("answers", "geometric:60,max=100") == Geometric(60, 100)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0", "tokens is 0; give a whole number from 1 to 1.04858e+06"),
        ("-5", "tokens is -5"),
        ("1.5", "tokens is 1.5; give a whole number"),
        ("uniform:low=9,high=8", "high is 8; give low, which is 9, or more"),
        ("lognormal:median=0,sigma=1", "median is 0"),
        ("many", "no known kind"),
    ],
)
def test_wrong_lengths_name_the_value_and_what_is_allowed(text, says):
    with pytest.raises(BadScenario) as raised:
        parse_lengths("answers", text)
    assert says in str(raised.value)


def test_an_answer_that_ends_by_itself_stays_below_its_budget():
    """One that has all of it would count as one that ignores the model's end."""
    workload = Workload(prompts=Fixed(10), budgets=Fixed(20), answers=Uniform(1, 100))
    sizes = [workload.draw(Streams(seed)) for seed in range(50)]
    assert max(size.new_tokens for size in sizes) == 19
    assert Workload(prompts=Fixed(10), budgets=Fixed(20)).draw(Streams(0)).new_tokens == 20


def test_a_budget_of_one_token_is_one_token():
    assert Workload(prompts=Fixed(10), budgets=Fixed(1), answers=Fixed(5)).draw(Streams(0)).new_tokens == 1


def test_other_answers_leave_prompts_and_budgets_alone():
    workloads = [
        Workload(prompts=Uniform(2, 500), budgets=Uniform(50, 90), answers=answers)
        for answers in (None, Uniform(1, 40), Lognormal(20, 1.0))
    ]
    drawn = []
    for workload in workloads:
        streams = Streams(3)
        sizes = [workload.draw(streams) for _ in range(30)]
        drawn.append([(size.prompt_tokens, size.max_new_tokens) for size in sizes])
    assert drawn[0] == drawn[1] == drawn[2]


def test_workloads_come_by_their_weights():
    chat, batch = (
        Workload(label=label, weight=weight, prompts=Fixed(9), budgets=Fixed(9))
        for label, weight in (("chat", 3.0), ("batch", 1.0))
    )
    streams = Streams(1)
    drawn = [draw_workload((chat, batch), streams).label for _ in range(8000)]
    assert drawn.count("chat") / len(drawn) == pytest.approx(0.75, abs=0.02)
