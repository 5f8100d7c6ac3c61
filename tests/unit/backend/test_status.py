"""What a backend says of itself, from a scheduler in virtual time."""

from __future__ import annotations

import pytest

from backend_service.engines.simulated import SimulatedEngine, SimulatedSpeed
from backend_service.kv_pool import KvPool, PoolLimits
from backend_service.request import Request
from backend_service.scheduler import Scheduler, SchedulerLimits
from backend_service.scheduling.fair import Fair
from backend_service.scheduling.priority import InteractiveFirst
from backend_service.status import to_proto
from backend_service.step_model import KnownStepTimes
from backend_service.step_plan import StepLimits
from backend_service.text import TextStream
from phaseroute.v1 import inference_pb2 as pb
from service_kit.requests import Priority, Sampling
from service_kit.step_time import StepModel
from simulator.clock import VirtualClock

MODEL = StepModel(
    0.004, 3e-4, 1e-3, 2e-7, samples=80, residual_p90_s=0.001, row_corrections_s=((1, -0.002), (4, 0.003))
)


class Bench:
    """A backend of one place with one request in it and others waiting."""

    def __init__(self, limits=None, policy=None, fit=None):
        self.clock = VirtualClock()
        self.speed = SimulatedSpeed(1000, {1: 0.01, 4: 0.04})
        self.engine = SimulatedEngine(self.speed, PoolLimits(4096, max_live=1), sleep=self.clock.sleep)
        self.scheduler = Scheduler(self.engine, limits or SchedulerLimits(1), clock=self.clock, policy=policy, fit=fit)

    def submit(self, name, prompt_tokens=50, priority=Priority.INTERACTIVE, **options):
        vocabulary = self.engine.info.vocabulary
        self.scheduler.submit(
            Request(
                id=name,
                tokens=[ord(name[0])] * prompt_tokens,
                max_new_tokens=20,
                sampling=Sampling(),
                ignore_eos=options.pop("ignore_eos", True),
                text=TextStream(vocabulary.pieces, ()),
                eos=vocabulary.eos,
                reusable_estimate=0,
                submitted_s=self.clock(),
                priority=priority,
                **options,
            )
        )

    def status(self, **options) -> pb.BackendStatus:
        return to_proto(
            self.scheduler.snapshot(),
            incarnation="one",
            sequence=1,
            info=self.engine.info,
            rates=self.speed.rates(),
            max_queued=8,
            draining=False,
            now_s=self.clock(),
            **options,
        )


def test_requests_say_what_was_asked_and_what_was_there():
    bench = Bench()
    bench.submit("a", workload="chat")
    while bench.scheduler.busy:
        bench.scheduler.tick()
    bench.submit("a again", workload="chat", ignore_eos=False)
    bench.submit("waits", prompt_tokens=70)
    bench.scheduler.tick()
    again, waits = bench.status().requests
    assert (again.workload, again.ignore_eos, again.prompt_tokens, again.cached_tokens) == ("chat", False, 50, 49)
    assert again.due_in_s == 0
    assert (waits.workload, waits.ignore_eos, waits.prompt_tokens, waits.cached_tokens) == ("", True, 70, 0)


def test_who_waits_is_due_relative_to_now():
    bench = Bench(policy=InteractiveFirst(5.0))
    bench.clock.sleep(100.0)
    bench.submit("runs")
    bench.submit("batch", priority=Priority.BATCH)
    bench.submit("interactive")
    bench.scheduler.tick()
    bench.clock.sleep(2.0)
    status = bench.status()
    due = {entry.attempt_id: entry.due_in_s for entry in status.requests}
    waited_s = bench.clock() - 100.0
    assert due == pytest.approx({"runs": 0.0, "interactive": -waited_s, "batch": 5.0 - waited_s})
    assert status.step_rules.promote_batch_after_s == 5.0


def test_the_rules_of_a_step():
    rules = Bench(SchedulerLimits(1, StepLimits(200, 0.15))).status().step_rules
    assert (rules.step_tokens, rules.step_target_s, rules.promote_batch_after_s) == (200, 0.15, 0.0)
    assert not Bench().status().step_rules.HasField("step_target_s")


def test_the_step_model_with_its_corrections_and_its_age():
    fit = KnownStepTimes(MODEL)
    fit.newest_s = -60.0
    bench = Bench(fit=fit)
    bench.clock.sleep(3.0)
    model = bench.status().step_model
    assert (model.base_s, model.per_token_s, model.per_row_s, model.per_attended_s) == (0.004, 3e-4, 1e-3, 2e-7)
    assert (model.samples, model.residual_p90_s) == (80, 0.001)
    assert [(knot.rows, knot.seconds) for knot in model.row_corrections] == [(1, -0.002), (4, 0.003)]
    assert model.age_s == pytest.approx(63.0)


def test_without_a_step_model_there_is_none():
    assert not Bench().status().HasField("step_model")


def test_the_batch_is_the_schedulers_unless_said_otherwise():
    assert Bench(SchedulerLimits(3)).status().max_active == 3
    assert Bench(SchedulerLimits(3)).status(max_active=2).max_active == 2


@pytest.mark.parametrize("copies", [False, True])
def test_a_pool_of_copies_is_padded(copies):
    assert KvPool(PoolLimits(100, max_live=2), copies=copies).use().padded is copies
    assert not Bench().status().kv_cache.padded


def test_due_times_of_a_fair_line_are_virtual():
    bench = Bench(policy=Fair(1000, 100))
    bench.clock.sleep(1000.0)
    for name, client in (("a", "alice"), ("again", "alice"), ("b", "bob")):
        bench.submit(name, client=client)
    bench.scheduler.tick()
    status = bench.status()
    assert status.scheduling_policy == "fair"
    due_in_s = {entry.attempt_id: entry.due_in_s for entry in status.requests}
    assert due_in_s == pytest.approx({"a": 0.0, "b": 0.0, "again": 0.25})
    assert [entry.client for entry in status.requests] == ["alice", "bob", "alice"]


def test_a_client_sees_of_others_only_how_busy_they_keep_the_backend():
    bench = Bench()
    for name, client in (("a", "alice"), ("b", "bob"), ("nobody's", "")):
        bench.submit(name, client=client, workload="chat")
    bench.scheduler.tick()
    whole, part = bench.status(), bench.status(viewer="alice")
    assert [entry.client for entry in whole.requests] == ["alice", "bob", ""]
    assert part.requests[0] == whole.requests[0]
    for seen, entry in zip(part.requests[1:], whole.requests[1:], strict=True):
        assert (seen.attempt_id, seen.workload, seen.client) == ("", "", "")
        entry.attempt_id = entry.workload = entry.client = ""
        assert seen == entry


def test_an_answer_that_goes_on_shows_what_it_has_while_it_waits():
    bench = Bench()
    bench.submit("runs")
    bench.submit("goes on", prompt_tokens=60, resumed_tokens=15)
    bench.scheduler.tick()
    waiting = bench.status().requests[1]
    assert (waiting.prompt_tokens, waiting.generated_tokens) == (45, 15)
    assert (waiting.remaining_prefill_tokens, waiting.remaining_decode_tokens) == (60, 5)


def test_the_bound_on_tokens_that_wait():
    assert Bench().status().max_queued_tokens == 0
    assert Bench().status(max_queued_tokens=1 << 40).max_queued_tokens == 1 << 40
