"""The order of admission: each policy, the line that it sorts, and both in the real scheduler in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_service.engines.simulated import SimulatedEngine, SimulatedSpeed
from backend_service.kv_pool import PoolLimits
from backend_service.request import Ended, Phase, Request
from backend_service.scheduler import Scheduler, SchedulerLimits
from backend_service.scheduling.base import QueuePolicy, Waiting
from backend_service.scheduling.fair import Fair
from backend_service.scheduling.fcfs import FirstComeFirstServed
from backend_service.scheduling.priority import DEFAULT_PROMOTE_AFTER_S, InteractiveFirst
from backend_service.scheduling.registry import POLICY_NAMES, make_policy
from backend_service.scheduling.shortest_prefill_first import ShortestPrefillFirst
from backend_service.settings import BackendSettings
from backend_service.step_plan import StepLimits
from backend_service.text import TextStream
from backend_service.waiting_line import WaitingLine
from service_kit.faults import StartupFailed
from service_kit.requests import Priority, Sampling, TextPrompt
from simulator.clock import VirtualClock

RATE = 100.0
INTERACTIVE, BATCH = Priority.INTERACTIVE, Priority.BATCH

facts = st.builds(Waiting, st.integers(1, 100_000), st.integers(1, 10_000), st.sampled_from(Priority))


INDEPENDENT = tuple(name for name in POLICY_NAMES if name != Fair.name)
names = st.sampled_from(INDEPENDENT)


def policy(name: str) -> Any:
    return make_policy(name, prefill_tokens_per_s=RATE)


def waiting(name: str, *, tokens=10, at_s=0.0, priority=INTERACTIVE, max_new_tokens=4) -> Request:
    """A request as the line gets it."""
    return Request(
        id=name,
        tokens=[1] * tokens,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(),
        ignore_eos=True,
        text=TextStream((), ()),
        eos=frozenset(),
        reusable_estimate=0,
        submitted_s=at_s,
        priority=priority,
    )


def line_of(kind: QueuePolicy, *requests: Request) -> WaitingLine:
    line = WaitingLine(kind)
    for request in requests:
        line.add(request)
    return line


def order(line: WaitingLine) -> list[str]:
    return [request.id for request in line]


@dataclass
class Bench:
    """The real scheduler over the simulated engine: 1000 prompt tokens/s, 10 ms a decode step, one slot."""

    policy: QueuePolicy
    max_active: int = 1
    capacity: int = 8192
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self):
        speed = SimulatedSpeed(1000, {1: 0.01})
        self.engine = SimulatedEngine(speed, PoolLimits(self.capacity, self.max_active), sleep=self.clock.sleep)
        limits = SchedulerLimits(self.max_active, StepLimits(64))
        self.scheduler = Scheduler(self.engine, limits, clock=self.clock, policy=self.policy)
        self.ended: list[str] = []

    def submit(self, name, tokens, *, priority=INTERACTIVE, max_new_tokens=4):
        vocabulary = self.engine.info.vocabulary
        self.scheduler.submit(
            Request(
                id=name,
                tokens=self.engine.prepare(TextPrompt((name * tokens)[:tokens])),
                max_new_tokens=max_new_tokens,
                sampling=Sampling(),
                ignore_eos=True,
                text=TextStream(vocabulary.pieces, ()),
                eos=vocabulary.eos,
                reusable_estimate=0,
                submitted_s=self.clock(),
                priority=priority,
            )
        )

    def start(self, name="running", tokens=50, **options):
        """Submit a request and admit it."""
        self.submit(name, tokens, **options)
        self.tick()

    def tick(self):
        self.ended += [event.request_id for event in self.scheduler.tick() if isinstance(event, Ended)]

    def run(self):
        while self.scheduler.busy:
            self.tick()
        return self.ended

    def phase(self, name):
        (view,) = (view for view in self.scheduler.snapshot().requests if view.id == name)
        return view.phase


# -- policies -------------------------------------------------------------------------------------------------------


def test_fcfs_knows_no_differences():
    rule = FirstComeFirstServed()
    assert rule(Waiting(1, 1, INTERACTIVE)) == rule(Waiting(9999, 9999, BATCH)) == 0


def test_a_prompt_is_due_when_its_own_prefill_would_be_done():
    assert ShortestPrefillFirst(200)(Waiting(500, 1, INTERACTIVE)) == 2.5


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match="measure"):
        ShortestPrefillFirst(rate)


def test_batch_is_due_later_by_the_time_of_its_promotion():
    rule = InteractiveFirst(promote_after_s=7)
    assert (rule(Waiting(1, 1, INTERACTIVE)), rule(Waiting(1, 1, BATCH))) == (0, 7)
    assert InteractiveFirst()(Waiting(1, 1, BATCH)) == DEFAULT_PROMOTE_AFTER_S == 300


@given(names, facts)
def test_due_times_are_bounded_so_nobody_starves(name, request):
    due_s = policy(name)(request)
    assert 0 <= due_s < float("inf")


@given(names, facts, st.integers(0, 1000))
def test_less_left_to_compute_is_never_due_later(name, request, saved):
    less = Waiting(max(1, request.prefill_tokens - saved), request.max_new_tokens, request.priority)
    assert policy(name)(less) <= policy(name)(request)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_policies_have_the_names_they_are_made_by(name):
    assert policy(name).name == name


def test_policies_are_made_with_what_was_given():
    request = Waiting(500, 1, BATCH)
    assert make_policy("shortest_prefill_first", prefill_tokens_per_s=50)(request) == 10
    assert make_policy("priority", prefill_tokens_per_s=50, promote_after_s=7)(request) == 7


def test_the_settings_offer_every_policy():
    assert get_args(BackendSettings.model_fields["scheduling"].annotation) == POLICY_NAMES
    assert BackendSettings.model_fields["scheduling"].default == "fair"
    assert BackendSettings.model_fields["promote_batch_after_s"].default == DEFAULT_PROMOTE_AFTER_S


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(StartupFailed, match=r'"lifo".*fcfs, shortest_prefill_first, priority'):
        policy("lifo")


# -- the line -------------------------------------------------------------------------------------------------------

arrivals = st.lists(
    st.tuples(st.floats(0, 100), st.integers(1, 5000), st.sampled_from(Priority)), min_size=1, max_size=20
)


def requests_of(drawn) -> list[Request]:
    """In order of arrival."""
    return [
        waiting(str(index), tokens=tokens, at_s=at_s, priority=priority)
        for index, (at_s, tokens, priority) in enumerate(sorted(drawn, key=lambda each: each[0]))
    ]


@given(names, st.integers(1, 10))
def test_equals_go_in_order_of_arrival(name, count):
    line = line_of(policy(name), *(waiting(str(index)) for index in range(count)))
    assert order(line) == [str(index) for index in range(count)]


@given(names, arrivals, st.floats(0, 1000), st.integers(1, 5000), st.sampled_from(Priority))
def test_whoever_arrives_after_a_request_is_due_goes_behind_it(name, drawn, later_s, tokens, priority):
    """So the requests that can ever go before it are those that arrive within a time that is known at its arrival."""
    rule = policy(name)
    mine = waiting("mine", tokens=tokens, priority=priority)
    due_s = rule(Waiting(tokens, mine.max_new_tokens, priority))
    late = [
        waiting(str(index), tokens=length, at_s=due_s + later_s + at_s, priority=kind)
        for index, (at_s, length, kind) in enumerate(drawn)
    ]
    assert order(line_of(rule, mine, *late))[0] == "mine"


@given(names, arrivals, st.data())
def test_the_line_stays_sorted_through_joins_leaves_and_changes(name, drawn, data):
    rule = policy(name)
    line = WaitingLine(rule)
    inside: dict[str, Request] = {}
    for request in requests_of(drawn):
        line.add(request)
        inside[request.id] = request
        match data.draw(st.sampled_from(["stay", "leave", "reuse"])):
            case "leave":
                leaver = data.draw(st.sampled_from(sorted(inside)))
                assert line.remove(leaver)
                del inside[leaver]
            case "reuse":
                changed = inside[data.draw(st.sampled_from(sorted(inside)))]
                changed.reusable_estimate = data.draw(st.integers(0, len(changed.tokens) - 1))
                line.renew(changed)
        expected = sorted(
            inside.values(),
            key=lambda each: (
                each.submitted_s + rule(Waiting(each.remaining_prefill_tokens, each.max_new_tokens, each.priority)),
                int(each.id),
            ),
        )
        assert list(line) == expected
        assert line.views == tuple(each.view() for each in expected)
        assert len(line) == len(inside)


def test_who_is_not_in_the_line_cannot_leave_it():
    assert not line_of(FirstComeFirstServed()).remove("nobody")


def test_an_iteration_is_not_disturbed_by_changes():
    requests = [waiting(name, tokens=100 + index) for index, name in enumerate("abc")]
    line = line_of(ShortestPrefillFirst(RATE), *requests)
    seen = []
    for request in line:
        seen.append(request.id)
        if request.id == "b":
            request.reusable_estimate = 50
            line.renew(request)
            line.remove("c")
    assert seen == ["a", "b", "c"]
    assert order(line) == ["b", "a"]


def test_views_are_built_when_the_line_changes_and_not_before():
    line = line_of(FirstComeFirstServed(), *(waiting(str(index)) for index in range(10_000)))
    before = line.views
    assert line.views is before
    request = next(iter(line))
    line.renew(request)  # nothing new about it
    assert line.views is before
    line.add(waiting("new"))
    after = line.views
    assert len(after) == 10_001
    assert all(old is new for old, new in zip(before, after, strict=False))  # shown anew, not made anew


# -- in the scheduler -----------------------------------------------------------------------------------------------


def test_fcfs_lets_the_long_prompt_go_first():
    bench = Bench(policy("fcfs"))
    bench.start()
    bench.submit("long", 2000)
    bench.submit("short", 20)
    assert bench.run() == ["running", "long", "short"]


def test_a_short_prompt_overtakes_a_long_one_in_the_line():
    bench = Bench(ShortestPrefillFirst(1000))
    bench.start()
    bench.submit("long", 2000)
    bench.submit("short", 20)
    assert bench.run() == ["running", "short", "long"]


def test_a_short_prompt_does_not_interrupt_a_long_one_that_runs():
    bench = Bench(ShortestPrefillFirst(1000))
    bench.start("long", 2000)
    bench.submit("short", 20)
    assert bench.run() == ["long", "short"]


def test_a_long_prompt_gets_through_an_endless_stream_of_short_ones():
    bench = Bench(ShortestPrefillFirst(1000))
    overtook = _stream_past(bench, "long", 2000)
    assert (
        2.0 <= bench.clock() < 2.0 + 0.3
    )  # its own prefill time, and two short ones: one ran then, one was due before
    assert overtook > 10


def test_interactive_goes_before_batch():
    bench = Bench(policy("priority"))
    bench.start()
    bench.submit("batch", 20, priority=BATCH)
    bench.submit("interactive", 2000)
    assert bench.run() == ["running", "interactive", "batch"]


def test_other_policies_ignore_the_priority():
    bench = Bench(policy("fcfs"))
    bench.start()
    bench.submit("batch", 20, priority=BATCH)
    bench.submit("interactive", 20)
    assert bench.run() == ["running", "batch", "interactive"]


def test_a_batch_request_gets_through_an_endless_stream_of_interactive_ones():
    bench = Bench(InteractiveFirst(promote_after_s=5))
    overtook = _stream_past(bench, "batch", 100, priority=BATCH)
    assert 5.0 <= bench.clock() < 5.0 + 0.3
    assert overtook > 30


def _stream_past(bench: Bench, name: str, tokens: int, **options) -> int:
    """Keep a short interactive request waiting beside this one until it is admitted; how many went before it."""
    bench.start()
    bench.submit(name, tokens, **options)
    for index in range(1000):
        while len(bench.scheduler.snapshot().waiting) > 1:
            bench.tick()
        if bench.phase(name) is not Phase.QUEUED:
            return index
        bench.submit(f"s{index}", 100)
    raise AssertionError(f"{name} starves")


def test_promoted_batch_goes_first_among_those_that_came_later():
    bench = Bench(InteractiveFirst(promote_after_s=1))
    bench.start(tokens=1500)
    bench.submit("batch", 20, priority=BATCH)
    bench.submit("early", 20)
    while bench.clock() < 1.2:
        bench.tick()
    bench.submit("late", 20)
    assert bench.run() == ["running", "early", "batch", "late"]


def test_status_lists_the_waiting_in_order_of_admission():
    bench = Bench(policy("priority"))
    bench.start()
    bench.submit("batch", 20, priority=BATCH)
    bench.submit("interactive", 20)
    snapshot = bench.scheduler.snapshot()
    assert [(view.id, view.priority) for view in snapshot.requests] == [
        ("running", INTERACTIVE),
        ("interactive", INTERACTIVE),
        ("batch", BATCH),
    ]
    assert (snapshot.active, snapshot.waiting) == (snapshot.requests[:1], snapshot.requests[1:])
    assert snapshot.policy_name == "priority"


def test_steps_do_not_build_the_waiting_part_of_the_snapshot_anew():
    bench = Bench(policy("shortest_prefill_first"))
    bench.start(tokens=200, max_new_tokens=50)
    for index in range(100):
        bench.submit(f"w{index}", 20)
    bench.tick()
    before = bench.scheduler.snapshot()
    bench.tick()
    after = bench.scheduler.snapshot()
    assert after.sequence > before.sequence
    assert after.waiting is before.waiting


def test_a_request_held_for_a_prefix_is_ranked_and_shown_by_what_it_will_still_compute():
    bench = Bench(ShortestPrefillFirst(1000), max_active=2)
    bench.submit("shared prefix ", 1000)
    bench.tick()
    bench.submit("shared prefix " * 80, 1100)  # the first 1000 tokens are being computed
    held = bench.scheduler.snapshot().waiting[0]
    assert held.remaining_prefill_tokens == 1100
    bench.tick()
    (held,) = bench.scheduler.snapshot().waiting
    assert held.remaining_prefill_tokens == 100
