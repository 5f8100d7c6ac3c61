"""Plays a scenario in virtual time. Everything that comes out of here is simulated."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from backend_service.engines.simulated import END_TOKEN
from backend_service.request import Ended, Event, Progress, Request
from backend_service.text import TextStream
from phaseroute.scenarios.planned import Incident, IncidentKind, Planned, Scenario
from phaseroute.scenarios.served import Run, Served
from service_kit.requests import Priority, Sampling
from service_kit.step_time import StepModel
from simulator.backend import BackendRules
from simulator.fleet import Rank, VirtualFleet, step_models
from simulator.incidents import check_incidents, strike
from simulator.profiles import Profile
from simulator.prompts import answer_lengths, longest_uses, prefix_tokens, prompt_tokens
from simulator.router import Backend, Routed, Router, VirtualRouter

_EOS = frozenset({END_TOKEN})


class _NoText(TextStream):
    """Nobody reads the answers; one will do for all."""

    def feed(self, token_id: int) -> str:
        """Nothing to show."""
        return ""

    def flush(self) -> str:
        """Nothing was held back."""
        return ""


_NO_TEXT = _NoText(())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayOptions:
    """How a scenario is played."""

    policy: str = "two_phase"
    lengths: str = "history"
    """How the router estimates the length of answers, for policies that do."""
    seed: int = 0
    """Of what is drawn at random: ties, and whom to look at in a `sample`."""
    learn: bool = True
    """Backends fit their step models to the steps that they see, from a calibration on; else each model is that of the
    calibration, and batches that only decode leap to their next event, which is many times faster."""
    progress_interval_s: float | None = 0.05
    """Between Statuses that only show generated tokens, as the real backend sends them; None: with heartbeats only."""
    sample: int | None = None
    """The router looks at so many backends a request, drawn at random; None: at all, or at its own shortlist."""
    keep_gaps: bool = False
    """Inter-token latencies of every request."""
    keep_decisions: bool = False
    leaps: bool = True
    """False: token by token in any case, for comparison."""


@dataclass(frozen=True, slots=True)
class Played:
    """What came of it."""

    run: Run
    decisions: tuple[Routed, ...] = ()
    """In their order, those of later attempts included, where they were kept."""


def play(
    scenario: Scenario,
    profiles: Mapping[str, Profile],
    options: PlayOptions | None = None,
    *,
    run: int = 0,
    models: Mapping[str, StepModel] | None = None,
    make_router: Callable[[Mapping[str, Backend]], Router] | None = None,
) -> Played:
    """All of a scenario's requests over backends of these profiles. `run` only labels the result. `models`: what
    `step_models(profiles)` gave, to save it for many plays that learn nothing. `make_router`: for another router than
    `VirtualRouter`.

    Raises `InvalidRequest` for an unknown policy or an incident that cannot be, `UnknownName` for an incident at a
    backend that is not there, `ValueError` for a warm prefix that does not fit.
    """
    options = options or PlayOptions()
    fixed = None if options.learn else models or step_models(profiles)
    return _Play(scenario, profiles, options, fixed, make_router).result(run)


@contextmanager
def _few_collections() -> Iterator[None]:
    """A wide fleet is millions of objects, and next to none of what a play makes is cyclic."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@dataclass(slots=True)
class _Attempt:
    """A request where it is now."""

    index: int
    routed: Routed
    decided_after_s: float
    """Since the request arrived: above 0 for a later attempt."""
    begun: bool = False
    """Its first token is out."""


