"""Forecasts against the backend's own scheduler, played step by step in virtual time."""

from __future__ import annotations

import random
from collections import deque

import pytest

from backend_service.engines.simulated import SimulatedEngine, SimulatedSpeed
from backend_service.kv_pool import PoolLimits
from backend_service.request import Ended, Phase, Request
from backend_service.scheduler import Scheduler, SchedulerLimits
from backend_service.scheduling.registry import make_policy
from backend_service.step_plan import StepLimits
from backend_service.text import TextStream
from router_service.forecast import Job, Line, Load, finishes_s, forecast
from service_kit.requests import Priority, Sampling
from service_kit.step_time import StepModel, StepShape

FLAT = StepModel(0.004, 0.005, 0.006, 0.0, 100, 0.0, ((1, 0.001), (4, -0.001), (8, 0.02)))
GROWING = StepModel(0.004, 0.005, 0.006, 2e-6, 100, 0.0)
RATE = 200.0


class TimedEngine(SimulatedEngine):
    """Takes exactly the time of a step model."""

    def __init__(self, model: StepModel, kv_tokens: int, max_active: int) -> None:
        self.now_s = 0.0
        super().__init__(
            SimulatedSpeed(1000, {1: 0.01}), PoolLimits(kv_tokens, max_live=max_active), sleep=lambda _: None
        )
        self.model = model
        self.computed: dict[int, int] = {}

    def admit(self, tokens, max_new_tokens, sampling, **options):
        admission = super().admit(tokens, max_new_tokens, sampling, **options)
        if admission is not None:
            self.computed[admission.handle] = admission.reused_tokens
        return admission

    def step(self, slices):
        result = super().step(slices)
        shape = StepShape.of((s.tokens, self.computed[s.handle], s.handle in result.tokens) for s in slices)
        for piece in slices:
            self.computed[piece.handle] += piece.tokens
        self.now_s += self.model.seconds(shape)
        return result


class FixedFit:
    newest_s = 0.0
    """Knows the speed from the start and learns nothing."""

    def __init__(self, model: StepModel) -> None:
        self._model = model

    def observe(self, *args, **kwargs) -> None:
        """Nothing to learn."""

    def fit(self) -> StepModel:
        return self._model


class Backend:
    """The real scheduler over an engine that keeps to the model."""

    def __init__(self, model, *, max_active=4, step_tokens=256, target_s=None, kv_tokens=1 << 16, order="fcfs"):
        self.model, self.max_active, self.step_tokens, self.target_s = model, max_active, step_tokens, target_s
        self.kv_tokens, self.order = kv_tokens, order
        self.engine = TimedEngine(model, kv_tokens, max_active)
        self.scheduler = Scheduler(
            self.engine,
            SchedulerLimits(max_active, StepLimits(step_tokens, target_s), prefix_wait_s=0.0),
            clock=lambda: self.engine.now_s,
            fit=FixedFit(model),
            policy=make_policy(order, prefill_tokens_per_s=RATE, promote_after_s=5.0),
        )
        self.ends: dict[str, tuple[float, float]] = {}
        self.requests: dict[str, Request] = {}

    def submit(self, name, prompt_tokens, new_tokens, *, batch=False, at_s=None):
        rng = random.Random(name)
        request = self.requests[name] = Request(
            id=name,
            tokens=[len(self.requests), *(rng.randrange(256) for _ in range(prompt_tokens - 1))],  # shared with nobody
            max_new_tokens=new_tokens,
            sampling=Sampling(),
            ignore_eos=True,
            text=TextStream(self.engine.info.vocabulary.pieces, ()),
            eos=self.engine.info.vocabulary.eos,
            reusable_estimate=0,
            submitted_s=self.engine.now_s if at_s is None else at_s,
            priority=Priority.BATCH if batch else Priority.INTERACTIVE,
        )
        self.scheduler.submit(request)

    def tick(self):
        for event in self.scheduler.tick():
            if isinstance(event, Ended):
                self.ends[event.request_id] = (event.times.first_token_s, event.times.last_token_s)

    def run(self, arrivals=()):
        """To the end; arrivals (at_s, name, prompt, new, batch) join between steps."""
        coming = deque(sorted(arrivals))
        while coming or self.scheduler.busy:
            if not self.scheduler.busy:
                self.engine.now_s = max(self.engine.now_s, coming[0][0])
            while coming and coming[0][0] <= self.engine.now_s:
                at_s, name, prompt, new, batch = coming.popleft()
                self.submit(name, prompt, new, batch=batch, at_s=at_s)
            self.tick()

    @property
    def line(self):
        return Line(self.order, 5.0, RATE)

    def load(self, **changes) -> tuple[Load, list[str]]:
        """The books now, and the requests' names in their order."""
        snapshot = self.scheduler.snapshot()
        start_s = self.engine.now_s
        jobs = []
        for view in snapshot.requests:
            request = self.requests[view.id]
            batch = request.priority is Priority.BATCH
            jobs.append(
                Job(
                    prefill_tokens=0 if view.phase is Phase.DECODE else view.remaining_prefill_tokens,
                    decode_tokens=view.remaining_decode_tokens,
                    context_tokens=view.context_tokens,
                    kv_tokens=len(request.tokens) + request.max_new_tokens,
                    due_s=self.line.due_s(request.submitted_s - start_s, len(request.tokens), batch=batch),
                )
            )
        active = len(snapshot.active)
        held = sum(job.kv_tokens for job in jobs[:active])
        load = Load(
            model=self.model,
            max_active=self.max_active,
            step_tokens=self.step_tokens,
            step_target_s=self.target_s,
            free_kv_tokens=self.kv_tokens - held,
            line=self.line,
            active=tuple(jobs[:active]),
            waiting=tuple(jobs[active:]),
            **changes,
        )
        return load, [view.id for view in snapshot.requests]


