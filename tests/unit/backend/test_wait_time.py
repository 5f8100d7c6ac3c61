"""When a full line has room again, from a scheduler in virtual time."""

from __future__ import annotations

import pytest

from backend_service.places import Shortage
from backend_service.step_model import IsolatedRates, KnownStepTimes
from backend_service.wait_time import LEAST_S, full, seconds_until_room
from service_kit.step_time import StepModel
from tests.unit.backend.test_status import Bench

RATES = IsolatedRates(1000, 100)


def line(waiting, **options) -> Bench:
    """One request of 50 + 20 tokens in the batch, which has one place, and others behind it."""
    bench = Bench(**options)
    for index in range(waiting + 1):
        bench.submit(chr(ord("a") + index))
    bench.scheduler.tick()  # the prompt, and a first token
    return bench


@pytest.mark.parametrize(("requests", "seconds"), [(1, 0.19), (2, 0.19 + 0.25), (3, 0.19 + 0.5)])
def test_a_place_is_free_when_those_before_are_served(requests, seconds):
    snapshot = line(5).scheduler.snapshot()
    assert seconds_until_room(snapshot, RATES, requests=requests, tokens=0) == pytest.approx(seconds)


def test_tokens_are_free_when_as_many_are_admitted():
    snapshot = line(5).scheduler.snapshot()
    seconds = [seconds_until_room(snapshot, RATES, requests=0, tokens=tokens) for tokens in (1, 70, 71)]
    assert seconds == pytest.approx([0.19, 0.19, 0.44])


def test_it_is_what_really_happens():
    bench = line(6)
    before = bench.scheduler.snapshot()
    told_s = seconds_until_room(before, RATES, requests=3, tokens=0)
    begun_s = bench.clock()
    while len(bench.scheduler.snapshot().waiting) > len(before.waiting) - 3:
        bench.scheduler.tick()
    assert bench.clock() - begun_s == pytest.approx(told_s, abs=0.06)


def test_the_step_model_prices_a_batch():
    model = StepModel(0.05, 0.0, 0.0, 0.0, samples=80, residual_p90_s=0.0)
    snapshot = line(1, fit=KnownStepTimes(model)).scheduler.snapshot()
    assert seconds_until_room(snapshot, RATES, requests=1, tokens=0) == pytest.approx(19 * 0.05)


def test_it_is_never_nothing():
    snapshot = Bench().scheduler.snapshot()
    assert seconds_until_room(snapshot, RATES, requests=1, tokens=1) == LEAST_S


def test_the_refusal_says_what_is_short_and_when_to_come_again():
    snapshot = line(5).scheduler.snapshot()
    fault = full(snapshot, RATES, Shortage(requests=1))
    assert (fault.reason, fault.retry_after_s) == ("OVERLOADED", pytest.approx(0.19))
    assert "6 requests are here" in str(fault)
    assert "tokens wait" in str(full(snapshot, RATES, Shortage(tokens=1)))
