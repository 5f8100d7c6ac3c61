from __future__ import annotations

import pytest

from router_service.decision import RoutingRequest
from router_service.eligibility import eligible, within_context
from router_service.snapshot import Snapshot
from service_kit.faults import InvalidRequest, UnknownName
from service_kit.requests import RoutingHints
from tests.unit.router.router_values import candidate, fleet, status


def request(model: str = "", **hints) -> RoutingRequest:
    return RoutingRequest(max_new_tokens=50, model=model, hints=RoutingHints(**hints))


NOW_S = 100.0


def split(backends, asked: RoutingRequest, **failed: str):
    result = eligible(backends, asked, failed, now_s=NOW_S)
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
    assert reasons == {"a": "failed this request: UNAVAILABLE: gone"}


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


# Tokenizers


def test_the_tokenizer_of_most_serving_backends_is_used_and_the_others_are_told_both():
    backends = fleet(a=status(tokenizer="old"), b=status(tokenizer="new"), c=status(tokenizer="new"))

    assert split(backends, request()) == (
        {"b", "c"},
        {
            "a": "tokenizes differently: its tokenizer is old, the one in use for this model is new; "
            "only pinned requests go there"
        },
    )


def test_backends_that_take_no_work_have_no_say_in_the_tokenizer():
    backends = fleet(
        gone=status(tokenizer="old"), full=status(tokenizer="old", draining=True), a=status(tokenizer="new"), new=None
    )
    backends["gone"].lose("no Status for 5 s")

    names, reasons = split(backends, request())

    assert names == {"a"}
    assert reasons["gone"].startswith("tokenizes differently")
    assert reasons["new"].startswith("connecting")


def test_backends_of_other_models_have_no_say_in_the_tokenizer():
    backends = fleet(
        a=status(tokenizer="one"),
        b=status(model="other", tokenizer="two"),
        c=status(model="other", tokenizer="two"),
        d=status(tokenizer="two"),
    )

    assert split(backends, request(model="m"))[0] == {"a"}
    assert split(backends, request(model="other"))[0] == {"b", "c"}


@pytest.mark.parametrize(("first", "second"), [("x", "y"), ("y", "x")])
def test_a_tie_of_tokenizers_goes_to_the_first_of_the_fleet(first, second):
    backends = fleet(
        a=status(tokenizer=first), b=status(tokenizer=second), c=status(tokenizer=second), d=status(tokenizer=first)
    )

    assert split(backends, request())[0] == {"a", "d"}
    backends["a"].lose("gone")
    assert split(backends, request())[0] == {"b", "c"}


@pytest.mark.parametrize(("lone", "others"), [("", "t"), ("t", "")])
def test_a_tokenizer_that_is_not_told_is_one_of_its_own(lone, others):
    backends = fleet(a=status(tokenizer=lone), b=status(tokenizer=others), c=status(tokenizer=others))

    names, reasons = split(backends, request())

    assert names == {"b", "c"}
    shown = f"its tokenizer is {lone or 'unknown'}, the one in use for this model is {others or 'unknown'};"
    assert shown in reasons["a"]


def test_backends_that_all_do_not_tell_are_alike():
    assert split(fleet(a=status(tokenizer=""), b=status(tokenizer="")), request())[0] == {"a", "b"}


def test_a_pinned_backend_may_tokenize_as_it_likes():
    backends = fleet(a=status(tokenizer="old"), b=status(tokenizer="new"), c=status(tokenizer="new"))

    assert split(backends, request(backend="a"))[0] == {"a"}


def test_a_failed_backend_keeps_its_say_in_the_tokenizer():
    backends = fleet(a=status(tokenizer="one"), b=status(tokenizer="two"))

    names, reasons = split(backends, request(), a="UNAVAILABLE: gone")

    assert names == set()
    assert reasons["b"].startswith("tokenizes differently")


def test_while_nobody_serves_the_state_is_the_reason():
    backends = fleet(a=status(tokenizer="one", draining=True), b=status(tokenizer="two", draining=True))

    assert set(split(backends, request(model="m"))[1].values()) == {"draining (it says so itself)"}


def test_context_of_a_backend_that_tokenizes_differently_does_not_count():
    backends = fleet(small=status(context_tokens=128), large=status(context_tokens=8192, tokenizer="other"))

    assert eligible(backends, request(), {}, now_s=NOW_S).context_tokens == 128


# Precision


def test_weights_and_precision_divide_nobody_unless_demanded():
    backends = fleet(a=status(precision="q4_1"), b=status(precision="bf16"), c=status(precision="", fingerprint="g"))

    assert split(backends, request())[0] == {"a", "b", "c"}
    assert split(backends, request(precision="bf16")) == (
        {"b"},
        {
            "a": "holds its weights in precision q4_1, not bf16",
            "c": "holds its weights in precision unknown, not bf16",
        },
    )


