from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseroute.v1 import router_pb2
from router_service.decision import Choice, Exclusion, ProbeOutcome, RoutingRequest
from router_service.policies.two_phase import TwoPhase
from router_service.tracing import route_attributes
from tests.unit.router.router_values import CPU, GPU, candidate, decision, rng

REQUEST = RoutingRequest(max_new_tokens=128, workload="chat")


def decide(candidates, **changes):
    return decision(REQUEST, candidates, TwoPhase(rng())(REQUEST, candidates), **changes)


def recomputed_score_s(row: router_pb2.Candidate) -> float:
    """From the record alone."""
    rates = row.isolated_rates
    return row.prefill_tokens / rates.prefill_tokens_per_s + row.decode_tokens / rates.decode_tokens_per_s


@given(
    st.lists(
        st.tuples(st.integers(0, 9999), st.integers(0, 9999), st.integers(1, 4000), st.floats(0, 0.99)),
        min_size=1,
        max_size=5,
    )
)
def test_scores_and_selection_can_be_recomputed_from_the_record(rows):
    message = decide(
        [
            candidate(
                f"b{i}",
                (CPU, GPU)[i % 2],
                waiting_prefill_tokens=prefill,
                waiting_decode_tokens=decode,
                prompt_tokens=prompt,
                reusable_tokens=int(prompt * warm),
            )
            for i, (prefill, decode, prompt, warm) in enumerate(rows)
        ]
    ).to_proto()

    record = router_pb2.Decision.FromString(message.SerializeToString())

    for row in record.candidates:
        assert row.score_s == pytest.approx(recomputed_score_s(row))
        own_decode_s = record.max_new_tokens / row.isolated_rates.decode_tokens_per_s
        assert row.predicted_ttft_s == pytest.approx(row.score_s - own_decode_s)
    best = min(record.candidates, key=recomputed_score_s)
    selected = next(row for row in record.candidates if row.backend == record.selected)
    assert recomputed_score_s(selected) == pytest.approx(recomputed_score_s(best))


def test_record_shows_what_the_policy_did_not_know():
    message = decide(
        [
            candidate("new", None, probe=ProbeOutcome.LATE, prompt_tokens_estimated=True),
            candidate("gpu", GPU, probe=ProbeOutcome.SKIPPED, precision="bf16"),
        ],
        exclusions=[Exclusion("old", "draining (it says so itself)")],
        attempt=2,
    ).to_proto()

    new, gpu, old = message.candidates
    assert (new.probe, gpu.probe) == (router_pb2.PROBE_OUTCOME_LATE, router_pb2.PROBE_OUTCOME_SKIPPED)
    assert new.prompt_tokens_estimated
    assert (new.precision, gpu.precision) == ("", "bf16")
    assert not new.HasField("score_s")
    assert not new.HasField("isolated_rates")
    assert (old.backend, old.excluded) == ("old", "draining (it says so itself)")
    assert (message.attempt, message.workload, message.time.ToDatetime().year) == (2, "chat", 2026)


def test_log_fields_hold_the_candidate_table():
    made = decide([candidate("gpu", GPU, active=4, queued=2, waiting_prefill_tokens=40, waiting_decode_tokens=752)])

    fields = json.loads(json.dumps(made.log_fields()))

    assert fields["selected"] == "gpu"
    assert fields["candidates"] == [
        {
            "backend": "gpu",
            "active": 4,
            "queued": 2,
            "prefill_tokens": 140,
            "decode_tokens": 880,
            "reusable_tokens": 0,
            "probe": "answered",
            "score_s": round(140 / 2551 + 880 / 293, 3),
        }
    ]


def test_span_attributes_are_parallel_arrays():
    attributes = route_attributes(decide([candidate("new", None), candidate("gpu", GPU)]))

    arrays = {name: value for name, value in attributes.items() if isinstance(value, list)}
    assert {len(array) for array in arrays.values()} == {2}
    names, scores = arrays["phaseroute.candidates.names"], arrays["phaseroute.candidates.scores_s"]
    assert names == ["new", "gpu"]
    assert scores[0] != scores[0]
    assert scores[1] == pytest.approx(100 / 2551 + 128 / 293)


def test_price_of_a_decision_without_selection_is_empty():
    assert decision(REQUEST, [], Choice("", {}, "nobody")).price.score_s is None
