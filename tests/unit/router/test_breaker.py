"""When a backend is left alone for failing, and how it comes back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_service.breaker import Breaker, BreakerLimits, BreakerState

LIMITS = BreakerLimits(jitter=0.0)
CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


def breaker(limits: BreakerLimits = LIMITS) -> Breaker:
    return Breaker(limits, random.Random(0))


def opened(now_s: float = 0.0, limits: BreakerLimits = LIMITS) -> Breaker:
    made = breaker(limits)
    for _ in range(limits.failures):
        made.failed("UNAVAILABLE", now_s)
    return made


def test_it_opens_after_so_many_failures_in_a_row():
    made = breaker()
    made.failed("UNAVAILABLE", 0.0)
    made.failed("INTERNAL", 0.0)
    assert (made.state(0.0), made.refusal(0.0)) == (CLOSED, "")
    made.failed("UNKNOWN", 0.0)
    assert made.state(0.0) is OPEN
    assert made.refusal(0.25) == "failed 3 times without an answer; it is tried again in 0.8 s"


def test_an_answer_between_them_starts_the_count_anew():
    made = breaker()
    for code in ("UNAVAILABLE", "UNAVAILABLE", "", "UNAVAILABLE", "UNAVAILABLE"):
        made.failed(code, 0.0) if code else made.answered()
    assert (made.state(0.0), made.failures) == (CLOSED, 2)


@pytest.mark.parametrize(
    "code",
    ["INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "CANCELLED", "NOT_FOUND", "UNAUTHENTICATED"],
)
def test_what_is_not_the_backends_fault_never_counts(code):
    made = breaker()
    for _ in range(100):
        made.failed(code, 0.0)
    assert (made.state(0.0), made.failures) == (CLOSED, 0)


def test_half_open_it_lets_one_request_through():
    made = opened()
    assert made.refusal(0.99)
    assert (made.state(1.0), made.refusal(1.0)) == (HALF_OPEN, "")
    made.booked("trial", 1.0)
    assert made.trial == "trial"
    assert "one request tries it now" in made.refusal(1.5)
    made.answered()
    assert (made.state(1.5), made.refusal(1.5), made.failures) == (CLOSED, "", 0)


def test_a_trial_that_fails_doubles_the_wait_up_to_the_longest():
    made, now_s = opened(), 0.0
    for waited_s in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        assert made.retry_in_s(now_s) == waited_s
        now_s += waited_s
        made.booked("trial", now_s)
        made.over("trial")
        made.failed("UNAVAILABLE", now_s)
    made.answered()
    for _ in range(3):
        made.failed("UNAVAILABLE", now_s)
    assert made.retry_in_s(now_s) == 1.0


def test_failures_of_requests_sent_before_it_opened_do_not_prolong_it():
    made = opened()
    for _ in range(50):
        made.failed("UNAVAILABLE", 0.5)
    assert made.retry_in_s(0.5) == 0.5


@pytest.mark.parametrize("ends", ["over", "time"])
def test_a_trial_that_tells_nothing_makes_room_for_the_next(ends):
    made = opened()
    made.booked("first", 1.0)
    now_s = 1.0
    if ends == "over":
        made.over("first")  # given up by its client
    else:
        now_s += LIMITS.trial_s
    assert (made.state(now_s), made.refusal(now_s)) == (HALF_OPEN, "")
    made.booked("second", now_s)
    assert made.trial == "second"


def test_a_request_sent_there_all_the_same_does_not_take_the_trials_place():
    made = opened()
    made.booked("pinned", 0.5)
    assert made.trial is None
    made.booked("trial", 1.0)
    made.booked("pinned", 1.1)
    assert made.trial == "trial"


def test_another_process_is_clean():
    made = opened()
    made.restarted()
    assert (made.state(0.0), made.failures, made.retry_in_s(0.0)) == (CLOSED, 0, 0.0)


def test_jitter_only_prolongs_and_differs():
    waits_s = set()
    for seed in range(20):
        made = Breaker(BreakerLimits(), random.Random(seed))
        for _ in range(3):
            made.failed("UNAVAILABLE", 0.0)
        waits_s.add(made.retry_in_s(0.0))
    assert len(waits_s) == 20
    assert all(1.0 <= wait_s <= 1.2 for wait_s in waits_s)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "end", "fail", "fail", "answer", "restart", "wait"]),
        st.floats(0, 5),
        st.integers(0, 5),
    ),
    max_size=80,
)


@settings(deadline=None)
@given(EVENTS)
def test_whatever_happens_it_is_never_stuck_and_never_tries_two_at_a_time(events):
    """Against a model of those who were let through while it was not closed: who is under way, and since when."""
    made, now_s, trials, number = breaker(), 0.0, {}, 0
    for event, gap_s, which in events:
        now_s += gap_s
        trials = {name: since_s for name, since_s in trials.items() if now_s < since_s + LIMITS.trial_s}
        match event:
            case "ask" if not made.refusal(now_s):
                if made.state(now_s) is HALF_OPEN:
                    assert not trials
                    trials[f"r{number}"] = now_s
                made.booked(f"r{number}", now_s)
                number += 1
            case "end" if trials:
                name = list(trials)[which % len(trials)]
                del trials[name]
                made.over(name)
            case "fail":
                made.failed("INTERNAL", now_s)
                trials = trials if made.state(now_s) is HALF_OPEN else {}
            case "answer" | "restart":
                made.answered() if event == "answer" else made.restarted()
                trials = {}
                assert made.state(now_s) is CLOSED
        assert (made.retry_in_s(now_s) == 0) == (made.refusal(now_s) == "")
        assert made.retry_in_s(now_s) <= max(LIMITS.max_open_s, LIMITS.trial_s)
        assert not made.refusal(now_s + made.retry_in_s(now_s) + 1e-9)
