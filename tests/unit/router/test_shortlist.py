from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_service.shortlist import Shortlist

NAMES = ["a", "b", "c", "d", "e"]


def fleet(*backlogs_s, at_s=0.0, prefill_token_s=0.001, decode_token_s=0.01):
    shortlist = Shortlist(NAMES[: len(backlogs_s)])
    for name, backlog_s in zip(NAMES, backlogs_s, strict=False):
        shortlist.set(
            name, backlog_s=backlog_s, at_s=at_s, prefill_token_s=prefill_token_s, decode_token_s=decode_token_s
        )
    return shortlist


def picked(shortlist, count, *, prefill=100, new=50, now_s=0.0, always=(), seed=0):
    return shortlist.pick(
        count, prefill_tokens=prefill, new_tokens=new, now_s=now_s, always=always, rng=random.Random(seed)
    )


def test_those_with_the_least_work_are_picked():
    assert set(picked(fleet(4.0, 1.0, 3.0, 2.0), 2)) == {"b", "d"}


def test_what_the_request_itself_takes_there_counts():
    shortlist = fleet(0.0, 0.0, 0.0)
    shortlist.set("a", backlog_s=0.0, at_s=0.0, prefill_token_s=0.0, decode_token_s=0.1)
    shortlist.set("b", backlog_s=0.0, at_s=0.0, prefill_token_s=0.1, decode_token_s=0.0)
    shortlist.set("c", backlog_s=3.0, at_s=0.0, prefill_token_s=0.0, decode_token_s=0.0)

    assert picked(shortlist, 1, prefill=100, new=10) == ["a"]
    assert picked(shortlist, 1, prefill=10, new=100) == ["b"]
    assert picked(shortlist, 1, prefill=100, new=100) == ["c"]


def test_a_backlog_shrinks_as_time_passes():
    shortlist = fleet(10.0, 5.0)
    shortlist.set("b", backlog_s=5.0, at_s=8.0, prefill_token_s=0.001, decode_token_s=0.01)

    assert picked(shortlist, 1, now_s=8.0) == ["a"]
    assert picked(shortlist, 1, now_s=0.0) == ["a"]


def test_a_backlog_shrinks_to_nothing_and_no_further():
    shortlist = fleet(1.0, 2.0)

    assert len({picked(shortlist, 1, now_s=50.0, seed=seed)[0] for seed in range(50)}) == 2


def test_a_booking_counts_until_the_next_set():
    shortlist = fleet(1.0, 2.0)
    shortlist.book("a", 1.5)
    assert picked(shortlist, 1) == ["b"]

    shortlist.set("a", backlog_s=1.0, at_s=0.0, prefill_token_s=0.001, decode_token_s=0.01)
    assert picked(shortlist, 1) == ["a"]


def test_a_booking_on_a_backend_that_was_idle_for_long_counts_in_full():
    shortlist = fleet(0.0, 0.0)
    shortlist.book("a", 0.5)

    assert {picked(shortlist, 1, now_s=100.0, seed=seed)[0] for seed in range(50)} == {"b"}


def test_bookings_add_up():
    shortlist = fleet(0.0, 1.0)
    for _ in range(3):
        shortlist.book("a", 0.5)

    assert picked(shortlist, 1) == ["b"]


def test_a_request_is_booked_away_from_one_instant_to_the_next():
    shortlist = fleet(0.0, 0.0, 0.0)
    served = Counter()
    for seed in range(30):
        (name,) = picked(shortlist, 1, seed=seed)
        shortlist.book(name, 1.0)
        served[name] += 1

    assert set(served.values()) == {10}


def test_ties_are_drawn_at_random():
    shortlist = fleet(0.0, 0.0, 0.0, 0.0, -0.0)
    seen = Counter(name for seed in range(400) for name in picked(shortlist, 2, seed=seed))

    assert sum(seen.values()) == 800
    assert all(120 <= seen[name] <= 200 for name in NAMES)


def test_whoever_is_below_the_tie_is_picked_every_time():
    shortlist = fleet(1.0, 0.0, 1.0, 1.0)

    assert all("b" in picked(shortlist, 2, seed=seed) for seed in range(20))


def test_the_same_seed_draws_the_same():
    assert picked(fleet(*[0.0] * 5), 3, seed=7) == picked(fleet(*[0.0] * 5), 3, seed=7)


def test_fewer_candidates_than_asked_for_are_all_picked_once():
    assert sorted(picked(fleet(1.0, 2.0, 2.0), 10)) == ["a", "b", "c"]


@pytest.mark.parametrize("count", [0, 3])
def test_an_empty_fleet_has_nobody(count):
    assert picked(Shortlist([]), count) == []


def test_nobody_is_a_candidate_before_the_first_set():
    shortlist = Shortlist(NAMES)
    assert picked(shortlist, 2, always=["a"]) == []

    shortlist.set("d", backlog_s=1.0, at_s=0.0, prefill_token_s=0.001, decode_token_s=0.01)
    assert picked(shortlist, 2, always=["a"]) == ["d"]


