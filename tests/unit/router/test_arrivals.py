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


def test_after_a_pause_nothing_is_expected():
    arrivals = after([0.1 * n for n in range(8)])
    arrivals.note(0.7 + PAUSE_S + 0.1)
    assert arrivals.coming_in_s("a") == ()
    arrivals.note(0.7 + PAUSE_S + 0.3)
    assert arrivals.coming_in_s("a") == pytest.approx((0.2, 0.4))
