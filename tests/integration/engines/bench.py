"""A real scheduler over one engine, watched from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from backend_service.engines.base import Engine, Slice, StepResult
from backend_service.request import Ended, Event, FinishReason, Phase, Progress, Request
from backend_service.scheduler import Scheduler, SchedulerLimits
from backend_service.step_plan import StepLimits
from backend_service.text import TextStream
from service_kit.requests import Sampling

STEP_TOKENS = 32
"""Prompts of the tests are longer, so they are computed in chunks."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request."""

    tokens: tuple[int, ...]
    text: str
    reason: FinishReason
    cached_tokens: int
    events: tuple[Event, ...]


class WatchedEngine:
    """Passes everything on, keeps the steps, and checks the books and the promise of capacity after each."""

    def __init__(self, engine: Engine) -> None:
        self.inner = engine
        self.info = engine.info
        self.prepare, self.probe, self.admit = engine.prepare, engine.probe, engine.admit
        self.stats = engine.stats
        self.steps: list[list[Slice]] = []

    def step(self, slices: Sequence[Slice]) -> StepResult:
        self.steps.append(list(slices))
        result = self.inner.step(slices)
        self.check()
        return result

    def release(self, handle: int, *, retain: bool) -> None:
        self.inner.release(handle, retain=retain)
        self.check()

    def check(self) -> None:
        self.inner.check_integrity()
        use = self.stats()
        assert use.used_tokens + use.reserved_tokens <= use.capacity_tokens, "more promised than there is"
        assert 0 <= use.retained_tokens <= use.used_tokens

    @property
    def computed_tokens(self) -> int:
        """Known tokens computed so far, over all requests."""
        return sum(piece.tokens for step in self.steps for piece in step)


@dataclass
class Bench:
    """Submit requests, tick, look at what happened."""

    inner: Engine
    max_active: int = 4
    step_tokens: int = STEP_TOKENS
    events: list[Event] = field(default_factory=list)
    ticks: int = 0

    def __post_init__(self) -> None:
        self.engine = WatchedEngine(self.inner)
        self.limits = SchedulerLimits(self.max_active, StepLimits(self.step_tokens))
        self.scheduler = Scheduler(self.engine, self.limits)
        self._submitted = 0

    def submit(
        self,
        tokens: Sequence[int],
        max_new_tokens: int = 8,
        *,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = True,
        resumed_tokens: int = 0,
        cache_salt: str = "",
    ) -> str:
        """The name of the new request. The last `resumed_tokens` of its tokens are the beginning of its answer."""
        self._submitted += 1
        name = f"request-{self._submitted}"
        vocabulary = self.engine.info.vocabulary
        self.scheduler.submit(
            Request(
                id=name,
                tokens=tokens,
                max_new_tokens=max_new_tokens,
                sampling=sampling or Sampling(),
                ignore_eos=ignore_eos,
                text=TextStream(vocabulary.pieces, stop),
                eos=vocabulary.eos,
                reusable_estimate=0,
                submitted_s=0.0,
                resumed_tokens=resumed_tokens,
                cache_salt=cache_salt,
            )
        )
        return name

    def tick(self) -> None:
        steps = len(self.engine.steps)
        self.events += self.scheduler.tick()
        self.ticks += 1
        assert len(self.engine.steps) > steps or not self.scheduler.busy, "requests wait and nothing runs"

    def run(self, until: Callable[[], bool] | None = None) -> Bench:
        """Tick until nothing is left to do, or until a condition holds, which it must before that."""
        while self.scheduler.busy:
            if until is not None and until():
                return self
            self.tick()
        assert until is None or until(), "everything ended before the condition held"
        self.engine.check()
        return self

    def cancel(self, name: str) -> None:
        self.scheduler.cancel(name)

    def ask(self, tokens: Sequence[int], max_new_tokens: int = 8, **options: object) -> Answer:
        """The answer to one request, with whatever else is there run to its end."""
        name = self.submit(tokens, max_new_tokens, **options)
        return self.run().answer(name)

    def tokens(self, name: str) -> tuple[int, ...]:
        """What a request has generated so far."""
        return tuple(token for event in self._progress(name) for token in event.token_ids)

    def text(self, name: str) -> str:
        return "".join(event.text for event in self._progress(name))

    def answer(self, name: str) -> Answer:
        (end,) = (event for event in self.events if isinstance(event, Ended) and event.request_id == name)
        mine = tuple(event for event in self.events if event.request_id == name)
        assert mine[-1] is end, "something came after the end"
        return Answer(self.tokens(name), self.text(name), end.reason, end.cached_tokens, mine)

    def phase(self, name: str) -> Phase | None:
        """None for a request that is not there (any more)."""
        return next((view.phase for view in self.scheduler.snapshot().requests if view.id == name), None)

    def computed(self, name: str) -> int:
        """Tokens of a request in the KV cache, shared ones included."""
        return next(view.context_tokens for view in self.scheduler.snapshot().requests if view.id == name)

    def _progress(self, name: str) -> list[Progress]:
        return [event for event in self.events if isinstance(event, Progress) and event.request_id == name]
