"""What is likely to come, from what came."""

from __future__ import annotations

import pytest

from router_service.arrivals import MOST_COMING, PAUSE_S, Arrivals


def after(times_s, sent="a") -> Arrivals:
    arrivals = Arrivals()
    for time_s, backend in zip(times_s, sent * len(times_s), strict=False):
        arrivals.note(time_s)
        arrivals.sent(backend)
    return arrivals


def test_of_a_single_request_nothing_follows():
    assert after([5.0]).coming_in_s("a") == ()
    assert Arrivals().coming_in_s("a") == ()


def test_as_many_are_expected_as_came_at_their_gap():
    assert after([0.0, 0.1]).coming_in_s("a") == pytest.approx((0.1, 0.2))
    assert after([0.0, 0.1, 0.2]).coming_in_s("a") == pytest.approx((0.1, 0.2, 0.3))


def test_there_is_a_limit_to_what_is_expected():
    assert len(after([0.05 * n for n in range(60)]).coming_in_s("a")) == MOST_COMING


def test_the_gap_is_that_of_the_latest():
    slow, fast = [float(n) for n in range(9)], [8 + 0.1 * n for n in range(1, 9)]
    assert after(slow + fast).coming_in_s("a")[0] == pytest.approx(0.1)


def test_they_go_where_the_last_ones_went():
    arrivals = after([0.1 * n for n in range(8)], sent="abab")
    assert arrivals.coming_in_s("a") == arrivals.coming_in_s("b") == pytest.approx((0.2,))
    assert arrivals.coming_in_s("c") == ()


def spells(*lengths, gap_s=0.1) -> Arrivals:
    """Spells of these lengths, the last of them the present one."""
    arrivals, now_s = Arrivals(), 0.0
    for length in lengths:
        for _ in range(length):
            arrivals.note(now_s)
            arrivals.sent("a")
            now_s += gap_s
        now_s += PAUSE_S
    return arrivals


def test_the_first_of_a_burst_expects_what_earlier_bursts_had():
    assert spells(8, 1).coming_in_s("a") == pytest.approx((0.1, 0.2, 0.3))
    assert spells(2, 1).coming_in_s("a") == pytest.approx((0.1,))


def test_a_single_request_after_single_requests_expects_nothing():
    assert spells(1, 1, 1, 1).coming_in_s("a") == ()
    assert spells(1, 8, 1, 1, 1).coming_in_s("a") == ()


def test_the_end_of_a_burst_is_known_from_earlier_ones():
    assert len(spells(8, 7).coming_in_s("a")) == 1
    assert spells(8, 8).coming_in_s("a") == ()


def test_a_spell_longer_than_all_before_is_taken_to_go_on():
    assert len(spells(8, 9).coming_in_s("a")) == MOST_COMING
    assert len(spells(1, 2).coming_in_s("a")) == 2


def test_the_gap_in_a_spell_is_its_own():
    start_s = 10 * PAUSE_S
    arrivals = after([0.1 * n for n in range(8)] + [start_s], sent="aaaaaaaaa")
    assert arrivals.coming_in_s("a")[0] == pytest.approx(0.1)
    arrivals.note(start_s + 0.9)
    assert arrivals.coming_in_s("a")[0] == pytest.approx(0.9)
