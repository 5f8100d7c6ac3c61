from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router_service.exploration import Exploration, ExplorationLimits, has_slack

LIMITS = ExplorationLimits()
UNKNOWN = "its rates are unknown"


def exploration(**limits):
    return Exploration(ExplorationLimits(**limits))


def unknown(exploration, now_s, *, backend="gpu", incarnation="first"):
    return exploration.wanted(backend, incarnation, priced=False, model_age_s=None, now_s=now_s)


def old(exploration, now_s, *, age_s=812.0, incarnation="first"):
    return exploration.wanted("gpu", incarnation, priced=True, model_age_s=age_s, now_s=now_s)


def explored(exploration, count, *, incarnation="first", from_s=0.0, every_s=30.0):
    for number in range(count):
        exploration.begin("gpu", incarnation, f"{incarnation} {from_s} {number}", from_s + number * every_s)
        exploration.end(f"{incarnation} {from_s} {number}")


# Of a backend whose rates are unknown


def test_a_backend_of_unknown_rates_gets_a_request_at_once():
    assert unknown(exploration(), 0.0) == UNKNOWN


def test_it_gets_no_other_while_that_runs():
    exploring = exploration()
    exploring.begin("gpu", "first", "a", 0.0)

    assert unknown(exploring, 1000.0) == ""


def test_it_gets_another_after_the_interval_when_the_first_brought_no_rates():
    exploring = exploration()
    explored(exploring, 1)

    assert unknown(exploring, 29.9) == ""
    assert unknown(exploring, 30.0) == UNKNOWN


def test_it_gets_three_and_no_more():
    exploring = exploration()
    explored(exploring, 2)
    assert unknown(exploring, 1e6) == UNKNOWN
    explored(exploring, 1, from_s=60.0)

    assert unknown(exploring, 1e6) == ""


def test_a_new_process_starts_afresh():
    exploring = exploration()
    explored(exploring, 3)

    assert unknown(exploring, 60.0, incarnation="second") == UNKNOWN
    explored(exploring, 2, incarnation="second", from_s=60.0)
    assert unknown(exploring, 119.0, incarnation="second") == ""
    assert unknown(exploring, 120.0, incarnation="second") == UNKNOWN


def test_an_attempt_at_the_old_process_still_counts_as_running():
    exploring = exploration()
    exploring.begin("gpu", "first", "a", 0.0)

    assert unknown(exploring, 100.0, incarnation="second") == ""
    exploring.end("a")
    assert unknown(exploring, 100.0, incarnation="second") == UNKNOWN


def test_one_backend_does_not_use_up_what_another_may_have():
    exploring = exploration()
    exploring.begin("gpu", "first", "a", 0.0)

    assert unknown(exploring, 0.0, backend="cpu") == UNKNOWN


def test_several_may_run_at_a_time_where_the_limits_say_so():
    exploring = exploration(max_outstanding=2, interval_s=0.0)
    exploring.begin("gpu", "first", "a", 0.0)
    assert unknown(exploring, 0.0) == UNKNOWN
    exploring.begin("gpu", "first", "b", 0.0)

    assert unknown(exploring, 0.0) == ""


@pytest.mark.parametrize("limits", [{"max_outstanding": 0}, {"per_incarnation": 0}])
def test_nothing_is_wanted_where_the_limits_allow_none(limits):
    assert unknown(exploration(**limits), 0.0) == ""


# Of one whose step model is old


def test_an_old_step_model_is_measured_again_and_its_age_told():
    assert old(exploration(), 0.0) == "its step model is 812 s old"


@pytest.mark.parametrize("age_s", [0.0, 600.0, None, math.nan])
def test_a_model_that_is_not_known_to_be_old_is_left_alone(age_s):
    assert old(exploration(), 0.0, age_s=age_s) == ""


def test_an_old_model_gets_one_request_an_interval_for_as_long_as_it_takes():
    exploring = exploration()
    explored(exploring, 10)

    assert old(exploring, 299.9) == ""
    assert old(exploring, 300.0) != ""


def test_an_old_model_gets_none_while_one_runs():
    exploring = exploration()
    exploring.begin("gpu", "first", "a", 0.0)

    assert old(exploring, 1000.0) == ""


# Keeping count


