"""Continuous batching: admit, step, publish. Knows no engine, no thread, no wire."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from backend_service.concurrency import START_CONTEXT_TOKENS, Concurrency
from backend_service.engines.base import Engine, KvUse, Slice, StepResult
from backend_service.request import Event, Failed, Phase, Request, RequestView
from backend_service.scheduling.base import QueuePolicy
from backend_service.scheduling.fcfs import FirstComeFirstServed
from backend_service.single_flight import SingleFlight
from backend_service.step_model import StepFit, StepTimes
from backend_service.step_plan import StepLimits, StepPlanner
from backend_service.waiting_line import WaitingLine
from service_kit.faults import EngineFailed
from service_kit.step_time import StepModel, StepShape

REFIT_INTERVAL_S = 1.0
"""How often the step model is fitted anew while steps run: a fit takes two milliseconds of the engine's own thread."""

LOOK_AHEAD = 64
"""How many that wait for a prefix in flight others may go ahead of: looking at thousands would hold up the steps."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one backend takes on."""

    max_active: int = 4
    """Largest batch; with a `Concurrency`, the largest that it may choose."""
    step: StepLimits = field(default_factory=StepLimits)
    prefix_wait_s: float = 30.0
    """Longest that a request waits for a prefix which another one is computing; 0: not at all."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything Status needs, taken between two steps."""

    sequence: int
    """Grows with every change."""
    structure: int
    """Grows when a request arrives, starts, changes phase or leaves: what a watcher wants to hear of at once."""
    active: tuple[RequestView, ...]
    waiting: tuple[RequestView, ...]
    """In order of admission; the same object until the line changes."""
    policy_name: str
    """Of the order of admission."""
    virtual_s: float | None
    """Now, on the clock by which the waiting are due; None: that is the scheduler's clock."""
    kv: KvUse
    max_active: int
    max_active_reason: str
    """How that came about; empty where it is a setting."""
    step_limits: StepLimits
    promote_batch_after_s: float
    """By the order of admission."""
    step_model: StepModel | None
    measured_s: float | None
    """When the newest step that the model knows of ended, on the scheduler's clock; None: unknown."""
    progress_s: float
    """When the last step ended, or when there was nothing to do; on the scheduler's clock."""

    @property
    def requests(self) -> tuple[RequestView, ...]:
        """The active ones, then the waiting ones."""
        return (*self.active, *self.waiting)