def test_a_removed_backend_is_no_candidate_until_it_is_set_again():
    shortlist = fleet(0.0, 1.0)
    shortlist.remove("a")
    shortlist.book("a", 1.0)
    assert picked(shortlist, 2, always=["a"]) == ["b"]

    shortlist.set("a", backlog_s=0.0, at_s=0.0, prefill_token_s=0.001, decode_token_s=0.01)
    assert picked(shortlist, 1) == ["a"]


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf, -1e300, 1e300])
@pytest.mark.parametrize("field", ["backlog_s", "prefill_token_s", "decode_token_s", "at_s"])
def test_a_backend_with_nonsense_for_times_does_not_win(field, nonsense):
    sane = {"backlog_s": 0.0, "at_s": 0.0, "prefill_token_s": 0.001, "decode_token_s": 0.01}
    shortlist = fleet(1.0, 100.0)
    shortlist.set("a", **{**sane, field: nonsense})

    assert picked(shortlist, 2) == ["b"]
    assert picked(shortlist, 2, always=["a"]) == ["b", "a"]


@pytest.mark.parametrize("field", ["backlog_s", "prefill_token_s", "decode_token_s"])
def test_a_time_below_zero_is_no_price(field):
    sane = {"backlog_s": 0.0, "at_s": -5.0, "prefill_token_s": 0.001, "decode_token_s": 0.01}
    shortlist = fleet(1.0, 100.0)
    shortlist.set("a", **{**sane, field: -1e-9})

    assert picked(shortlist, 1) == ["b"]


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -5.0])
def test_a_booking_of_nonsense_is_none(nonsense):
    shortlist = fleet(1.0, 2.0)
    shortlist.book("a", nonsense)
    shortlist.book("b", nonsense)

    assert picked(shortlist, 1) == ["a"]


def test_where_nobody_has_a_price_some_are_drawn():
    shortlist = fleet(math.nan, math.nan, math.nan)
    seen = Counter(name for seed in range(60) for name in picked(shortlist, 1, seed=seed))

    assert set(seen) == {"a", "b", "c"}
    assert sorted(picked(shortlist, 5)) == ["a", "b", "c"]


def test_always_comes_on_top_of_the_lowest():
    shortlist = fleet(1.0, 2.0, 3.0, 4.0)

    assert picked(shortlist, 1, always=["d"]) == ["a", "d"]
    assert picked(shortlist, 1, always=["a"]) == ["a"]
    assert picked(shortlist, 1, always=["nobody", "d"]) == ["a", "d"]


def test_always_adds_the_first_ones_and_no_more_than_asked_for():
    shortlist = fleet(1.0, 2.0, 3.0, 4.0, 5.0)

    assert picked(shortlist, 2, always=["e", "e", "d", "c"])[2:] == ["e", "d"]


@pytest.mark.parametrize(
    "call",
    [
        lambda fleet: fleet.remove("nobody"),
        lambda fleet: fleet.book("nobody", 1.0),
        lambda fleet: fleet.set("nobody", backlog_s=0.0, at_s=0.0, prefill_token_s=0.0, decode_token_s=0.0),
    ],
    ids=["remove", "book", "set"],
)
def test_a_name_that_was_not_given_is_an_error(call):
    with pytest.raises(KeyError, match="nobody"):
        call(fleet(0.0))


def test_names_must_differ():
    with pytest.raises(ValueError, match="names of their own"):
        Shortlist(["a", "b", "a"])


times = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 10))
backends = st.lists(st.tuples(times, times, times, times, times), min_size=1, max_size=5)


@given(backends, st.integers(1, 6), st.integers(0, 50), st.integers(0, 50), st.integers(0, 99))
def test_nobody_who_was_left_out_is_cheaper_than_one_who_was_picked(backends, count, prefill, new, seed):
    shortlist = Shortlist(NAMES[: len(backends)])
    price_s = {}
    for name, (backlog_s, at_s, prefill_token_s, decode_token_s, booked_s) in zip(NAMES, backends, strict=False):
        shortlist.set(
            name, backlog_s=backlog_s, at_s=at_s, prefill_token_s=prefill_token_s, decode_token_s=decode_token_s
        )
        shortlist.book(name, booked_s)
        price_s[name] = (
            max(0.0, backlog_s - (10.0 - at_s)) + booked_s + prefill * prefill_token_s + new * decode_token_s
        )
    names = picked(shortlist, count, prefill=prefill, new=new, now_s=10.0, seed=seed)

    assert len(names) == len(set(names)) == min(count, len(backends))
    left_out = [price for name, price in price_s.items() if name not in names]
    assert not left_out or min(left_out) >= max(price_s[name] for name in names) - 1e-9
