"""Shortlists of wide fleets: those that look best roughly, and those that may have the prefix."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from phaseroute.v1 import inference_pb2 as pb
from router_service.ledger import Ledger
from router_service.snapshot import Snapshot
from router_service.wide import LIKELY, SHORTLISTED, Rough, Wide
from tests.unit.router.router_values import status

NAMES = [f"b{index}" for index in range(60)]
KEYS = (b"begins alike",)


def snapshot(step_s: float = 0.01, *, decode_tokens: int = 0, incarnation: str = "first") -> Snapshot:
    message = status(incarnation=incarnation)
    message.step_model.CopyFrom(pb.StepModel(base_s=step_s, per_token_s=1e-4, samples=50))
    if decode_tokens:
        message.requests.add(phase=pb.REQUEST_PHASE_DECODE, remaining_decode_tokens=decode_tokens)
    return Snapshot.of(message)


def wide(**slower: Snapshot) -> Wide:
    """All alike and idle but for those named."""
    fleet = Wide(NAMES, Ledger(), random.Random(0))
    for name in NAMES:
        fleet.hear(name, slower.get(name, snapshot()), 0.0)
    return fleet


def narrow(fleet: Wide, eligible=NAMES, keys=(), now_s=0.0) -> list[str]:
    return list(fleet.narrow(set(eligible), keys=keys, prompt_tokens=500, new_tokens=100.0, now_s=now_s))


def test_the_idle_and_fast_are_on_it():
    busy = {name: snapshot(decode_tokens=5000) for name in NAMES[SHORTLISTED:]}
    assert set(narrow(wide(**busy))) == set(NAMES[:SHORTLISTED])


def test_work_that_should_be_done_by_now_no_longer_counts():
    slow, fast = NAMES[:SHORTLISTED], NAMES[SHORTLISTED:]
    idle = {name: snapshot(0.02) for name in slow}
    fleet = wide(**idle, **{name: snapshot(decode_tokens=200) for name in fast})
    assert set(narrow(fleet)) == set(slow)
    assert set(narrow(fleet, now_s=1000.0)) <= set(fast)


def test_who_had_a_prompt_that_begins_alike_is_on_it_until_it_restarts():
    busy = {name: snapshot(decode_tokens=5000) for name in NAMES[SHORTLISTED:]}
    fleet = wide(**busy)
    lease = Ledger().book("b59", "first", prompt_tokens=500, reusable_tokens=0, max_new_tokens=10)
    fleet.booked(lease, KEYS)
    assert "b59" in narrow(fleet, keys=KEYS)
    assert "b59" not in narrow(fleet)
    fleet.hear("b59", snapshot(decode_tokens=5000, incarnation="second"), 1.0)
    assert "b59" not in narrow(fleet, keys=KEYS)


def test_at_most_a_few_are_on_it_for_their_prefix():
    fleet = wide()
    for name in NAMES[20:40]:
        fleet.booked(Ledger().book(name, "first", prompt_tokens=9, reusable_tokens=0, max_new_tokens=1), KEYS)
    assert len(narrow(fleet, keys=KEYS)) <= SHORTLISTED + LIKELY


def test_only_the_eligible_are_on_it_however_few():
    busy = {"b7": snapshot(decode_tokens=9000), "b8": snapshot(decode_tokens=9000)}
    assert set(narrow(wide(**busy), eligible=["b7", "b8"])) == {"b7", "b8"}


def test_bookings_keep_a_burst_from_one_backend():
    fleet = wide()
    for _ in range(200):
        name = narrow(fleet)[0]
        fleet.booked(Ledger().book(name, "first", prompt_tokens=500, reusable_tokens=0, max_new_tokens=100), ())
    first = narrow(fleet)
    assert len(set(first)) == SHORTLISTED


def test_without_any_speed_there_is_nothing_rough():
    assert Rough.of(replace(snapshot(), pace=None, rates=None)) is None


def test_rates_are_good_enough_without_a_step_model():
    rough = Rough.of(Snapshot.of(status()))
    assert rough.decode_token_s == pytest.approx(1 / 293)
    assert rough.work_s(2551, 293) == pytest.approx(2.0)
