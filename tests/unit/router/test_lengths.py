from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import pairwise
from statistics import NormalDist, mean, median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_service.lengths import LENGTH_POLICIES, LengthOutcome, LengthQuery, make_lengths
from router_service.lengths.answers import WINDOW_ANSWERS
from router_service.lengths.history import MAX_GROUPS
from router_service.lengths.ratio import INITIAL_RATIO, LOWEST_RATIO
from router_service.lengths.survival import TO_THE_BUDGET
from service_kit.faults import InvalidRequest


def answer(tokens, *, workload="chat", prompt=100, budget=256, ended=True):
    return LengthOutcome(workload, prompt, budget, tokens, ended)


def ask(generated=0, *, workload="chat", prompt=100, budget=256, ignore_eos=False):
    return LengthQuery(workload, prompt, budget, generated, ignore_eos)


def taught(outcomes, name="history"):
    lengths = make_lengths(name)
    for outcome in outcomes:
        lengths.observe(outcome)
    return lengths


# All of them


def test_an_unknown_policy_is_refused_with_those_that_there_are():
    with pytest.raises(InvalidRequest, match="'oracle' is no way to estimate them; use one of history, ratio, budget"):
        make_lengths("oracle")


@pytest.mark.parametrize("name", LENGTH_POLICIES)
def test_an_estimator_knows_its_name(name):
    assert make_lengths(name).name == name


outcomes = st.builds(
    lambda workload, prompt, budget, share, ended: LengthOutcome(
        workload, prompt, budget, max(1, round(share * budget)) if ended else budget, ended
    ),
    st.sampled_from(["chat", "code", ""]),
    st.sampled_from([1, 60, 70, 5000]),
    st.integers(1, 600),
    st.floats(0, 1),
    st.booleans(),
)
histories = st.lists(outcomes, max_size=40)
queries = st.builds(
    lambda workload, prompt, budget, share: LengthQuery(workload, prompt, budget, int(share * (budget - 1))),
    st.sampled_from(["chat", "code", "never seen"]),
    st.sampled_from([1, 64, 5000, 10**6]),
    st.integers(1, 10_000),
    st.floats(0, 1),
)
names = st.sampled_from(sorted(LENGTH_POLICIES))


@given(names, histories, queries)
def test_an_estimate_lies_between_one_token_and_what_the_budget_leaves(name, history, query):
    expected = taught(history, name).expected(query)

    assert 1 <= expected <= query.max_new_tokens - query.generated_tokens


@given(names, histories, queries)
def test_a_request_that_ignores_the_end_token_runs_to_its_budget(name, history, query):
    query = LengthQuery(query.workload, query.prompt_tokens, query.max_new_tokens, query.generated_tokens, True)

    assert taught(history, name).expected(query) == query.max_new_tokens - query.generated_tokens


@pytest.mark.parametrize("name", LENGTH_POLICIES)
@pytest.mark.parametrize("generated", [256, 300])
def test_a_request_past_its_budget_counts_as_one_token(name, generated):
    assert make_lengths(name).expected(ask(generated)) == 1
    assert make_lengths(name).expected(ask(generated, ignore_eos=True)) == 1


@given(names, histories, queries, st.integers(1, 3000))
def test_a_larger_budget_never_makes_an_answer_shorter(name, history, query, more):
    lengths = taught(history, name)
    larger = LengthQuery(query.workload, query.prompt_tokens, query.max_new_tokens + more, query.generated_tokens)

    assert lengths.expected(larger) >= lengths.expected(query) - 1e-9


@given(names, histories, queries, outcomes)
def test_an_estimate_changes_only_together_with_the_version(name, history, query, outcome):
    lengths = taught(history, name)
    before, version = lengths.expected(query), lengths.version

    lengths.observe(outcome)

    assert lengths.version >= version
    if lengths.version == version:
        assert lengths.expected(query) == before


