"""What a GenerateRequest becomes once it is off the wire."""

from __future__ import annotations

import pytest

from phaseroute.v1 import inference_pb2 as pb
from service_kit.faults import InvalidRequest
from service_kit.requests import MAX_LABEL_BYTES, Priority, RoutingHints, parse_generate

PROMPT = pb.Prompt(text="x")


@pytest.mark.parametrize(
    ("wire", "priority"),
    [
        (pb.PRIORITY_UNSPECIFIED, Priority.INTERACTIVE),
        (pb.PRIORITY_INTERACTIVE, Priority.INTERACTIVE),
        (pb.PRIORITY_BATCH, Priority.BATCH),
    ],
)
def test_priority(wire, priority):
    assert parse_generate(pb.GenerateRequest(prompt=PROMPT, priority=wire)).priority is priority


def test_a_request_is_interactive_unless_it_says_otherwise():
    assert parse_generate(pb.GenerateRequest(prompt=PROMPT)).priority is Priority.INTERACTIVE


@pytest.mark.parametrize("number", [-1, 3, 2**31 - 1])
def test_a_priority_that_nobody_knows_is_refused_with_the_known_ones(number):
    with pytest.raises(
        InvalidRequest, match=rf"is {number}; use PRIORITY_INTERACTIVE \(1\), PRIORITY_BATCH \(2\)"
    ) as no:
        parse_generate(pb.GenerateRequest(prompt=PROMPT, priority=number))
    assert no.value.field == "priority"


def test_every_priority_of_the_wire_is_known():
    for number in pb.Priority.values():
        parse_generate(pb.GenerateRequest(prompt=PROMPT, priority=number))


def test_routing_hints():
    wire = pb.RoutingHints(policy="round_robin", backend="gpu", excluded_backends=["cpu"], precision="bf16")

    parsed = parse_generate(pb.GenerateRequest(prompt=PROMPT, routing=wire)).routing

    assert parsed == RoutingHints("round_robin", "gpu", frozenset({"cpu"}), "bf16")
    assert parse_generate(pb.GenerateRequest(prompt=PROMPT)).routing == RoutingHints()


def test_a_precision_is_no_longer_than_a_label():
    def sent(length: int) -> pb.GenerateRequest:
        return pb.GenerateRequest(prompt=PROMPT, routing=pb.RoutingHints(precision="x" * length))

    parse_generate(sent(MAX_LABEL_BYTES))
    with pytest.raises(InvalidRequest) as no:
        parse_generate(sent(MAX_LABEL_BYTES + 1))
    assert no.value.field == "routing.precision"


def test_what_a_router_says_of_its_client():
    attempt = pb.Attempt(id="1", client="ann", client_weight=3.0, cache_salt="pepper", generated_token_ids=[5, 6])
    spec = parse_generate(pb.GenerateRequest(prompt=pb.Prompt(text="x"), attempt=attempt))
    assert (spec.client, spec.client_weight, spec.cache_salt, spec.generated) == ("ann", 3.0, "pepper", (5, 6))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none(weight):
    attempt = pb.Attempt(client_weight=weight)
    with pytest.raises(InvalidRequest, match="client_weight"):
        parse_generate(pb.GenerateRequest(prompt=pb.Prompt(text="x"), attempt=attempt))


def test_more_generated_than_was_asked_for():
    attempt = pb.Attempt(generated_token_ids=[1, 2, 3])
    with pytest.raises(InvalidRequest, match="generated_token_ids"):
        parse_generate(pb.GenerateRequest(prompt=pb.Prompt(text="x"), max_new_tokens=2, attempt=attempt))
