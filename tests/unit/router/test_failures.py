from __future__ import annotations

import pytest

from router_service.decision import Choice, RoutingRequest
from router_service.failures import REST_S, Failures
from service_kit.errors import UpstreamFailed, to_status
from service_kit.faults import EngineFailed, Fault, Overloaded, Unavailable
from tests.unit.router.router_values import decision


def last(reason: str = "No backend can take this request: a is out"):
    return decision(RoutingRequest(1), [], Choice("", {}, reason))


def failures(**by_backend: Fault) -> Failures:
    made = Failures()
    for name, fault in by_backend.items():
        made.add(name, "first", UpstreamFailed(to_status(fault)), 0.0)
    return made


def test_nobody_was_there():
    fault = Failures().nobody_left(last())

    assert isinstance(fault, Unavailable)
    assert str(fault) == "No backend can take this request: a is out; try again later."
    assert fault.metadata == {}


def test_all_full_tells_the_shortest_wait():
    fault = failures(a=Overloaded("full", 3.5), b=Overloaded("full", 1.25)).nobody_left(last())

    assert isinstance(fault, Overloaded)
    assert fault.retry_after_s == pytest.approx(1.25)


def test_one_full_and_one_gone_is_unavailable():
    fault = failures(a=Overloaded("full", 3.5), b=Unavailable("gone")).nobody_left(last())

    assert isinstance(fault, Unavailable)
    assert fault.metadata == {"generated_tokens": "0", "attempts": "2", "backend": "b"}


def test_the_only_backends_own_error_is_passed_on():
    fault = failures(a=EngineFailed("The engine broke; send the request again.")).nobody_left(last())

    assert isinstance(fault, UpstreamFailed)
    assert fault.code.name == "INTERNAL"


def test_given_up_names_the_last_failure():
    fault = failures(a=EngineFailed("broke"), b=Overloaded("full", 1), c=Unavailable("gone")).given_up()

    assert str(fault) == "2 attempts failed, the last on backend c (gone); try again later."
    assert fault.metadata == {"generated_tokens": "0", "attempts": "3", "backend": "c"}


def test_reasons_name_code_and_message():
    assert failures(a=Unavailable("gone")).reasons({"a": "first"}) == {"a": "UNAVAILABLE: gone"}


def test_process_started_since_has_not_failed():
    both = failures(a=Unavailable("gone"), b=Unavailable("gone"))

    assert both.reasons({"a": "second", "b": "first"}).keys() == {"b"}
    # Nobody knows what a backend is that was never heard of.
    assert both.reasons({}).keys() == {"a", "b"}


def test_process_that_fails_after_its_restart_is_not_asked_a_third_time():
    twice = failures(a=Unavailable("gone"))
    twice.add("a", "second", UpstreamFailed(to_status(Unavailable("gone again"))), 1.0)

    assert twice.reasons({"a": "second"}) == {"a": "UNAVAILABLE: gone again"}


def test_answer_that_has_begun_asks_the_same_process_again_after_a_rest_that_doubles():
    cut_off = failures(a=Unavailable("gone"))
    assert cut_off.reasons({"a": "first"}, REST_S / 2).keys() == {"a"}
    assert not cut_off.reasons({"a": "first"}, REST_S)
    cut_off.add("a", "first", UpstreamFailed(to_status(Unavailable("gone"))), 10.0)
    assert cut_off.reasons({"a": "first"}, 10.0 + REST_S).keys() == {"a"}
    assert not cut_off.reasons({"a": "first"}, 10.0 + 2 * REST_S)


def test_room_that_is_wanting_breaks_nothing():
    some = failures(a=Overloaded("full", 1), b=Unavailable("gone"))

    assert (some.attempts, some.broken) == (2, 1)
