"""One backend in virtual time: what it publishes, and when."""

from __future__ import annotations

import pytest

from backend_service.engines.simulated import ModelSpeed, SimulatedSpeed
from backend_service.request import Ended, Request
from backend_service.step_model import IsolatedRates
from backend_service.text import TextStream
from phaseroute.v1 import inference_pb2 as pb
from service_kit.requests import Sampling
from service_kit.step_time import StepModel
from simulator.backend import NEVER_S, BackendRules
from simulator.fleet import VirtualFleet, step_models
from simulator.profiles import Profile

STEP_S = 0.02
SPEED = SimulatedSpeed(1000, {1: STEP_S})
PREFILL_S = 0.04


def backend(rules=None, speed=SPEED, learn=False, **profile):
    profiles = {"a": Profile(speed, **profile)}
    fleet = VirtualFleet(
        profiles,
        rules=rules or BackendRules(),
        models=None if learn else step_models(profiles),
        answer_tokens=lambda prompt: None,
        hear=lambda name, events: None,
    )
    return fleet.backends["a"]


def request(name="r", new=100, at_s=0.0):
    return Request(
        id=name,
        tokens=[ord(letter) for letter in name] * 40,
        max_new_tokens=new,
        sampling=Sampling(),
        ignore_eos=True,
        text=TextStream([b"x"] * 257),
        eos=frozenset({256}),
        reusable_estimate=0,
        submitted_s=at_s,
    )


def run(virtual, until_s=NEVER_S):
    events = []
    while virtual.wakes_s <= until_s and virtual.wakes_s != NEVER_S:
        events += virtual.wake()
    return events


def generated(published):
    return [item.generated_tokens for item in published.status.requests]


@pytest.mark.parametrize("leaps", [True, False])
def test_news_of_progress_waits_for_its_interval(leaps):
    virtual = backend(BackendRules(leaps=leaps, progress_interval_s=0.05))
    virtual.join(request(), 0.0)
    first_s = PREFILL_S
    run(virtual, first_s)
    told = []
    for place in range(1, 50):
        now_s = first_s + 0.005 * place + 0.001
        run(virtual, now_s)
        published = virtual.status(now_s)
        told.append((round((published.at_s - first_s) / STEP_S), generated(published)))
    # Steps end every 20 ms, so news comes with every third.
    assert sorted({(steps, *tokens) for steps, tokens in told}) == [(0, 1), (3, 4), (6, 7), (9, 10), (12, 13)]


@pytest.mark.parametrize("leaps", [True, False])
def test_a_heartbeat_tells_of_progress_where_nothing_else_does(leaps):
    rules = BackendRules(leaps=leaps, progress_interval_s=None)
    virtual = backend(rules, SimulatedSpeed(1000, {1: 0.03}))
    virtual.join(request(), 0.0)
    run(virtual, 1.035)
    before = virtual.status(1.035)
    assert (before.at_s, generated(before)) == (pytest.approx(PREFILL_S), [1])
    run(virtual, 1.05)
    beat = virtual.status(1.05)
    assert (beat.at_s, generated(beat)) == (pytest.approx(PREFILL_S + 1.0), [1 + 33])


def test_a_heartbeat_says_how_long_the_step_has_been_running():
    virtual = backend(speed=SimulatedSpeed(10, {1: STEP_S}))
    virtual.join(request(), 0.5)
    published = virtual.status(2.7)
    assert published.at_s == pytest.approx(2.5)
    assert published.status.seconds_since_progress == pytest.approx(2.0)
    assert published.status.requests[0].remaining_prefill_tokens == 40


def test_a_status_stays_the_same_object_until_the_next():
    virtual = backend()
    virtual.join(request(), 0.0)
    assert virtual.status(0.01) is virtual.status(0.02)
    run(virtual, PREFILL_S)
    assert virtual.status(0.041) is not virtual.status(0.02 + 1.1)


def test_a_request_joins_at_the_end_of_the_running_step():
    virtual = backend()
    virtual.join(request("a"), 0.0)
    virtual.join(request("b"), 0.01)
    assert [item.attempt_id for item in virtual.status(0.03).status.requests] == ["a"]
    run(virtual, PREFILL_S)
    told = {item.attempt_id: item.phase for item in virtual.status(PREFILL_S).status.requests}
    assert told == {"a": pb.REQUEST_PHASE_DECODE, "b": pb.REQUEST_PHASE_QUEUED}