def test_a_precision_that_nobody_has_lists_those_there_are():
    backends = fleet(
        a=status(precision="q4_1"),
        b=status(precision="bf16"),
        c=status(precision=""),
        d=status(model="other", precision="f32"),
        e=None,
    )
    with pytest.raises(UnknownName, match=r"Model 'm' is not held in precision 'f32' here; there are bf16, q4_1\.$"):
        split(backends, request(model="m", precision="f32"))


def test_a_precision_that_nobody_has_where_nobody_tells():
    with pytest.raises(UnknownName, match="in precision 'f32' here; there are none that backends tell of"):
        split(fleet(a=status(precision="")), request(precision="f32"))


def test_a_precision_nobody_can_know_yet_is_not_called_unknown():
    assert split(fleet(a=None), request(precision="f32"))[0] == set()


def test_a_precision_of_a_backend_that_is_away_is_no_fault_of_the_request():
    backends = fleet(a=status(precision="q4_1"), b=status(precision="bf16"))
    backends["b"].lose("gone")

    names, reasons = split(backends, request(precision="bf16"))

    assert names == set()
    assert reasons["b"] == "unreachable (gone)"


def test_a_pinned_backend_of_another_precision_leaves_nobody():
    backends = fleet(a=status(precision="q4_1"), b=status(precision="bf16"))

    assert split(backends, request(backend="a", precision="bf16")) == (
        set(),
        {"a": "holds its weights in precision q4_1, not bf16", "b": "the request is pinned to a"},
    )


def test_a_demanded_precision_does_not_change_the_tokenizer():
    backends = fleet(a=status(), b=status(), c=status(precision="bf16", tokenizer="other"))

    names, reasons = split(backends, request(precision="bf16"))

    assert names == set()
    assert reasons["c"].startswith("tokenizes differently")


# Context


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
    split = eligible(backends, request(), {}, now_s=NOW_S)
    small = candidate("small", prompt_tokens=90, context_tokens=128)

    fitting, exclusions = within_context([small], request(), prompt_tokens=90, context_tokens=split.context_tokens)

    assert (fitting, [e.name for e in exclusions]) == ([], ["small"])


@pytest.mark.parametrize("hints", [{"backend": "small"}, {"excluded": frozenset({"large"})}])
def test_context_of_a_backend_that_the_request_does_not_want_does_not_count(hints):
    backends = fleet(small=status(context_tokens=128), large=status(context_tokens=8192))

    assert eligible(backends, request(**hints), {}, now_s=NOW_S).context_tokens == 128


def test_no_candidates_fit_no_context_without_complaint():
    assert within_context([], request(), prompt_tokens=1, context_tokens=0) == ([], [])


# Breakers


def trip(made) -> None:
    for _ in range(3):
        made.breaker.failed("INTERNAL", NOW_S)


def test_a_backend_with_an_open_breaker_is_out_and_says_until_when():
    backends = fleet(a=status(), b=status())
    trip(backends["a"])
    names, reasons = split(backends, request())
    assert names == {"b"}
    assert reasons["a"].startswith("failed 3 times without an answer; it is tried again in 1.")


def test_half_open_it_is_in_for_one_request():
    backends = fleet(a=status(), b=status())
    trip(backends["a"])
    later_s = NOW_S + 5
    assert set(eligible(backends, request(), {}, now_s=later_s).snapshots) == {"a", "b"}
    backends["a"].breaker.booked("trial", later_s)
    result = eligible(backends, request(), {}, now_s=later_s)
    assert set(result.snapshots) == {"b"}
    assert "one request tries it now" in result.exclusions[0].why


def test_where_all_breakers_are_open_none_counts():
    backends = fleet(a=status(), b=status(), off=status(draining=True))
    for made in backends.values():
        trip(made)
    names, reasons = split(backends, request())
    assert names == {"a", "b"}
    assert set(reasons) == {"off"}


def test_whoever_else_only_failed_this_request_keeps_a_tripped_one_out():
    backends = fleet(a=status(), b=status())
    trip(backends["a"])
    assert split(backends, request(), b="RESOURCE_EXHAUSTED: full")[0] == set()
    assert split(backends, request(backend="a"))[0] == {"a"}


def test_a_restarted_backend_is_in_at_once():
    backends = fleet(a=status(), b=status())
    trip(backends["a"])
    backends["a"].hear(Snapshot.of(status(incarnation="second")), NOW_S)
    assert split(backends, request())[0] == {"a", "b"}