CASES = {
    "flat": (Backend, {"model": FLAT}),
    "corrections, batch of 8": (Backend, {"model": FLAT, "max_active": 8}),
    "growing contexts": (Backend, {"model": GROWING}),
    "prompts beyond a step": (Backend, {"model": FLAT, "step_tokens": 64}),
    "little KV cache": (Backend, {"model": GROWING, "kv_tokens": 1500}),
    "shortest prefill first": (Backend, {"model": FLAT, "order": "shortest_prefill_first"}),
    "priority": (Backend, {"model": FLAT, "order": "priority"}),
    "one at a time": (Backend, {"model": GROWING, "max_active": 1, "step_tokens": 50}),
}
EXACT = {"flat", "corrections, batch of 8", "growing contexts", "shortest prefill first", "priority", "little KV cache"}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("case", CASES)
def test_every_first_token_and_finish_comes_when_it_was_forecast(case, seed):
    make, options = CASES[case]
    backend, rng = make(**options), random.Random(seed)
    for index in range(rng.randint(1, 14)):
        backend.submit(f"{seed}-{index}", rng.randint(2, 250), rng.randint(1, 60), batch=rng.random() < 0.5)
    for _ in range(rng.randint(0, 40)):
        backend.tick()
    started_s = backend.engine.now_s
    load, names = backend.load()
    expected = dict(zip(names, finishes_s(load), strict=True))
    backend.run()
    within_s = 1e-6 if case in EXACT else longest_step_s(backend)
    for name, (first_s, finish_s) in expected.items():
        true_first_s, true_finish_s = (time_s - started_s for time_s in backend.ends[name])
        assert finish_s == pytest.approx(true_finish_s, abs=within_s), name
        assert first_s == pytest.approx(max(0.0, true_first_s), abs=within_s), name


def longest_step_s(backend: Backend) -> float:
    """Prompts share a step's budget with a remainder that rotates."""
    rows = backend.max_active
    return 1e-6 + 1.5 * backend.model.seconds(StepShape(backend.step_tokens, rows, backend.step_tokens * 300))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("model", [FLAT, GROWING])