def test_an_arrival_cuts_a_leap_at_the_end_of_its_step():
    virtual = backend()
    virtual.join(request("a"), 0.0)
    run(virtual, PREFILL_S)
    assert virtual.wakes_s == pytest.approx(PREFILL_S + 99 * STEP_S)
    virtual.join(request("b"), PREFILL_S + 10.5 * STEP_S)
    assert virtual.wakes_s == pytest.approx(PREFILL_S + 11 * STEP_S)
    assert virtual.wake() == []
    assert [*generated(virtual.status(virtual.wakes_s - 0.001))] == [12, 0]


def test_what_cannot_be_admitted_does_not_keep_a_batch_from_leaping():
    virtual = backend(kv_tokens=200)
    virtual.join(request("a"), 0.0)
    virtual.join(request("b"), 0.0)
    virtual.wake()
    virtual.wake()
    assert virtual.wakes_s == pytest.approx(PREFILL_S + 99 * STEP_S)
    ends = [event for event in run(virtual) if isinstance(event, Ended)]
    assert [event.request_id for event in ends] == ["a", "b"]
    assert ends[1].times.admitted_s == pytest.approx(ends[0].times.last_token_s)


def test_a_cancelled_request_is_gone_after_the_running_step():
    virtual = backend()
    virtual.join(request("a"), 0.0)
    run(virtual, PREFILL_S)
    virtual.cancel("a", PREFILL_S + 0.03)
    assert len(virtual.status(PREFILL_S + 0.031).status.requests) == 1
    virtual.wake()
    assert virtual.wakes_s == NEVER_S
    assert list(virtual.status(0.2).status.requests) == []


def test_a_new_process_is_another_incarnation():
    virtual = backend()
    virtual.join(request("a"), 0.0)
    before = virtual.status(0.0).status.incarnation
    virtual.fail(1.0)
    assert (virtual.status(1.0), virtual.up, virtual.wakes_s) == (None, False, NEVER_S)
    virtual.come_back(2.0)
    after = virtual.status(2.0)
    assert after.at_s == 2.0
    assert after.status.incarnation != before
    assert list(after.status.requests) == []


def test_a_backend_learns_that_it_has_become_slow():
    virtual = backend(
        speed=ModelSpeed(StepModel(0.01, 2e-4, 1e-3, 1e-6, 512, 0.0), IsolatedRates(4000, 90)), learn=True
    )

    def told_s(now_s):
        """Of a decode step of 4 rows, which is what there is most of."""
        model = virtual.status(now_s).status.step_model
        correction = next((knot.seconds for knot in model.row_corrections if knot.rows == 4), 0.0)
        return model.base_s + 4 * (model.per_token_s + model.per_row_s + 200 * model.per_attended_s) + correction

    fresh_s = 0.01 + 4 * (2e-4 + 1e-3 + 200e-6)
    assert told_s(0.0) == pytest.approx(fresh_s, rel=0.02)
    virtual.slow_down(2.0, 0.0)
    for second in range(10):
        virtual.join(request(chr(97 + second), new=200), float(second))
        run(virtual, float(second + 1))
    assert told_s(10.0) == pytest.approx(2 * fresh_s, rel=0.1)


def test_what_is_known_is_not_learned():
    virtual = backend()
    model = virtual.status(0.0).status.step_model
    virtual.slow_down(2.0, 0.0)
    virtual.join(request(new=200), 0.0)
    run(virtual)
    later = virtual.status(9.0).status.step_model
    assert (later.base_s, later.per_token_s, later.per_row_s) == (model.base_s, model.per_token_s, model.per_row_s)


def test_a_batch_size_chosen_by_the_step_model_is_published():
    steep = SimulatedSpeed(1000, {1: 0.003, 2: 0.02, 4: 0.04})
    assert backend(speed=steep).status(0.0).status.max_active == 4
    status = backend(speed=steep, max_active_auto=True).status(0.0).status
    assert status.max_active == 1
    assert status.max_active_reason


def test_nothing_can_be_asked_of_a_backend_that_is_down():
    virtual = backend()
    virtual.fail(0.0)
    with pytest.raises(RuntimeError, match="a is down"):
        virtual.join(request(), 0.0)


def test_a_request_that_could_never_be_admitted_is_refused():
    with pytest.raises(ValueError, match="140 tokens at worst are over the context of a"):
        backend(kv_tokens=139).join(request(), 0.0)
