"""Which backends count as hung, by their Status alone."""

from __future__ import annotations

import pytest

from phaseroute.v1 import inference_pb2 as pb
from router_service.backend import State
from router_service.snapshot import Snapshot
from router_service.stall import LONGEST_STEP_S, SLOWDOWN, why_stalled
from tests.unit.router.router_values import backend, status

SLOW_CPU = pb.IsolatedRates(prefill_tokens_per_s=50, decode_tokens_per_s=20)
MODEL = pb.StepModel(base_s=0.01, per_token_s=0.02, per_row_s=0.01, per_attended_s=1e-6, samples=50)


def heard(silent_s: float, *, active: int = 1, prefill_tokens: int = 0, queued_prefill: int = 0, **changes) -> Snapshot:
    message = status(seconds_since_progress=silent_s)
    for name, value in changes.items():
        getattr(message, name).CopyFrom(value)
    for number in range(active):
        message.requests.add(
            attempt_id=f"a{number}",
            phase=pb.REQUEST_PHASE_PREFILL if prefill_tokens else pb.REQUEST_PHASE_DECODE,
            remaining_prefill_tokens=prefill_tokens,
            remaining_decode_tokens=100,
            context_tokens=0 if prefill_tokens else 500,
        )
    if queued_prefill:
        message.requests.add(attempt_id="q", phase=pb.REQUEST_PHASE_QUEUED, remaining_prefill_tokens=queued_prefill)
    return Snapshot.of(message)


def test_decode_that_brings_nothing_for_longer_than_a_step_may_take_is_a_stall():
    assert why_stalled(heard(4.9), 5.0) == ""
    why = why_stalled(heard(6.4, active=2), 5.0)
    assert why == ("makes no progress: 2 active and 0 waiting requests, and no step has ended for 6 s; 5 s are granted")


def test_who_has_nothing_to_do_makes_no_progress_and_is_not_stalled():
    assert why_stalled(heard(1000.0, active=0), 5.0) == ""


@pytest.mark.parametrize("queued", [False, True])
def test_a_long_prefill_has_the_time_that_it_takes(queued):
    """Admitted or, as far as the Status knows, not yet."""
    asked = {"active": 0, "queued_prefill": 4000} if queued else {"prefill_tokens": 4000}
    takes_s = 4000 / 50
    assert why_stalled(heard(1.2 * takes_s, isolated_rates=SLOW_CPU, **asked), 5.0) == ""
    assert why_stalled(heard(SLOWDOWN * takes_s + 6, isolated_rates=SLOW_CPU, **asked), 5.0)


def test_only_those_that_fit_the_batch_count():
    message = status(seconds_since_progress=100.0)
    message.isolated_rates.CopyFrom(SLOW_CPU)
    for number in range(40):
        message.requests.add(attempt_id=str(number), phase=pb.REQUEST_PHASE_QUEUED, remaining_prefill_tokens=100)
    # Four of 100 tokens: 8 s. All of them would have 80 s.
    assert why_stalled(Snapshot.of(message), 5.0)


def test_where_steps_are_bounded_one_step_is_the_measure():
    rules = pb.StepRules(step_tokens=256)
    step_s = 0.01 + 0.02 * 257 + 0.01
    asked = {"prefill_tokens": 100_000, "step_model": MODEL, "step_rules": rules}
    assert why_stalled(heard(5 + step_s, **asked), 5.0) == ""
    assert why_stalled(heard(5 + 10 * SLOWDOWN * step_s, **asked), 5.0)


def test_without_a_bound_the_model_prices_all_of_it():
    asked = {"prefill_tokens": 10_000, "step_model": MODEL}
    assert why_stalled(heard(5 + 10_000 * 0.02, **asked), 5.0) == ""


def test_of_unknown_speed_it_has_the_longest_time_there_is():
    message = status(seconds_since_progress=LONGEST_STEP_S)
    message.ClearField("isolated_rates")
    message.requests.add(phase=pb.REQUEST_PHASE_PREFILL, remaining_prefill_tokens=10)
    assert why_stalled(Snapshot.of(message), 5.0) == ""
    message.seconds_since_progress = LONGEST_STEP_S + 6
    assert why_stalled(Snapshot.of(message), 5.0)


def test_the_age_of_the_status_counts():
    assert why_stalled(heard(4.0), 5.0) == ""
    assert why_stalled(heard(4.0), 5.0, status_age_s=1.5)


def test_a_stalled_backend_is_unreachable_until_it_progresses():
    made = backend("gpu")
    snapshot = heard(9.0)
    made.hear(snapshot, 0.0, stalled=why_stalled(snapshot, 5.0))
    assert made.state is State.UNREACHABLE
    assert made.detail.startswith("makes no progress")
    assert made.why_lost("first").startswith("Backend gpu makes no progress")

    made.hear(heard(0.1), 1.0)
    assert (made.state, made.why_lost("first")) == (State.SERVING, "")