def test_a_target_time_for_steps_is_played_to_within_a_few_percent(model, seed):
    backend, rng = Backend(model, target_s=0.15), random.Random(seed)
    for index in range(rng.randint(2, 10)):
        backend.submit(f"{seed}-{index}", rng.randint(2, 900), rng.randint(1, 60))
    load, names = backend.load()
    expected = dict(zip(names, finishes_s(load), strict=True))
    backend.run()
    for name, (_, finish_s) in expected.items():
        assert finish_s == pytest.approx(backend.ends[name][1], rel=0.04, abs=0.15), name


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("order", ["fcfs", "shortest_prefill_first", "priority"])
def test_a_new_request_is_priced_at_what_it_gets_and_at_what_it_takes_from_others(order, seed):
    rng = random.Random(seed)
    requests = [(f"{seed}-{n}", rng.randint(2, 200), rng.randint(1, 50), rng.random() < 0.3) for n in range(9)]
    later_s = rng.uniform(0.0, 2.0)
    own = (later_s, "own", rng.randint(2, 200), rng.randint(1, 50), rng.random() < 0.3)

    def played(arrivals):
        backend = Backend(GROWING, order=order)
        for name, prompt, new, batch in requests:
            backend.submit(name, prompt, new, batch=batch)
        load, _ = backend.load(elapsed_s=later_s)
        backend.run(arrivals)
        return load, backend.ends

    load, without = played([])
    _, with_own = played([own])
    _, _, prompt, new, batch = own
    job = Job(prompt, new, 0, prompt + new, 1.0, later_s, load.line.due_s(later_s, prompt, batch=batch))
    seen = forecast(load, job)
    assert seen.ttft_s == pytest.approx(with_own["own"][0] - later_s)
    assert seen.finish_s == pytest.approx(with_own["own"][1] - later_s)
    delay_s = sum(with_own[name][1] - without[name][1] for name in without)
    assert seen.delay_of_others_s == pytest.approx(delay_s, abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_bookings_join_when_they_were_made(seed):
    rng = random.Random(seed)
    backend = Backend(FLAT, step_tokens=512)
    for index in range(2):
        backend.submit(f"{seed}-{index}", 40, 30)
    bookings = [(rng.uniform(0.01, 1.0), f"b{n}", rng.randint(5, 90), rng.randint(1, 40), False) for n in range(5)]
    load, names = backend.load()
    booked = tuple(Job(p, n, 0, p + n, joined_s=at_s, due_s=at_s) for at_s, _, p, n, _ in bookings)
    load = Load(**{**{f: getattr(load, f) for f in Load.__dataclass_fields__}, "waiting": (*load.waiting, *booked)})
    backend.run(bookings)
    names += [name for _, name, *_ in bookings]
    for name, times in zip(names, finishes_s(load), strict=True):
        assert times == pytest.approx(backend.ends[name]), name


def test_a_step_that_has_run_for_long_ends_no_earlier_than_now():
    job = Job(0, 3, 10, 20)
    books = Load(model=FLAT, max_active=4, step_tokens=64, step_target_s=None, free_kv_tokens=1000, active=(job,))
    step_s = FLAT.seconds(StepShape(1, 1, 11))
    stuck = Load(**{**{f: getattr(books, f) for f in Load.__dataclass_fields__}, "running_s": 9.0, "elapsed_s": 9.5})
    assert finishes_s(books) == [(0.0, pytest.approx(3 * step_s))]
    assert finishes_s(stuck) == [(0.0, pytest.approx(9.0 + 2 * step_s))]


def test_padded_batches_are_admitted_by_their_longest():
    jobs = (Job(10, 5, 0, 100), Job(10, 5, 0, 300), Job(10, 5, 0, 100))
    books = Load(
        model=FLAT, max_active=4, step_tokens=64, step_target_s=None, free_kv_tokens=700, padded_kv=True, waiting=jobs
    )
    first, second, third = finishes_s(books)
    assert first == second
    assert third[0] > second[1]


def test_what_never_fits_is_admitted_alone_and_nothing_loops_forever():
    jobs = (Job(10, 5, 0, 5000), Job(10, 5, 0, 10), Job(10, 1, 0, 10))
    books = Load(model=FLAT, max_active=2, step_tokens=64, step_target_s=None, free_kv_tokens=100, waiting=jobs)
    ends = [finish for _, finish in finishes_s(books)]
    assert ends[0] < ends[1]
    assert all(end > 0 for end in ends)


def test_an_idle_backend_costs_only_the_request_itself():
    books = Load(
        model=FLAT, max_active=4, step_tokens=64, step_target_s=None, free_kv_tokens=1000, elapsed_s=0.7, running_s=0.0
    )
    seen = forecast(books, Job(10, 3, 0, 13, joined_s=0.7, due_s=0.7))
    first_s, step_s = FLAT.seconds(StepShape(10, 1, 55)), FLAT.seconds(StepShape(1, 1, 11))
    assert seen.ttft_s == pytest.approx(first_s)
    assert seen.finish_s == pytest.approx(first_s + 2 * step_s)
    assert seen.delay_of_others_s == 0.0