@pytest.mark.parametrize("tokens", [-5, 0, 10**9])
@pytest.mark.parametrize("name", LENGTH_POLICIES)
def test_a_length_that_makes_no_sense_counts_as_the_nearest_that_does(name, tokens):
    sane = taught([answer(1 if tokens < 1 else 256)] * 3, name)

    assert taught([answer(tokens)] * 3, name).expected(ask(budget=4096)) == sane.expected(ask(budget=4096))


# budget


def test_the_budget_is_what_max_new_tokens_leaves_whatever_was_seen():
    lengths = taught([answer(3)] * 100, "budget")

    assert lengths.expected(ask(budget=50)) == 50
    assert lengths.expected(ask(20, budget=50)) == 30
    assert lengths.version == 0


# ratio


def test_the_ratio_starts_high():
    assert make_lengths("ratio").expected(ask(56)) == pytest.approx(0.7 * 200)


def test_the_ratio_falls_in_proportion_to_the_tokens_that_it_covered():
    assert taught([answer(150)], "ratio").ratio == pytest.approx(0.7 - 150 * (0.7 - 0.098) / 600)


def test_the_ratio_falls_no_lower_than_its_floor():
    lengths = taught([answer(20)] * 100, "ratio")

    assert lengths.ratio == LOWEST_RATIO == pytest.approx(0.098)
    assert lengths.expected(ask(budget=1000)) == pytest.approx(98)


def test_an_answer_that_outlives_the_ratio_lifts_it_above_its_own_share():
    lengths = taught([*[answer(20)] * 100, answer(100, budget=200)], "ratio")

    assert lengths.ratio == pytest.approx(120 / 200)


def test_an_answer_that_is_cut_off_lifts_the_ratio_to_the_whole_budget():
    assert taught([answer(256, ended=False)], "ratio").ratio == 1


@given(histories)
def test_the_ratio_stays_between_its_floor_and_one(history):
    assert LOWEST_RATIO <= taught(history, "ratio").ratio <= 1
    assert LOWEST_RATIO < INITIAL_RATIO < 1


def test_a_huge_budget_counts_as_4096_tokens():
    assert make_lengths("ratio").expected(ask(budget=100_000)) == pytest.approx(0.7 * 4096)


# history: one distribution


def survival(prior, *answers, weight=2.0):
    lengths, ended = zip(*answers, strict=True)
    return prior.updated(np.array(lengths), np.array(ended), weight)


def test_survival_by_hand():
    # At 10: 4 at risk, 1 ends. At 20: 3 at risk, 1 ends, 1 is cut off. At 30: 1 at risk, 1 ends. Two more never end.
    seen = survival(TO_THE_BUDGET, (20, False), (30, True), (10, True), (20, True))
    after_10, after_20, after_30 = 5 / 6, 5 / 6 * 4 / 5, 5 / 6 * 4 / 5 * 2 / 3

    assert seen.remaining(0, 100) == pytest.approx(10 + 10 * after_10 + 10 * after_20 + 70 * after_30)
    assert seen.remaining(9, 100) == pytest.approx(1 + 10 * after_10 + 10 * after_20 + 70 * after_30)
    assert seen.remaining(10, 100) == pytest.approx((10 * after_10 + 10 * after_20 + 70 * after_30) / after_10)
    assert seen.remaining(25, 100) == pytest.approx((5 * after_20 + 70 * after_30) / after_20)
    assert seen.remaining(0, 15) == pytest.approx(10 + 5 * after_10)
    assert seen.remaining(30, 100) == 70


def test_survival_with_a_prior_by_hand():
    # The prior: 10 tokens or the budget, evenly. One answer of 20 tokens beside two of the prior's.
    prior = survival(TO_THE_BUDGET, (10, True), (10, True))
    seen = survival(prior, (20, True))

    assert prior.remaining(0, 100) == pytest.approx(10 + 90 / 2)
    assert seen.remaining(0, 100) == pytest.approx(10 + 10 * 2 / 3 + 80 * 1 / 3)


def test_answers_that_were_cut_off_say_nothing_of_what_would_have_followed():
    seen = survival(TO_THE_BUDGET, *[(50, False)] * 90, *[(100, True)] * 5, *[(200, True)] * 5, weight=1e-9)

    assert seen.remaining(0, 1000) == pytest.approx(150)


