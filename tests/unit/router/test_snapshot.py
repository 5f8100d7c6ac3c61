"""A Status may be nonsense; what makes no sense counts as not told."""

from __future__ import annotations

import math

import pytest

from phaseroute.v1 import inference_pb2 as pb
from router_service.snapshot import MAX_REQUESTS, BadStatus, Snapshot
from tests.unit.router.router_values import status


def with_model(**changes) -> pb.BackendStatus:
    values = {
        "base_s": 0.004,
        "per_token_s": 0.005,
        "per_row_s": 0.006,
        "per_attended_s": 1e-6,
        "samples": 99,
        **changes,
    }
    message = status(step_rules=pb.StepRules(step_tokens=64, step_target_s=0.15))
    message.step_model.CopyFrom(pb.StepModel(**values))
    return message


def test_a_step_model_and_its_rules_are_taken_over():
    message = with_model(row_corrections=[pb.RowCorrection(rows=1, seconds=-0.002)], age_s=7.0)
    pace = Snapshot.of(message).pace
    assert (pace.model.base_s, pace.model.per_attended_s) == (0.004, 1e-6)
    assert pace.model.row_corrections_s == ((1, -0.002),)
    assert (pace.step_tokens, pace.step_target_s, pace.model_age_s) == (64, 0.15, 7.0)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"base_s": math.nan},
        {"per_token_s": -0.001},
        {"per_row_s": math.inf},
        {"per_attended_s": -math.inf},
        {"base_s": 1e9},
        {"base_s": 0, "per_token_s": 0, "per_row_s": 0, "per_attended_s": 0},
        {"row_corrections": [pb.RowCorrection(rows=1, seconds=math.nan)]},
        {"row_corrections": [pb.RowCorrection(rows=1, seconds=-5.0)]},
        {"row_corrections": [pb.RowCorrection(rows=4, seconds=0.0), pb.RowCorrection(rows=2, seconds=0.0)]},
    ],
    ids=str,
)
def test_a_model_that_no_engine_can_have_is_none(nonsense):
    assert Snapshot.of(with_model(**nonsense)).pace is None


@pytest.mark.parametrize("rate", [math.nan, math.inf, 0.0, -5.0, 1e12, 1e-9])
def test_rates_that_no_engine_can_have_are_none(rate):
    message = status()
    message.isolated_rates.decode_tokens_per_s = rate
    assert Snapshot.of(message).rates is None


def test_odd_durations_and_bounds_count_as_not_told():
    message = with_model(age_s=math.nan)
    message.seconds_since_progress = -3.0
    message.step_rules.step_target_s = math.nan
    message.step_rules.step_tokens = 0
    message.max_active = 0
    message.requests.add(phase=pb.REQUEST_PHASE_QUEUED, remaining_prefill_tokens=5, due_in_s=math.nan)
    snapshot = Snapshot.of(message)
    assert snapshot.running_s == 0.0
    assert snapshot.pace.step_target_s is None
    assert snapshot.pace.step_tokens > 100_000
    assert snapshot.pace.model_age_s == 0.0
    assert snapshot.max_active == 1
    assert snapshot.standing[0].due_in_s == 0.0


def test_more_requests_than_anybody_queues_cannot_be_believed():
    message = status()
    message.requests.extend([pb.RequestStatus(phase=pb.REQUEST_PHASE_QUEUED)] * (MAX_REQUESTS + 1))
    with pytest.raises(BadStatus, match="20001 requests"):
        Snapshot.of(message)


def test_counts_beyond_all_reason_stay_finite():
    message = status()
    huge = 2**32 - 1
    message.requests.add(
        phase=pb.REQUEST_PHASE_QUEUED, remaining_prefill_tokens=huge, remaining_decode_tokens=huge, prompt_tokens=huge
    )
    standing = Snapshot.of(message).standing[0]
    assert max(standing.prefill_tokens, standing.kv_tokens, standing.budget_tokens) <= 2**30


def test_what_an_active_request_takes_at_worst_is_less_what_it_shares_unless_batches_are_padded():
    message = status()
    message.requests.add(
        phase=pb.REQUEST_PHASE_DECODE,
        remaining_decode_tokens=100,
        generated_tokens=28,
        context_tokens=543,
        prompt_tokens=516,
        cached_tokens=496,
    )
    assert Snapshot.of(message).standing[0].kv_tokens == 20 + 128
    message.kv_cache.padded = True
    assert Snapshot.of(message).standing[0].kv_tokens == 516 + 128


def test_free_kv_is_what_neither_active_requests_nor_their_worst_case_hold():
    message = status()
    message.kv_cache.CopyFrom(
        pb.KvCacheStatus(capacity_tokens=4096, used_tokens=1500, retained_tokens=500, reserved_tokens=300)
    )
    assert Snapshot.of(message).free_kv_tokens == 4096 - 1000 - 300
    message.kv_cache.reserved_tokens = 2**32 - 1
    assert Snapshot.of(message).free_kv_tokens == 0