def test_asking_changes_nothing():
    exploring = exploration()

    assert [unknown(exploring, 0.0) for _ in range(5)] == [UNKNOWN] * 5


def test_begin_and_end_may_be_repeated():
    exploring = exploration()
    for _ in range(5):
        exploring.begin("gpu", "first", "a", 0.0)
    exploring.end("a")
    exploring.end("a")
    exploring.end("never begun")

    assert unknown(exploring, 30.0) == UNKNOWN


class Calls(RuleBasedStateMachine):
    """A caller that sends a request wherever one is wanted, and ends attempts in any order, known or not."""

    def __init__(self):
        super().__init__()
        self.limits = ExplorationLimits(max_outstanding=2, per_incarnation=3, interval_s=5.0)
        self.exploring = Exploration(self.limits)
        self.now_s = 0.0
        self.incarnation = {"cpu": 0, "gpu": 0}
        self.outstanding = {"cpu": set(), "gpu": set()}
        self.unknown_sent = {}
        self.sent_at = {}
        self.count = 0

    @rule(seconds=st.floats(0, 10))
    def time_passes(self, seconds):
        self.now_s += seconds

    @rule(backend=st.sampled_from(["cpu", "gpu"]))
    def restart(self, backend):
        self.incarnation[backend] += 1

    @rule(backend=st.sampled_from(["cpu", "gpu"]), priced=st.booleans(), again=st.booleans())
    def send(self, backend, priced, again):
        process = (backend, self.incarnation[backend])
        arguments = {"priced": priced, "model_age_s": 1000.0 if priced else None, "now_s": self.now_s}
        if not self.exploring.wanted(backend, str(self.incarnation[backend]), **arguments):
            return
        self.count += 1
        for _ in range(1 + again):
            self.exploring.begin(backend, str(self.incarnation[backend]), str(self.count), self.now_s)
        self.outstanding[backend].add(str(self.count))
        assert self.now_s - self.sent_at.get(process, -math.inf) >= self.limits.interval_s
        self.sent_at[process] = self.now_s
        if not priced:
            self.unknown_sent[process] = self.unknown_sent.get(process, 0) + 1

    @rule(backend=st.sampled_from(["cpu", "gpu"]), data=st.data())
    @precondition(lambda self: self.count)
    def end(self, backend, data):
        attempt = str(data.draw(st.integers(0, self.count + 1)))
        self.exploring.end(attempt)
        for attempts in self.outstanding.values():
            attempts.discard(attempt)

    @invariant()
    def never_more_than_allowed(self):
        assert all(len(attempts) <= self.limits.max_outstanding for attempts in self.outstanding.values())
        assert all(sent <= self.limits.per_incarnation for sent in self.unknown_sent.values())


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=50, stateful_step_count=30)


# Slack


def slack(*, batch=False, deadline_s=None, best_finish_s=2.0, finish_there_s=None, limits=LIMITS):
    return has_slack(
        batch=batch,
        deadline_s=deadline_s,
        best_finish_s=best_finish_s,
        finish_there_s=finish_there_s,
        limits=limits,
    )


def test_without_a_deadline_only_a_batch_request_has_time():
    assert slack(batch=True)
    assert slack(batch=True, best_finish_s=None, finish_there_s=100.0)
    assert not slack(batch=False)


@pytest.mark.parametrize("batch", [False, True])
def test_a_deadline_must_leave_three_times_the_best_finish(batch):
    assert slack(batch=batch, deadline_s=6.0)
    assert not slack(batch=batch, deadline_s=5.9)
    assert slack(batch=batch, deadline_s=5.9, limits=ExplorationLimits(slack=2.0))


def test_a_deadline_must_leave_half_again_of_the_finish_that_an_old_model_predicts():
    assert slack(deadline_s=15.0, finish_there_s=10.0)
    assert not slack(deadline_s=14.9, finish_there_s=10.0)


def test_a_deadline_is_not_risked_where_no_finish_is_predicted():
    assert not slack(deadline_s=1e6, best_finish_s=None)


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("deadline_s", [math.nan, math.inf, -1.0, 5.0])
def test_a_predicted_finish_that_makes_no_sense_gives_no_slack(batch, deadline_s):
    assert not slack(batch=batch, deadline_s=deadline_s, best_finish_s=math.nan)
    assert not slack(batch=batch, deadline_s=deadline_s, finish_there_s=math.nan)