class Scheduler:
    """Runs an engine step by step. All calls from one thread."""

    def __init__(
        self,
        engine: Engine,
        limits: SchedulerLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        fit: StepTimes | None = None,
        policy: QueuePolicy | None = None,
        concurrency: Concurrency | None = None,
    ) -> None:
        """`policy`: the order of admission; first come, first served by default. `concurrency`: chooses the batch size,
        up to `limits.max_active`, by every new step model."""
        self._engine = engine
        self._limits = limits
        self._clock = clock
        self._fit = fit or StepFit()
        self._policy = policy or FirstComeFirstServed()
        self._waiting = WaitingLine(self._policy)
        prefix_wait_s = limits.prefix_wait_s if engine.info.shares_prefixes else 0.0
        self._single_flight = SingleFlight(engine.probe, max_wait_s=prefix_wait_s)
        self._planner = StepPlanner(limits.step)
        self._concurrency = concurrency
        self._max_active, self._max_active_reason = limits.max_active, ""
        self._active: list[Request] = []
        self._sequence = 0
        self._structure = 0
        self._progress_s = clock()
        self._refit(self._progress_s)

    @property
    def busy(self) -> bool:
        """Something is queued or active, so `tick` has work."""
        return bool(self._waiting or self._active)

    def submit(self, request: Request) -> None:
        """Put a request in the line. It must fit an empty engine: `prompt + max_new_tokens <= context`."""
        if not self.busy:
            self._progress_s = self._clock()
            self._policy.rest()
        self._waiting.add(request)
        self._changed(structure=True)

    def cancel(self, request_id: str) -> None:
        """Forget a request, wherever it is; unknown ids are ignored. What it computed stays reusable."""
        if self._waiting.remove(request_id):
            self._changed(structure=True)
            return
        for request in self._active:
            if request.id == request_id:
                self._leave(request)
                return

    def tick(self) -> list[Event]:
        """Admit what fits, run one step, and return what happened, in order."""
        self._admit()
        slices = self._planner.plan(self._active, self._step_model)
        if not slices:
            return []
        before_s = self._clock()
        try:
            result = self._engine.step(slices)
        except EngineFailed as fault:
            return self._fail_active(fault)
        now_s = self._progress_s = self._clock()
        self._fit.observe(self._shape(slices, result), (now_s - before_s) / result.steps, now_s)
        if now_s - self._fitted_s >= REFIT_INTERVAL_S:
            self._refit(now_s)

        events: list[Event] = []
        by_handle = {request.handle: request for request in self._active}
        for piece in slices:
            request = by_handle[piece.handle]
            tokens = result.tokens.get(piece.handle, ())
            request.computed_tokens += piece.tokens + max(0, len(tokens) - 1)
            phase = request.phase
            for token in tokens:
                events += request.accept(token, now_s)
                if request.phase is Phase.ENDED:  # guesses beyond the end are dropped
                    break
            if request.phase is Phase.ENDED:
                self._leave(request)
            elif request.phase is not phase:
                self._structure += 1
        self._changed()
        return events

    def snapshot(self) -> Snapshot:
        """The state between two steps."""
        return Snapshot(
            sequence=self._sequence,
            structure=self._structure,
            active=tuple(request.view() for request in self._active),
            waiting=self._waiting.views,
            policy_name=self._policy.name,
            virtual_s=self._policy.virtual_s,
            kv=self._engine.stats(),
            max_active=self._max_active,
            max_active_reason=self._max_active_reason,
            step_limits=self._limits.step,
            promote_batch_after_s=self._policy.promote_batch_after_s,
            step_model=self._step_model,
            measured_s=self._measured_s,
            progress_s=self._progress_s,
        )

    def _refit(self, now_s: float) -> None:
        self._step_model, self._fitted_s, self._measured_s = self._fit.fit(), now_s, self._fit.newest_s
        if self._concurrency is None:
            return
        contexts = [request.computed_tokens for request in self._active]
        mean = sum(contexts) / len(contexts) if contexts else START_CONTEXT_TOKENS
        choice = self._concurrency.update(self._step_model, mean, now_s)
        # A smaller batch ends nobody: those that run go on, and fewer are admitted.
        self._structure += choice.max_active != self._max_active
        self._max_active, self._max_active_reason = min(choice.max_active, self._limits.max_active), choice.reason

    def _admit(self) -> None:
        while len(self._active) < self._max_active and (request := self._next()) is not None:
            admission = self._engine.admit(
                request.tokens,
                request.remaining_decode_tokens,
                request.sampling,
                ignore_eos=request.ignore_eos,
                generated=request.resumed_tokens,
                cache_salt=request.cache_salt,
            )
            if admission is None:  # nobody overtakes who waits for room, or it might wait forever
                return
            self._waiting.remove(request.id, admitted=True)
            request.admit(admission, self._clock())
            self._active.append(request)
            self._changed(structure=True)

    def _next(self) -> Request | None:
        """The first in line that need not wait for a prefix in flight."""
        if not self._waiting:
            return None
        now_s = self._clock()
        for request in islice(self._waiting, LOOK_AHEAD):
            held = self._single_flight.holds(request, self._active, now_s)
            self._waiting.renew(request)  # it may count on a prefix now
            if not held:
                return request
        return None

    def _shape(self, slices: Sequence[Slice], result: StepResult) -> StepShape:
        """Of each of the steps that this was. Called before the result is booked. A guessed row is sampled too."""
        by_handle = {request.handle: request for request in self._active}
        work = []
        for piece in slices:
            request = by_handle[piece.handle]
            guesses = result.guesses.get(piece.handle, 0)
            work.append((piece.tokens + guesses, request.computed_tokens, guesses + (piece.handle in result.tokens)))
        shape = StepShape.of(work)
        gained = (result.steps - 1) / 2  # tokens that each row has more in the middle of a leap
        return replace(shape, attended=shape.attended + gained * shape.tokens) if gained else shape

    def _fail_active(self, fault: EngineFailed) -> list[Event]:
        events: list[Event] = [Failed(request.id, fault) for request in self._active]
        self._active.clear()  # the engine has released them all
        self._changed(structure=True)
        return events

    def _leave(self, request: Request) -> None:
        self._engine.release(request.handle, retain=True)
        self._active.remove(request)
        self._changed(structure=True)

    def _changed(self, *, structure: bool = False) -> None:
        self._sequence += 1
        self._structure += structure