@dataclass(slots=True)
class _Play:
    scenario: Scenario
    profiles: Mapping[str, Profile]
    options: PlayOptions
    models: Mapping[str, StepModel] | None
    """None: backends learn."""
    make_router: Callable[[Mapping[str, Backend]], Router] | None
    fleet: VirtualFleet = field(init=False)
    router: Router = field(init=False)
    attempts: dict[str, _Attempt] = field(default_factory=dict)
    """Those that run, by id, in the order of their decisions."""
    running: dict[int, str] = field(default_factory=dict)
    """Ids by request."""
    failed: dict[int, set[str]] = field(default_factory=dict)
    """Backends that lost a request before its first token."""
    served: dict[int, Served] = field(default_factory=dict)
    decisions: list[Routed] = field(default_factory=list)

    def __post_init__(self) -> None:
        options, scenario = self.options, self.scenario
        check_incidents(scenario.incidents, self.profiles.keys())
        self.fleet = VirtualFleet(
            self.profiles,
            rules=BackendRules(
                leaps=options.leaps and not options.learn,
                progress_interval_s=options.progress_interval_s,
                keep_token_times=options.keep_gaps,
            ),
            models=self.models,
            answer_tokens=answer_lengths(scenario.requests),
            hear=self._hear,
        )
        make_router = self.make_router or partial(
            VirtualRouter, policy=options.policy, lengths=options.lengths, seed=options.seed, sample=options.sample
        )
        self.router = make_router(self.fleet.backends)

    def result(self, run: int) -> Played:
        for number, tokens in longest_uses(self.scenario).items():
            for backend in self.fleet.backends.values():
                backend.warm(prefix_tokens(number, tokens))
        for incident in self.scenario.incidents:
            self.fleet.at(incident.at_s, Rank.INCIDENT, partial(self._strike, incident))
        for index, planned in enumerate(self.scenario.requests):
            self.fleet.at(planned.at_s, Rank.ARRIVAL, partial(self._arrive, index, planned))
        with _few_collections():
            self.fleet.run()
        return Played(
            Run(
                scenario=self.scenario.name,
                policy=self.options.policy,
                run=run,
                backends=tuple(self.profiles),
                simulated=True,
                served=tuple(self.served[index] for index in range(len(self.scenario.requests))),
            ),
            tuple(self.decisions),
        )

    # -- what happens ----------------------------------------------------------------------------------------------

    def _arrive(self, index: int, planned: Planned) -> None:
        if planned.deadline_s is not None:
            self.fleet.at(planned.at_s + planned.deadline_s, Rank.DEADLINE, partial(self._give_up, index))
        self._route(index)

    def _route(self, index: int) -> None:
        planned, now_s = self.scenario.requests[index], self.fleet.now_s
        prompt = prompt_tokens(index, planned)
        waited_s = now_s - planned.at_s
        routed = self.router.decide(
            index,
            planned,
            prompt,
            now_s,
            failed=self.failed.get(index, ()),
            time_left_s=None if planned.deadline_s is None else planned.deadline_s - waited_s,
        )
        if self.options.keep_decisions:
            self.decisions.append(routed)
        if routed.lease is None:
            self._end(index, routed.code, "")
            return
        attempt_id = routed.lease.attempt_id
        self.attempts[attempt_id] = _Attempt(index, routed, waited_s)
        self.running[index] = attempt_id
        request = _request(attempt_id, planned, prompt, routed.reusable_tokens, now_s)
        self.fleet.tell(routed.backend, lambda backend: backend.join(request, now_s))

    def _hear(self, name: str, events: Sequence[Event]) -> None:
        for event in events:
            attempt = self.attempts.get(event.request_id)  # gone where its caller gave up during the step
            if attempt is not None:
                if isinstance(event, Progress):
                    attempt.begun = True
                elif isinstance(event, Ended):
                    self._answered(name, event)

    def _answered(self, name: str, event: Ended) -> None:
        attempt = self.attempts.pop(event.request_id)
        del self.running[attempt.index]
        routed, planned = attempt.routed, self.scenario.requests[attempt.index]
        assert routed.lease is not None
        self.router.ended(routed.lease, event)
        price = routed.price
        times_s = self.fleet.backends[name].token_times_s(event.request_id)
        self.served[attempt.index] = Served(
            index=attempt.index,
            arrived_s=planned.at_s,
            code="OK",
            backend=name,
            prompt_tokens=event.prompt_tokens,
            cached_tokens=event.cached_tokens,
            new_tokens=event.generated_tokens,
            workload=planned.workload,
            ttft_s=event.times.first_token_s - planned.at_s,
            finish_s=event.times.last_token_s - planned.at_s,
            predicted_ttft_s=_after(attempt.decided_after_s, price.predicted_ttft_s),
            predicted_finish_s=_after(attempt.decided_after_s, price.predicted_finish_s),
            gaps_s=tuple(later_s - earlier_s for earlier_s, later_s in pairwise(times_s)),
        )

    def _give_up(self, index: int) -> None:
        """The caller's deadline is over."""
        attempt_id = self.running.get(index)
        if attempt_id is None:
            return
        name = self._drop(attempt_id).routed.backend
        now_s = self.fleet.now_s
        self.fleet.tell(name, lambda backend: backend.cancel(attempt_id, now_s))
        self._end(index, "DEADLINE_EXCEEDED", name)

    def _strike(self, incident: Incident) -> None:
        now_s = self.fleet.now_s
        self.fleet.tell(incident.backend, lambda backend: strike(incident, backend, now_s))
        if incident.kind is not IncidentKind.FAIL:
            return
        there = [key for key, attempt in self.attempts.items() if attempt.routed.backend == incident.backend]
        lost = [self._drop(attempt_id) for attempt_id in there]
        for attempt in lost:
            if attempt.begun:
                self._end(attempt.index, "UNAVAILABLE", incident.backend)
            else:
                self.failed.setdefault(attempt.index, set()).add(incident.backend)
                self._route(attempt.index)

    def _drop(self, attempt_id: str) -> _Attempt:
        attempt = self.attempts.pop(attempt_id)
        del self.running[attempt.index]
        assert attempt.routed.lease is not None
        self.router.lost(attempt.routed.lease)
        return attempt

    def _end(self, index: int, code: str, backend: str) -> None:
        """Without an answer."""
        planned = self.scenario.requests[index]
        self.served[index] = Served(
            index=index,
            arrived_s=planned.at_s,
            code=code,
            backend=backend,
            prompt_tokens=planned.prompt_tokens,
            cached_tokens=0,
            new_tokens=0,
            workload=planned.workload,
        )


def _request(attempt_id: str, planned: Planned, prompt: array[int], reusable_tokens: int, now_s: float) -> Request:
    return Request(
        id=attempt_id,
        tokens=prompt,
        max_new_tokens=planned.max_new_tokens,
        sampling=Sampling(),
        ignore_eos=planned.new_tokens == planned.max_new_tokens,
        text=_NO_TEXT,
        eos=_EOS,
        reusable_estimate=reusable_tokens,
        submitted_s=now_s,
        priority=Priority.BATCH if planned.batch else Priority.INTERACTIVE,
        workload=planned.workload,
    )


def _after(waited_s: float, predicted_s: float | None) -> float | None:
    return None if predicted_s is None else waited_s + predicted_s