answers = st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=30)


def exact(chance, answers, weight):
    """S(0), S(1), ... up to 60 in fractions, token by token."""
    result = [Fraction(1)]
    for t in range(1, 61):
        at_risk = sum(length >= t for length, _ in answers)
        ends = sum(length == t and ended for length, ended in answers)
        result.append(result[-1] * (at_risk - ends + weight * chance[t]) / (at_risk + weight * chance[t - 1]))
    return result


@given(answers, answers, st.integers(0, 59), st.integers(1, 90))
def test_survival_is_what_the_formula_says_token_by_token(wide, narrow, generated, more):
    chance = exact(exact([Fraction(1)] * 61, wide, 2), narrow, 2) + [Fraction(0)] * 90
    chance[61:] = [chance[60]] * 90
    budget = generated + more

    remaining = survival(survival(TO_THE_BUDGET, *wide), *narrow).remaining(generated, budget)

    assert remaining == pytest.approx(float(sum(chance[generated:budget]) / chance[generated]))


# history: by workload and prompt


def test_the_first_request_is_priced_at_its_budget():
    assert make_lengths("history").expected(ask()) == 256
    assert make_lengths("history").expected(ask(100)) == 156


def test_the_first_answer_weighs_a_third_on_each_of_three_levels():
    # 2/3 go on after all requests; (0 + 2 * 2/3) / 3 after the workload; (0 + 2 * 4/9) / 3 after the class.
    assert taught([answer(50)]).expected(ask()) == pytest.approx(50 + 206 * 8 / 27)


def test_the_budget_fades_as_answers_come_in():
    estimates = [taught([answer(50)] * count).expected(ask(budget=4096)) for count in (0, 1, 4, 16, 64, 256)]

    assert all(later < earlier for earlier, later in pairwise(estimates))
    assert estimates[0] == 4096
    assert estimates[-1] == pytest.approx(50, rel=0.01)


def test_a_request_that_outlived_all_that_was_seen_is_priced_at_the_rest_of_its_budget():
    lengths = taught([answer(50)] * 300)

    assert lengths.expected(ask(49)) == pytest.approx(1, abs=0.01)
    assert lengths.expected(ask(50)) == 206
    assert lengths.expected(ask(200)) == 56


def test_one_that_outlived_its_class_is_priced_by_the_workload():
    short = [answer(10, prompt=100)] * 100
    long_ = [answer(200, prompt=3000)] * 100

    assert taught(short + long_).expected(ask(20, prompt=100)) == pytest.approx(180, rel=0.05)


def test_prompts_are_classed_by_powers_of_two():
    lengths = taught([*[answer(20, prompt=64)] * 100, *[answer(200, prompt=128)] * 100])

    assert lengths.expected(ask(prompt=64)) == lengths.expected(ask(prompt=127)) == pytest.approx(22, abs=2)
    assert lengths.expected(ask(prompt=128)) == lengths.expected(ask(prompt=255)) == pytest.approx(198, abs=2)


def test_workloads_do_not_mix():
    lengths = taught([*[answer(20, workload="chat")] * 100, *[answer(200, workload="code")] * 100])

    assert lengths.expected(ask(workload="chat")) == pytest.approx(22, abs=2)
    assert lengths.expected(ask(workload="code")) == pytest.approx(198, abs=2)


def test_a_class_without_answers_is_priced_as_its_workload_is():
    lengths = taught([*[answer(20, prompt=100)] * 100, *[answer(200, workload="code")] * 100])

    assert lengths.expected(ask(prompt=4000)) == pytest.approx(22, abs=4)


def test_a_workload_without_answers_is_priced_as_all_are():
    lengths = taught([*[answer(20)] * 100, *[answer(200, workload="code")] * 100])

    assert lengths.expected(ask(workload="new")) == pytest.approx(110, abs=4)


