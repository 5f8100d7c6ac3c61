"""Backends and a router in virtual time: the scheduler, the cache, the ledger and the policies are the real ones; only
the wire and the waiting are left out. Everything that comes out of here is simulated."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from backend_service.engines.simulated import SimulatedEngine, SimulatedSpeed
from backend_service.kv_pool import PoolLimits
from backend_service.request import Ended, Event, Request
from backend_service.scheduler import Scheduler, SchedulerLimits
from backend_service.status import to_proto
from backend_service.step_plan import StepLimits
from backend_service.text import TextStream
from router_service.backend import as_candidate
from router_service.decision import Candidate, Choice, ProbeOutcome, RoutingRequest
from router_service.ledger import Lease, Ledger
from router_service.policies.registry import make_policy
from router_service.snapshot import Snapshot
from service_kit.requests import Sampling
from simulator.clock import VirtualClock

INCARNATION = "simulated"
STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class BackendModel:
    """A backend to simulate."""

    speed: SimulatedSpeed
    max_active: int = 4
    kv_tokens: int = 65_536


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come."""

    at_s: float
    prompt: tuple[int, ...]
    """Token ids below 256."""
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an arrival; seconds from its arrival."""

    backend: str
    arrived_s: float
    ttft_s: float
    finish_s: float
    cached_tokens: int
    candidates: tuple[Candidate, ...]
    choice: Choice


@dataclass(slots=True)
class _Backend:
    model: BackendModel
    engine: SimulatedEngine
    scheduler: Scheduler
    clock: VirtualClock
    status: Snapshot = field(init=False)
    """As published at the end of the last step."""
    inbox: list[Request] = field(default_factory=list)
    stepping: bool = False

    def publish(self) -> None:
        snapshot = self.scheduler.snapshot()
        self.status = Snapshot.of(
            to_proto(
                snapshot,
                incarnation=INCARNATION,
                sequence=snapshot.sequence,
                info=self.engine.info,
                rates=self.model.speed.rates(),
                max_active=self.model.max_active,
                max_queued=0,
                draining=False,
                now_s=self.clock(),
            )
        )


class VirtualFleet:
    """Runs arrivals through one policy. A backend publishes its Status at the end of each step, and takes in new
    requests between steps, as the real one does."""

    def __init__(self, models: Mapping[str, BackendModel], *, policy: str, seed: int = 0) -> None:
        """Raises `InvalidRequest` for an unknown policy."""
        self._policy = make_policy(policy, models.keys(), random.Random(seed))
        self._ledger = Ledger()
        self._backends = {name: _build(model) for name, model in models.items()}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._leases: dict[str, tuple[int, Lease]] = {}
        self._routed: dict[int, tuple[float, str, tuple[Candidate, ...], Choice]] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._now_s = 0.0

    def warm(self, prompt: Sequence[int]) -> None:
        """Put a prompt into every backend's cache, at no cost of time."""
        for name, backend in self._backends.items():
            backend.scheduler.submit(_request(backend.engine, f"warm {name}", prompt, 1, 0, 0.0))
            while backend.scheduler.busy:
                backend.scheduler.tick()
            backend.clock.now_s = 0.0
            self._publish(name)

    def run(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        """What became of each arrival, in their order."""
        for index, arrival in enumerate(arrivals):
            self._at(arrival.at_s, partial(self._arrive, index, arrival))
        while self._agenda:
            self._now_s, _, action = heapq.heappop(self._agenda)
            action()
        return [self._outcomes[index] for index in range(len(arrivals))]

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time_s, next(self._order), action))

    def _arrive(self, index: int, arrival: Arrival) -> None:
        candidates = tuple(self._candidate(name, arrival.prompt) for name in self._backends)
        choice = self._policy(RoutingRequest(arrival.max_new_tokens), candidates)
        chosen = next(candidate for candidate in candidates if candidate.name == choice.selected)
        lease = self._ledger.book(
            chosen.name,
            INCARNATION,
            prompt_tokens=chosen.prompt_tokens,
            reusable_tokens=chosen.reusable_tokens,
            max_new_tokens=arrival.max_new_tokens,
        )
        backend = self._backends[chosen.name]
        self._leases[lease.attempt_id] = (index, lease)
        self._routed[index] = (self._now_s, chosen.name, candidates, choice)
        backend.inbox.append(
            _request(
                backend.engine,
                lease.attempt_id,
                arrival.prompt,
                arrival.max_new_tokens,
                chosen.reusable_tokens,
                self._now_s,
            )
        )
        if not backend.stepping:
            self._step(chosen.name)

    def _candidate(self, name: str, prompt: Sequence[int]) -> Candidate:
        backend = self._backends[name]
        candidate = as_candidate(
            name,
            backend.status,
            self._ledger.pending(name),
            last_turn=self._ledger.last_turn(name),
            status_age_s=0.0,
            prompt_tokens=len(prompt),
        )
        return replace(
            candidate,
            prompt_tokens_estimated=False,
            reusable_tokens=backend.engine.probe(prompt),
            probe=ProbeOutcome.ANSWERED,
        )

    def _step(self, name: str) -> None:
        backend = self._backends[name]
        for request in backend.inbox:
            backend.scheduler.submit(request)
        backend.inbox.clear()
        backend.stepping = backend.scheduler.busy
        if backend.stepping:
            backend.clock.now_s = self._now_s
            events = backend.scheduler.tick()  # the clock is at the end of the step now; the world hears of it then
            self._at(backend.clock.now_s, partial(self._step_done, name, events))

    def _step_done(self, name: str, events: Sequence[Event]) -> None:
        self._publish(name)
        for event in events:
            if isinstance(event, Ended):
                self._finish(event)
        self._step(name)

    def _publish(self, name: str) -> None:
        backend = self._backends[name]
        backend.publish()
        self._ledger.on_status(name, INCARNATION, backend.status.attempt_ids)

    def _finish(self, event: Ended) -> None:
        index, lease = self._leases.pop(event.request_id)
        self._ledger.release(lease)
        arrived_s, backend, candidates, choice = self._routed.pop(index)
        self._outcomes[index] = Outcome(
            backend=backend,
            arrived_s=arrived_s,
            ttft_s=event.times.first_token_s - arrived_s,
            finish_s=event.times.last_token_s - arrived_s,
            cached_tokens=event.cached_tokens,
            candidates=candidates,
            choice=choice,
        )


def _build(model: BackendModel) -> _Backend:
    clock = VirtualClock()
    limits = PoolLimits(model.kv_tokens, max_live=model.max_active, retained_tokens=model.kv_tokens)
    engine = SimulatedEngine(model.speed, limits, max_step_tokens=STEP_TOKENS, sleep=clock.sleep)
    scheduler = Scheduler(engine, SchedulerLimits(model.max_active, StepLimits(STEP_TOKENS)), clock=clock)
    backend = _Backend(model, engine, scheduler, clock)
    backend.publish()
    return backend


def _request(
    engine: SimulatedEngine,
    request_id: str,
    prompt: Sequence[int],
    max_new_tokens: int,
    reusable: int,
    submitted_s: float,
) -> Request:
    vocabulary = engine.info.vocabulary
    return Request(
        id=request_id,
        tokens=prompt,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(),
        ignore_eos=True,
        text=TextStream(vocabulary.pieces, ()),
        eos=vocabulary.eos,
        reusable_estimate=reusable,
        submitted_s=submitted_s,
    )
