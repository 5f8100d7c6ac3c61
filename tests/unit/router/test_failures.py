from __future__ import annotations

import pytest

from router_service.decision import Choice, RoutingRequest
from router_service.failures import Failures
from service_kit.errors import UpstreamFailed, to_status
from service_kit.faults import EngineFailed, Fault, Overloaded, Unavailable
from tests.unit.router.router_values import decision


def last(reason: str = "No backend can take this request: a is out"):
    return decision(RoutingRequest(1), [], Choice("", {}, reason))


def failures(**by_backend: Fault) -> Failures:
    made = Failures()
    for name, fault in by_backend.items():
        made.add(name, UpstreamFailed(to_status(fault)))
    return made


def test_nobody_was_there():
    fault = Failures().fault(last())

    assert isinstance(fault, Unavailable)
    assert str(fault) == "No backend can take this request: a is out; try again later."


def test_all_full_tells_the_shortest_wait():
    fault = failures(a=Overloaded("full", 3.5), b=Overloaded("full", 1.25)).fault(last())

    assert isinstance(fault, Overloaded)
    assert fault.retry_after_s == pytest.approx(1.25)


def test_one_full_and_one_gone_is_unavailable():
    assert isinstance(failures(a=Overloaded("full", 3.5), b=Unavailable("gone")).fault(last()), Unavailable)


def test_the_only_backends_own_error_is_passed_on():
    fault = failures(a=EngineFailed("The engine broke; send the request again.")).fault(last())

    assert isinstance(fault, UpstreamFailed)
    assert fault.code.name == "INTERNAL"


def test_reasons_name_code_and_message():
    assert failures(a=Unavailable("gone")).reasons == {"a": "UNAVAILABLE: gone"}
