"""How much a router takes in, of all clients and of each."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_service.admission import RETRY_S, Admission, AdmissionLimits
from service_kit.faults import Overloaded
from service_kit.identity import ANYONE, Caller, Scope


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def caller(name: str = "alice", **limits) -> Caller:
    return Caller(name, frozenset(Scope), **limits)


def admission(clock: Clock | None = None, finishes: dict | None = None, **limits) -> Admission:
    """`finishes`: seconds from now until the first predicted finish, by client; None: of all."""
    clock = clock or Clock()

    def finish_s(client, now_s):
        left_s = (finishes or {}).get(client)
        return None if left_s is None else now_s + left_s

    return Admission(AdmissionLimits(**limits), finish_s=finish_s, clock=clock)


def refusal(made: Admission, who: Caller = ANYONE, tokens: int = 1) -> Overloaded:
    before = (made.requests, made.tokens)
    with pytest.raises(Overloaded) as raised, made.admit(who, tokens):
        pass
    assert (made.requests, made.tokens) == before
    return raised.value


def test_so_many_requests_and_no_more():
    made = admission(max_in_flight=2, finishes={None: 3.5})
    with made.admit(ANYONE, 1), made.admit(ANYONE, 1):
        fault = refusal(made)
        assert "2 requests in flight" in str(fault)
        assert "--max-in-flight" in str(fault)
        assert fault.retry_after_s == pytest.approx(3.5)
    with made.admit(ANYONE, 1):
        assert made.requests == 1


def test_so_many_tokens_but_one_request_whatever_its_size():
    made = admission(max_in_flight_tokens=1000)
    with made.admit(ANYONE, 5000):
        assert "--max-in-flight-tokens" in str(refusal(made))
    with made.admit(ANYONE, 600), made.admit(ANYONE, 400):
        assert refusal(made, tokens=1).retry_after_s == RETRY_S
    assert made.tokens == 0


def test_a_client_has_so_many_and_others_are_not_concerned():
    made = admission(finishes={"alice": 2.0, None: 0.5})
    alice = caller(max_in_flight=1)
    with made.admit(alice, 1):
        fault = refusal(made, alice)
        assert "Client alice has 1 requests in flight" in str(fault)
        assert fault.retry_after_s == pytest.approx(2.0)
        with made.admit(caller("bob", max_in_flight=1), 1):
            pass


def test_without_a_forecast_of_its_own_a_client_is_told_the_first_of_all():
    made = admission(finishes={None: 7.0})
    alice = caller(max_in_flight=1)
    with made.admit(alice, 1):
        assert refusal(made, alice).retry_after_s == pytest.approx(7.0)


def test_a_clients_tokens_come_back_with_time():
    clock = Clock()
    made, alice = admission(clock), caller(tokens_per_minute=600)
    with made.admit(alice, 400):
        pass
    fault = refusal(made, alice, tokens=300)
    assert fault.retry_after_s == pytest.approx(10.0)
    clock.now_s += 10.0
    with made.admit(alice, 300):
        pass


def test_what_a_request_did_not_use_is_given_back():
    clock = Clock()
    made, alice = admission(clock), caller(tokens_per_minute=600)
    for _ in range(10):
        with made.admit(alice, 600) as ticket:
            ticket.used_tokens = 10
        clock.now_s += 1.0  # ten tokens a second


def test_a_request_over_a_minutes_worth_waits_for_all_of_it_and_others_pay_for_the_rest():
    clock = Clock()
    made, alice = admission(clock), caller(tokens_per_minute=600)
    with made.admit(alice, 1800):
        pass
    assert refusal(made, alice, tokens=1).retry_after_s == pytest.approx(120.1)
    clock.now_s += 121
    with made.admit(alice, 1):
        pass


def test_clients_that_are_done_are_forgotten():
    clock = Clock()
    made = admission(clock)
    for number in range(100):
        with made.admit(caller(f"c{number}", max_in_flight=3), 10):
            pass
    assert not made._clients


def test_a_refused_request_is_not_counted_anywhere():
    made, alice = admission(max_in_flight=1), caller(max_in_flight=5, tokens_per_minute=100)
    with made.admit(ANYONE, 1):
        refusal(made, alice, tokens=100)
    with made.admit(alice, 100):
        assert made.requests == 1


def test_refusing_often_does_not_forecast_often():
    asked = []
    clock = Clock()
    made = Admission(AdmissionLimits(max_in_flight=1), finish_s=lambda *of: asked.append(of), clock=clock)
    with made.admit(ANYONE, 1):
        for _ in range(1000):
            refusal(made)
    assert len(asked) == 1


def test_sizes_are_of_no_interest_without_a_bound_on_them():
    assert not admission().counts_tokens(caller(max_in_flight=3))
    assert admission().counts_tokens(caller(tokens_per_minute=3))
    assert admission(max_in_flight_tokens=10).counts_tokens(ANYONE)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 200), st.booleans(), st.floats(0, 30)), max_size=60))
def test_counts_are_what_is_in_flight_and_limits_hold(steps):
    """Requests that come and, in another order, go."""
    clock = Clock()
    made = admission(clock, max_in_flight=5, max_in_flight_tokens=600)
    who = {"a": caller("a", max_in_flight=3), "b": caller("b", tokens_per_minute=500)}
    flying, used, waits_s = [], 0.0, []
    for name, tokens, ends, gap_s in steps:
        clock.now_s += gap_s
        if ends and flying:
            flying.pop(tokens % len(flying))[2].close()
            continue
        stack = ExitStack()
        try:
            stack.enter_context(made.admit(who[name], tokens))
        except Overloaded as fault:
            waits_s.append(fault.retry_after_s)
            continue
        flying.append((name, tokens, stack))
        used += tokens * (name == "b")
        assert used <= 500 + (clock.now_s - 1000.0) * 500 / 60 + 1e-6
        assert len(flying) == made.requests <= 5
        assert sum(size for _, size, _ in flying) == made.tokens
        assert made.tokens <= 600
        assert sum(each == "a" for each, *_ in flying) <= 3
    for *_, stack in flying:
        stack.close()
    assert (made.requests, made.tokens) == (0, 0)
    assert all(wait_s > 0 for wait_s in waits_s)
