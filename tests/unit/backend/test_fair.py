"""Fair order between clients: the policy, the line under it, and the real scheduler in virtual time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_service.engines.simulated import SimulatedEngine, SimulatedSpeed
from backend_service.kv_pool import PoolLimits
from backend_service.request import Ended, Request
from backend_service.scheduler import Scheduler, SchedulerLimits
from backend_service.scheduling.fair import Fair
from backend_service.scheduling.fcfs import FirstComeFirstServed
from backend_service.step_plan import StepLimits
from backend_service.text import TextStream
from backend_service.waiting_line import WaitingLine
from service_kit.requests import Sampling
from simulator.clock import VirtualClock

PREFILL_RATE, DECODE_RATE = 1000.0, 100.0


def fair() -> Fair:
    return Fair(PREFILL_RATE, DECODE_RATE)


def waiting(name, client="", *, weight=1.0, tokens=100, max_new_tokens=10):
    """0.2 s of service alone."""
    return Request(
        id=name,
        tokens=[1] * tokens,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(),
        ignore_eos=True,
        text=TextStream((), ()),
        eos=frozenset(),
        reusable_estimate=0,
        submitted_s=0.0,
        client=client,
        weight=weight,
    )


def line_of(*requests: Request, policy: Fair | None = None) -> WaitingLine:
    line = WaitingLine(policy or fair())
    for request in requests:
        line.add(request)
    return line


def order(line: WaitingLine) -> list[str]:
    return [request.id for request in line]


def admit(line: WaitingLine) -> str:
    """The first one."""
    first = next(iter(line)).id
    line.remove(first, admitted=True)
    return first


class Bench:
    """The real scheduler over the simulated engine."""

    def __init__(self, max_active=1):
        self.clock = VirtualClock()
        self.engine = SimulatedEngine(
            SimulatedSpeed(PREFILL_RATE, {1: 1 / DECODE_RATE}), PoolLimits(65536, max_active), sleep=self.clock.sleep
        )
        self.policy = fair()
        limits = SchedulerLimits(max_active, StepLimits(256))
        self.scheduler = Scheduler(self.engine, limits, clock=self.clock, policy=self.policy)
        self.ended: list[str] = []
        self.started_s: dict[str, float] = {}
        self.arrived_s: dict[str, float] = {}

    def submit(self, name, client, *, weight=1.0, tokens=100, max_new_tokens=10):
        self.arrived_s[name] = self.clock()
        vocabulary = self.engine.info.vocabulary
        number = len(self.arrived_s)
        self.scheduler.submit(
            Request(
                id=name,
                tokens=[number % 256, number // 256, *[7] * (tokens - 2)],
                max_new_tokens=max_new_tokens,
                sampling=Sampling(),
                ignore_eos=True,
                text=TextStream(vocabulary.pieces, ()),
                eos=vocabulary.eos,
                reusable_estimate=0,
                submitted_s=self.clock(),
                client=client,
                weight=weight,
            )
        )

    def tick(self):
        for event in self.scheduler.tick():
            if isinstance(event, Ended):
                self.ended.append(event.request_id)
                self.started_s[event.request_id] = event.times.admitted_s

    def run(self, until_s=float("inf")):
        while self.scheduler.busy and self.clock() < until_s:
            self.tick()

    def waited_s(self, name):
        return self.started_s[name] - self.arrived_s[name]


# -- what it is for -------------------------------------------------------------------------------------------------


def test_a_client_that_floods_does_not_keep_another_waiting():
    bench = Bench()
    for index in range(200):
        bench.submit(f"flood {index}", "flood")
    now_and_then = []
    while bench.scheduler.busy and bench.clock() < 30:
        bench.run(until_s=bench.clock() + 3.1)
        now_and_then.append(f"rare {len(now_and_then)}")
        bench.submit(now_and_then[-1], "rare")
    bench.run()
    assert len(now_and_then) >= 9
    # Two equal clients take turns: who comes now and then waits for what runs, and no more than one turn beyond it.
    assert max(bench.waited_s(name) for name in now_and_then) <= 2 * 0.2 + 1e-9
    assert [name for name in bench.ended if name.startswith("flood")] == [f"flood {index}" for index in range(200)]


def test_clients_that_flood_get_tokens_by_weight():
    bench = Bench()
    for index in range(200):
        bench.submit(f"one {index}", "one", weight=1)
        bench.submit(f"three {index}", "three", weight=3, tokens=200, max_new_tokens=20)
    bench.run(until_s=40)
    tokens = Counter()
    for name in bench.ended:
        tokens[name.split()[0]] += 110 if name.startswith("one") else 220
    assert tokens["three"] / tokens["one"] == pytest.approx(3, rel=0.1)


def test_long_requests_are_paid_for():
    bench = Bench()
    for index in range(50):
        bench.submit(f"long {index}", "long", tokens=900, max_new_tokens=90)
        bench.submit(f"short {index}", "short")
    bench.run(until_s=10.0)
    counts = Counter(name.split()[0] for name in bench.ended)
    assert counts["short"] == pytest.approx(9 * counts["long"], abs=9)


def test_an_idle_client_saves_nothing_up():
    line = line_of(*(waiting(f"a{index}", "a") for index in range(4)))
    for _ in range(3):
        admit(line)
    line.add(waiting("b0", "b"))
    line.add(waiting("b1", "b"))
    assert order(line) == ["b0", "a3", "b1"]


def test_what_was_served_while_nobody_else_waited_is_forgotten_when_the_backend_rests():
    bench = Bench()
    for index in range(20):
        bench.submit(f"early {index}", "early")
    bench.run()
    for index in range(20):
        bench.submit(f"late {index}", "late")
    bench.submit("early again", "early")
    bench.run()
    assert bench.ended.index("early again") <= 22


def test_status_tells_when_they_are_due_in_virtual_time():
    bench = Bench()
    for index in range(3):
        bench.submit(f"a{index}", "a")
    bench.submit("b0", "b")
    bench.tick()
    snapshot = bench.scheduler.snapshot()
    due_in_s = {view.id: view.due_s - snapshot.virtual_s for view in snapshot.waiting}
    assert due_in_s == pytest.approx({"b0": 0.0, "a1": 0.2, "a2": 0.4})
    assert list(due_in_s) == ["b0", "a1", "a2"]
    assert snapshot.policy_name == "fair"


# -- the rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [(0.0, 1.0), (1.0, 0.0), (1.0, float("nan"))])
def test_rates_that_are_none_are_refused(rates):
    with pytest.raises(ValueError, match="measure"):
        Fair(*rates)


def test_who_gives_up_pays_nothing():
    """A client whose oldest requests time out must not be put behind everybody for them."""
    line = line_of(
        *(waiting(f"a{index}", "a") for index in range(10)), *(waiting(f"b{index}", "b") for index in range(4))
    )
    for index in range(8):
        line.remove(f"a{index}")
    assert order(line) == ["a8", "b0", "a9", "b1", "b2", "b3"]
    assert line.views == tuple(request.view() for request in line)
    line.add(waiting("a10", "a"))
    assert order(line) == ["a8", "b0", "a9", "b1", "b2", "a10", "b3"]


def test_a_prompt_that_turns_out_to_be_cached_costs_its_client_less():
    first = waiting("a0", "a")
    line = line_of(first, waiting("a1", "a"), waiting("b0", "b"), waiting("b1", "b"))
    assert order(line) == ["a0", "b0", "a1", "b1"]
    first.reusable_estimate = 90
    line.renew(first)
    assert order(line) == ["a0", "b0", "a1", "b1"]
    assert {request.id: request.due_s for request in line}["a1"] == pytest.approx(0.11)


def test_who_goes_ahead_of_others_of_its_client_is_paid_first():
    """One is held for a prefix that is being computed; the next one of the same client is admitted."""
    line = line_of(waiting("a0", "a"), waiting("a1", "a"), waiting("a2", "a"), waiting("b0", "b"))
    line.remove("a1", admitted=True)
    assert {request.id: request.due_s for request in line} == pytest.approx({"b0": 0.0, "a0": 0.2, "a2": 0.4})


def test_nobody_starves_when_ever_new_clients_come():
    line = line_of(waiting("old 0", "old"), *(waiting(f"old {index}", "old") for index in range(1, 5)))
    admit(line)
    for index in range(100):
        while len(line) < 12:
            line.add(waiting(f"new {index} {len(line)}", f"client {index} {len(line)}"))
        admit(line)
    assert not any(name.startswith("old") for name in order(line))


def test_clients_that_are_gone_are_forgotten():
    policy = fair()
    line = line_of(policy=policy)
    for index in range(5000):
        line.add(waiting(f"r{index}", f"client {index}"))
        if index >= 8:
            admit(line)
        assert len(policy._clients) < 40
    while len(line):
        line.remove(order(line)[0])
    assert len(policy._clients) < 40


steps = st.lists(
    st.tuples(
        st.sampled_from(["join", "admit", "cancel", "renew", "overtake"]),
        st.sampled_from("abc"),
        st.integers(2, 500),
        st.integers(1, 50),
    ),
    max_size=60,
)


@given(steps)
def test_with_one_client_it_is_first_come_first_served(drawn):
    lines = [WaitingLine(fair()), WaitingLine(FirstComeFirstServed())]
    for index, (step, _, tokens, new) in enumerate(drawn):
        for line in lines:
            _play(line, step, waiting(str(index), "only", tokens=tokens, max_new_tokens=new), tokens)
        assert order(lines[0]) == order(lines[1])


@given(steps)
def test_the_line_is_sorted_and_each_client_is_served_in_order_of_arrival(drawn):
    policy = fair()
    line = WaitingLine(policy)
    virtual_s = 0.0
    for index, (step, client, tokens, new) in enumerate(drawn):
        _play(line, step, waiting(str(index), client, tokens=tokens, max_new_tokens=new), tokens)
        requests = list(line)
        assert line.views == tuple(request.view() for request in requests)
        assert [request.due_s for request in requests] == sorted(request.due_s for request in requests)
        for name in "abc":
            mine = [int(request.id) for request in requests if request.client == name]
            assert mine == sorted(mine)
        assert policy.virtual_s >= virtual_s
        virtual_s = policy.virtual_s
        assert all(client.costs_s or client.start_s > virtual_s for client in policy._clients.values())


def _play(line: WaitingLine, step: str, request: Request, number: int) -> None:
    inside = list(line)
    match step:
        case "join":
            line.add(request)
        case "admit" if inside:
            line.remove(inside[0].id, admitted=True)
        case "overtake" if inside:
            line.remove(inside[min(number % 3, len(inside) - 1)].id, admitted=True)
        case "cancel" if inside:
            line.remove(inside[number % len(inside)].id)
        case "renew" if inside:
            changed = inside[number % len(inside)]
            changed.reusable_estimate = number % len(changed.tokens)
            line.renew(changed)
