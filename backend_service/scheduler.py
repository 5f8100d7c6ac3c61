"""Continuous batching: admit, step, publish. Knows no engine, no thread, no wire.

Every step computes one token for each decoding request and then a fair share of a token budget for each request in
prefill, so a long prompt never stalls the streams beside it for more than one budget.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backend_service.engines.base import Engine, KvUse, Slice
from backend_service.request import Event, Failed, Phase, Request
from backend_service.step_model import StepFit, StepModel, StepShape
from service_kit.faults import EngineFailed

REFIT_INTERVAL_S = 1.0
"""How often the step model is fitted anew while steps run: a fit takes milliseconds of the engine's own thread."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one backend takes on."""

    max_active: int = 4
    """Largest batch."""
    step_tokens: int = 256
    """Tokens computed in one step, decode rows included."""
    step_target_s: float | None = None
    """How long a step with prefill in it may take, by the fitted step model: the bound on how long a cancel waits and
    how long a prompt stalls the streams beside it. It only ever lowers `step_tokens`. None: no such bound."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as Status shows it."""

    id: str
    phase: Phase
    remaining_prefill_tokens: int
    remaining_decode_tokens: int
    generated_tokens: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything Status needs, taken between two steps."""

    sequence: int
    """Grows with every change."""
    structure: int
    """Grows when a request arrives, starts, changes phase or leaves: what a watcher wants to hear of at once."""
    requests: tuple[RequestView, ...]
    kv: KvUse
    step_model: StepModel | None
    progress_s: float
    """When the last step ended, or when there was nothing to do; on the scheduler's clock."""


class Scheduler:
    """Runs an engine step by step. All calls from one thread."""

    def __init__(
        self,
        engine: Engine,
        limits: SchedulerLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        fit: StepFit | None = None,
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._clock = clock
        self._fit = fit or StepFit()
        self._step_model = self._fit.fit()
        self._fitted_s = clock()
        self._queue: deque[Request] = deque()
        self._active: list[Request] = []
        self._rotation = 0
        self._sequence = 0
        self._structure = 0
        self._progress_s = clock()

    @property
    def busy(self) -> bool:
        """Something is queued or active, so `tick` has work."""
        return bool(self._queue or self._active)

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue. It must fit an empty engine: `prompt + max_new_tokens <= context`."""
        if not self.busy:
            self._progress_s = self._clock()
        self._queue.append(request)
        self._changed(structure=True)

    def cancel(self, request_id: str) -> None:
        """Forget a request, wherever it is; unknown ids are ignored. What it computed stays reusable."""
        for request in self._queue:
            if request.id == request_id:
                self._queue.remove(request)
                self._changed(structure=True)
                return
        for request in self._active:
            if request.id == request_id:
                self._leave(request)
                return

    def tick(self) -> list[Event]:
        """Admit what fits, run one step, and return what happened, in order."""
        self._admit()
        slices = self._compose()
        if not slices:
            return []
        shape = self._shape(slices)
        before_s = self._clock()
        try:
            sampled = self._engine.step(slices)
        except EngineFailed as fault:
            return self._fail_active(fault)
        now_s = self._progress_s = self._clock()
        self._fit.observe(shape, now_s - before_s)
        if now_s - self._fitted_s >= REFIT_INTERVAL_S:
            self._step_model, self._fitted_s = self._fit.fit(), now_s

        events: list[Event] = []
        tokens = {piece.handle: piece.tokens for piece in slices}
        for request in tuple(self._active):
            request.computed_tokens += tokens.get(request.handle, 0)
            if (token := sampled.get(request.handle)) is None:
                continue
            phase = request.phase
            events += request.accept(token, now_s)
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
            requests=tuple(_view(request) for request in (*self._active, *self._queue)),
            kv=self._engine.stats(),
            step_model=self._step_model,
            progress_s=self._progress_s,
        )

    def _admit(self) -> None:
        while self._queue and len(self._active) < self._limits.max_active:
            request = self._queue[0]
            admission = self._engine.admit(
                request.tokens, request.max_new_tokens, request.sampling, ignore_eos=request.ignore_eos
            )
            if admission is None:  # first in, first out: nobody overtakes the head while it waits for room
                return
            self._queue.popleft()
            request.admit(admission, self._clock())
            self._active.append(request)
            self._changed(structure=True)

    def _compose(self) -> list[Slice]:
        decoding = [request for request in self._active if request.phase is Phase.DECODE]
        prefilling = [request for request in self._active if request.phase is Phase.PREFILL]
        slices = [Slice(request.handle, 1) for request in decoding]
        if prefilling:
            self._rotation += 1
            first = self._rotation % len(prefilling)
            prefilling = prefilling[first:] + prefilling[:first]
            budget = self._prefill_budget(decoding, prefilling)
            shares = fair_shares([request.pending_tokens for request in prefilling], budget)
            slices += [Slice(request.handle, share) for request, share in zip(prefilling, shares, strict=True) if share]
        return slices

    def _prefill_budget(self, decoding: Sequence[Request], prefilling: Sequence[Request]) -> int:
        """Prompt tokens for this step: what `step_tokens` leaves, and what the time allows. A prompt token costs more
        the longer the context before it, so the budget shrinks as a long prompt proceeds."""
        budget = self._limits.step_tokens - len(decoding)
        model, target_s = self._step_model, self._limits.step_target_s
        if model is not None and target_s is not None:
            spent_s = model.seconds(StepShape.of((1, request.computed_tokens, True) for request in decoding))
            context = sum(request.computed_tokens for request in prefilling) / len(prefilling)
            token_s = model.per_token_s + model.per_attended_s * context
            if token_s > 0:
                budget = min(budget, int((target_s - spent_s) / token_s))
        return max(1, budget)

    def _shape(self, slices: Sequence[Slice]) -> StepShape:
        by_handle = {request.handle: request for request in self._active}
        work = ((piece.tokens, by_handle[piece.handle]) for piece in slices)
        return StepShape.of((new, request.computed_tokens, new == request.pending_tokens) for new, request in work)

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


def fair_shares(wanted: Sequence[int], budget: int) -> list[int]:
    """Split `budget` tokens over requests that want `wanted` each: equal shares, and what one does not need goes to
    the others; a remainder goes to the earlier ones."""
    shares = [0] * len(wanted)
    open_ = [index for index, want in enumerate(wanted) if want > 0]
    while open_ and budget > 0:
        open_.sort(key=shares.__getitem__)  # a remainder goes to who has least
        each, extra = divmod(budget, len(open_))
        for position, index in enumerate(open_):
            give = min(each + (position < extra), wanted[index] - shares[index])
            shares[index] += give
            budget -= give
        open_ = [index for index in open_ if shares[index] < wanted[index]]
    return shares


def _view(request: Request) -> RequestView:
    return RequestView(
        id=request.id,
        phase=request.phase,
        remaining_prefill_tokens=request.remaining_prefill_tokens,
        remaining_decode_tokens=request.remaining_decode_tokens,
        generated_tokens=request.generated_tokens,
        context_tokens=request.computed_tokens,
    )
