from itertools import combinations, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.side_by_side.workload import KV_TOKENS, SLOTS, WORKLOADS, Ask, Workload, token_ids


def made(name: str, label: str = "round 0") -> Workload:
    return WORKLOADS[name](label)


def shared(left: Ask, right: Ask) -> int:
    """How many tokens both prompts begin with."""
    same = (one == other for one, other in zip(left.prompt, right.prompt, strict=False))
    return sum(1 for _ in takewhile(bool, same))


@given(st.text(), st.integers(1, 300))
def test_token_ids_are_fixed_by_their_label_and_ordinary(label: str, count: int) -> None:
    ids = token_ids(label, count)
    assert ids == token_ids(label, count)
    assert len(ids) == count
    assert all(1000 <= each < 41_000 for each in ids)


@pytest.mark.parametrize("name", WORKLOADS)
def test_both_sides_get_the_same_requests_and_rounds_share_nothing(name: str) -> None:
    assert made(name) == made(name)
    here, there = made(name, "round 0"), made(name, "round 1")
    groups = [(*work.before, *work.beside, *work.measured) for work in (here, there)]
    assert all(shared(one, other) < 3 for one in groups[0] for other in groups[1])


@pytest.mark.parametrize("name", ["steady", "seen_once"])
def test_the_bursts_schedule(name: str) -> None:
    burst = made(name).measured
    assert [ask.after_s for ask in burst] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35])
    assert {(len(ask.prompt), ask.new_tokens) for ask in burst} == {(516, 128)}
    assert {shared(one, other) for one, other in combinations(burst, 2)} == {496}


def test_steady_warms_every_slot_with_the_burst_s_prefix_and_seen_once_one() -> None:
    for name, times in (("steady", SLOTS), ("seen_once", 1)):
        work = made(name)
        assert [ask.prompt for ask in work.before] == [work.measured[0].prompt[:496]] * times
        assert {ask.new_tokens for ask in work.before} == {1}


def test_cold_is_eight_identical_prompts_at_once_and_nothing_before() -> None:
    work = made("cold")
    assert work.before == ()
    assert len(work.measured) == 8
    assert set(work.measured) == {work.measured[0]}
    assert (len(work.measured[0].prompt), work.measured[0].new_tokens, work.measured[0].after_s) == (516, 32, 0)


def test_churn_visits_one_and_a_half_caches_in_turn_twice_two_at_a_time() -> None:
    work = made("churn")
    assert work.before == work.measured
    assert len(set(work.measured)) == len(work.measured)
    sizes = [len(ask.prompt) + ask.new_tokens for ask in work.measured]
    assert sum(sizes) == 1.5 * work.kv_tokens
    assert work.in_flight == 2


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_request_fits_a_slot_with_cells_of_its_own(name: str) -> None:
    work = made(name)
    for ask in (*work.before, *work.beside, *work.measured):
        assert len(ask.prompt) + ask.new_tokens < work.kv_tokens // SLOTS


def test_the_long_prompt_fits_beside_its_streams() -> None:
    work = made("long")
    (ask,) = work.measured
    assert len(ask.prompt) == 2000
    assert len(work.beside) == 3
    assert sum(len(each.prompt) + each.new_tokens for each in (ask, *work.beside)) <= KV_TOKENS


def test_single_is_one_short_prompt() -> None:
    (ask,) = made("single").measured
    assert (len(ask.prompt), ask.new_tokens) == (32, 128)