def test_only_the_latest_answers_count():
    news = [answer(20)] * WINDOW_ANSWERS

    assert taught([answer(200)] * 500 + news).expected(ask()) == taught(news).expected(ask())


def test_an_answer_counts_from_the_next_question_on():
    lengths = taught([answer(50)] * 10)
    before, before_elsewhere = lengths.expected(ask()), lengths.expected(ask(workload="new"))

    lengths.observe(answer(200))

    assert lengths.expected(ask()) > before
    assert lengths.expected(ask(workload="new")) > before_elsewhere


@given(st.lists(outcomes, max_size=60), st.randoms(use_true_random=False), queries)
def test_the_order_of_answers_within_the_window_is_of_no_account(history, shuffler, query):
    shuffled = list(history)
    shuffler.shuffle(shuffled)

    assert taught(shuffled).expected(query) == pytest.approx(taught(history).expected(query))


@given(histories, queries)
def test_the_expected_total_grows_with_what_was_generated(history, query):
    lengths = taught(history)
    points = sorted({round(query.max_new_tokens * share / 12) for share in range(12)})
    totals = [
        at + lengths.expected(LengthQuery(query.workload, query.prompt_tokens, query.max_new_tokens, at))
        for at in points
    ]

    assert all(later >= earlier - 1e-6 for earlier, later in pairwise(totals))
    assert all(total >= at + 1 for at, total in zip(points, totals, strict=True) if at < query.max_new_tokens)


def true_remaining(mu, sigma, generated):
    """Of a lognormal length that exceeds `generated`."""
    normal = NormalDist()
    if not generated:
        return math.exp(mu + sigma**2 / 2)
    z = (math.log(generated) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * normal.cdf(sigma - z) / normal.cdf(-z) - generated


@pytest.mark.parametrize("budget", [1024, 8192])
@pytest.mark.parametrize("generated", [0, 120])
def test_after_200_lognormal_answers_the_estimate_is_within_10_percent(generated, budget):
    mu, sigma = math.log(120), 0.6
    errors = []
    for seed in range(11):
        rng = random.Random(seed)
        made = [math.ceil(rng.lognormvariate(mu, sigma)) for _ in range(200)]
        lengths = taught(answer(min(n, budget), budget=budget, ended=n <= budget) for n in made)
        expected = lengths.expected(ask(generated, budget=budget))
        errors.append(expected / true_remaining(mu, sigma, generated) - 1)

    assert abs(mean(errors)) < 0.05  # what the seeds have in common: the estimator's own error
    assert median(abs(error) for error in errors) < 0.1


def test_answers_cut_off_half_way_do_not_pull_the_estimate_down():
    mu, sigma, rng = math.log(120), 0.6, random.Random(5)
    tight = [min(120, math.ceil(rng.lognormvariate(mu, sigma))) for _ in range(100)]
    wide = [math.ceil(rng.lognormvariate(mu, sigma)) for _ in range(100)]
    lengths = taught([answer(n, budget=120, ended=n < 120) for n in tight] + [answer(n, budget=2048) for n in wide])

    assert lengths.expected(ask(budget=2048)) == pytest.approx(true_remaining(mu, sigma, 0), rel=0.1)


# history: bounded


def test_the_label_that_had_no_answer_for_longest_is_forgotten():
    lengths = taught([answer(10, workload="old")] * 100)
    for label in range(MAX_GROUPS // 2 + 1):  # a workload and a class each
        lengths.observe(answer(200, workload=f"label {label}"))
        lengths.observe(answer(10, workload="busy"))

    assert lengths.expected(ask(workload="old")) == lengths.expected(ask(workload="never seen"))
    assert lengths.expected(ask(workload="busy")) == pytest.approx(10, abs=2)


def test_asking_for_labels_makes_none_known_and_none_forgotten():
    lengths = taught([answer(10)] * 100)
    before = lengths.expected(ask())

    for label in range(2 * MAX_GROUPS):
        lengths.expected(ask(workload=f"label {label}"))

    assert lengths.expected(ask()) == before
    assert len(lengths._survivals) == 2
