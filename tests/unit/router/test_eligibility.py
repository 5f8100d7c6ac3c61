from __future__ import annotations

import pytest

from router_service.decision import RoutingRequest
from router_service.eligibility import eligible, within_context
from service_kit.faults import InvalidRequest, UnknownName
from service_kit.requests import RoutingHints
from tests.unit.router.router_values import candidate, fleet, status


def request(model: str = "", **hints) -> RoutingRequest:
    return RoutingRequest(max_new_tokens=50, model=model, hints=RoutingHints(**hints))


def split(backends, asked: RoutingRequest, **failed: str):
    result = eligible(backends, asked, failed)
    return set(result.snapshots), {exclusion.name: exclusion.why for exclusion in result.exclusions}


def test_only_serving_backends_are_candidates_and_each_other_one_has_its_reason():
    backends = fleet(up=status(), new=None, full=status(draining=True), gone=status(), drained=status())
    backends["gone"].lose("its Status stream ended")
    backends["drained"].drained = True

    names, reasons = split(backends, request())

    assert names == {"up"}
    assert reasons == {
        "new": "connecting (no Status from new:1 yet)",
        "full": "draining (it says so itself)",
        "gone": "unreachable (its Status stream ended)",
        "drained": "draining (DrainBackend was called on this router)",
    }


def test_pin_exclusion_and_failure_leave_the_others():
    backends = fleet(a=status(), b=status(), c=status())

    assert split(backends, request(backend="b"))[0] == {"b"}
    assert split(backends, request(excluded=frozenset({"a", "unheard of"})))[0] == {"b", "c"}
    names, reasons = split(backends, request(), a="UNAVAILABLE: gone")
    assert names == {"b", "c"}
    assert reasons == {"a": "failed before its first token: UNAVAILABLE: gone"}


def test_unknown_pin_lists_the_backends():
    with pytest.raises(UnknownName, match="No backend is called 'tpu'; there are a, b"):
        split(fleet(a=status(), b=status()), request(backend="tpu"))


def test_a_pinned_backend_that_is_not_serving_leaves_nobody():
    names, reasons = split(fleet(a=status(draining=True), b=status()), request(backend="a"))

    assert names == set()
    assert reasons["a"].startswith("draining")


def test_model_picks_its_backends():
    backends = fleet(a=status(model="small"), b=status(model="large"))

    assert split(backends, request(model="large")) == ({"b"}, {"a": "serves model small"})


def test_unknown_model_lists_the_served_ones():
    with pytest.raises(UnknownName, match="Model 'gpt' is not served here; there are large, small"):
        split(fleet(a=status(model="small"), b=status(model="large"), c=None), request(model="gpt"))


def test_a_model_nobody_can_know_yet_is_not_called_unknown():
    assert split(fleet(a=None), request(model="gpt"))[0] == set()


def test_no_model_named_while_several_are_served():
    backends = fleet(a=status(model="small"), b=status(model="large"))

    with pytest.raises(InvalidRequest, match="name one of large, small"):
        split(backends, request())
    assert split(backends, request(backend="a"))[0] == {"a"}
    backends["b"].lose("gone")
    assert split(backends, request())[0] == {"a"}


def test_context_keeps_those_that_hold_prompt_and_answer():
    exact = candidate("exact", prompt_tokens=60, context_tokens=110)
    over = candidate("over", prompt_tokens=61, context_tokens=110)
    guessed = candidate("guessed", prompt_tokens=5000, prompt_tokens_estimated=True, context_tokens=110)

    fitting, exclusions = within_context([exact, over, guessed], request(), prompt_tokens=60, context_tokens=110)

    assert [c.name for c in fitting] == ["exact", "guessed"]
    assert [e.why for e in exclusions] == [
        "prompt of 61 + max_new_tokens of 50 is over its context of 110 tokens",
    ]


def test_context_that_nobody_has_names_the_numbers():
    with pytest.raises(InvalidRequest, match=r"prompt of 90 \+ max_new_tokens of 50 = 140 tokens is over .* of 128;"):
        within_context(
            [candidate("a", prompt_tokens=90, context_tokens=128), candidate("b", prompt_tokens=90, context_tokens=64)],
            request(),
            prompt_tokens=1,
            context_tokens=128,
        )


def test_context_that_a_backend_has_which_is_away_is_no_fault_of_the_request():
    backends = fleet(small=status(context_tokens=128), large=status(context_tokens=8192))
    backends["large"].lose("gone")
    split = eligible(backends, request(), {})
    small = candidate("small", prompt_tokens=90, context_tokens=128)

    fitting, exclusions = within_context([small], request(), prompt_tokens=90, context_tokens=split.context_tokens)

    assert (fitting, [e.name for e in exclusions]) == ([], ["small"])


@pytest.mark.parametrize("hints", [{"backend": "small"}, {"excluded": frozenset({"large"})}])
def test_context_of_a_backend_that_the_request_does_not_want_does_not_count(hints):
    backends = fleet(small=status(context_tokens=128), large=status(context_tokens=8192))

    assert eligible(backends, request(**hints), {}).context_tokens == 128


def test_no_candidates_fit_no_context_without_complaint():
    assert within_context([], request(), prompt_tokens=1, context_tokens=0) == ([], [])
