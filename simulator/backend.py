"""One backend in virtual time: the real scheduler, cache and step model over the simulated engine.

Everything happens at the end of a step, as in the real backend: requests join then, and a Status is published then.
A batch that only decodes is not played token by token: its steps are planned ahead up to the first that may end a
request, and carried out, on the real scheduler, when they are over or when somebody looks. What arrives in between cuts
the plan at the end of the step that runs then. So the outcome is the same to the last digit.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from backend_service.concurrency import Concurrency
from backend_service.engines.base import Slice
from backend_service.engines.simulated import SimulatedEngine
from backend_service.kv_pool import PoolLimits
from backend_service.request import Event, Progress, Request
from backend_service.scheduler import Scheduler, SchedulerLimits, Snapshot
from backend_service.scheduling.registry import make_policy
from backend_service.status import to_proto
from backend_service.step_model import StepTimes
from backend_service.step_plan import StepLimits
from phaseroute.v1 import inference_pb2 as pb
from service_kit.requests import Sampling
from simulator.clock import VirtualClock
from simulator.profiles import Profile

HEARTBEAT_S = 1.0
"""As a real backend publishes when there is no news."""
NEVER_S = math.inf
_ANY = 1 << 30


@dataclass(frozen=True, slots=True)
class Published:
    """A Status, and when it was sent."""

    status: pb.BackendStatus
    at_s: float


@dataclass(frozen=True, slots=True)
class BackendRules:
    """How backends are played."""

    leaps: bool = True
    """Plan decode ahead; only where step times are known, since a fit wants to see every step."""
    progress_interval_s: float | None = 0.05
    """Between Statuses that only show generated tokens; None: such news waits for the heartbeat."""
    keep_token_times: bool = False


@dataclass(slots=True)
class _Process:
    """What a failure ends."""

    engine: SimulatedEngine
    scheduler: Scheduler
    shown: Snapshot
    """As published last."""
    latest: Snapshot
    """As of the end of the last step."""
    inbox: list[Request | str] = field(default_factory=list)
    """Requests to take in at the end of the step, and ids of requests to cancel."""
    here: set[str] = field(default_factory=set)
    """Ids of the requests in the scheduler."""


class VirtualBackend:
    """Times are passed in and never fall. Whoever drives it calls `wake` at `wakes_s`, before anything else that
    happens at that moment."""

    def __init__(
        self,
        name: str,
        profile: Profile,
        *,
        rules: BackendRules,
        make_times: Callable[[], StepTimes],
        answer_tokens: Callable[[Sequence[int]], int | None] | None = None,
    ) -> None:
        self.name = name
        self.wakes_s = NEVER_S
        """When the running step, or the planned run of steps, ends."""
        self._profile = profile
        self._rules = rules
        self._make_times = make_times
        self._answer_tokens = answer_tokens
        self._clock = VirtualClock()
        self._slowdown = 1.0
        self._processes = 0
        self._published_s = 0.0
        self._published: Published | None = None
        self._ends_s: list[float] = []
        """Of the planned decode steps that are not carried out yet; empty while a single step runs, which is."""
        self._begun_s = 0.0
        """When the first of them begins."""
        self._to_the_end = False
        """The last of them ends a request."""
        self._structure = 0
        """Of the schedule when the running step began."""
        self._stuck = False
        """The last step changed nothing but tokens: who could not be admitted before it cannot now."""
        self._events: list[Event] = []
        """Of what is carried out, to be told when the step is over."""
        self._token_times_s: dict[str, list[float]] = {}
        self._listener: Callable[[str], None] = lambda name: None
        self._process: _Process | None = None
        self.come_back(0.0)

    # -- what the router sees --------------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """A process is running."""
        return self._process is not None

    @property
    def context_tokens(self) -> int:
        """The largest prompt + new tokens that it takes."""
        return self._profile.kv_tokens

    def on_news(self, listener: Callable[[str], None]) -> None:
        """Call this with the backend's name when a Status tells more than progress, and when it fails."""
        self._listener = listener

    def status(self, now_s: float) -> Published | None:
        """The last Status; the same object until the next. None while it is down."""
        process = self._process
        if process is None:
            return None
        self._publish_until(now_s)
        if self._published is None:
            self._published = Published(self._status(process), self._published_s)
        return self._published

    def probe(self, tokens: Sequence[int]) -> int:
        """Leading tokens that it need not compute; 0 while it is down."""
        return self._process.engine.probe(tokens) if self._process else 0

    # -- what happens to it ----------------------------------------------------------------------------------------

    def warm(self, tokens: Sequence[int]) -> None:
        """Put a prompt into the cache, at no cost of time. Raises `ValueError` when there is no room."""
        engine = self._running.engine
        admission = engine.admit(tokens, 1, Sampling(), ignore_eos=True)
        if admission is None:
            raise ValueError(
                f"a prefix of {len(tokens)} tokens does not fit the KV cache of {self.name}, "
                f"{self._profile.kv_tokens} tokens; give it more, or warm up less"
            )
        now_s = self._clock.now_s
        engine.step([Slice(admission.handle, len(tokens) - admission.reused_tokens)])
        engine.release(admission.handle, retain=True)
        self._clock.now_s = now_s
        self._running.latest = self._running.scheduler.snapshot()
        self._show(self._running.latest, now_s)

    def join(self, request: Request, now_s: float) -> None:
        """A request arrives; it joins the line at the end of the running step. Raises `ValueError` for one that could
        never be admitted."""
        worst_tokens = len(request.tokens) + request.max_new_tokens
        if worst_tokens > self.context_tokens:
            raise ValueError(f"{worst_tokens} tokens at worst are over the context of {self.name}; send it elsewhere")
        self._order(request, now_s)

    def cancel(self, request_id: str, now_s: float) -> None:
        """Forget a request, at the end of the running step."""
        self._order(request_id, now_s)

    def slow_down(self, factor: float, now_s: float) -> None:
        """From the next step on, each takes `factor` times as long as it would."""
        self._slowdown = factor
        if self._process is not None:
            self._cut(now_s)

    def fail(self, now_s: float) -> None:
        """Everything here is gone, and nothing more is heard."""
        self._process = None
        self._published = None
        self._events = []
        self._ends_s = []
        self._token_times_s.clear()
        self.wakes_s = NEVER_S
        self._listener(self.name)

    def come_back(self, now_s: float) -> None:
        """A new process, with an empty cache; nothing happens where one is running."""
        if self._process is not None:
            return
        profile = self._profile
        self._clock.now_s = now_s
        engine = SimulatedEngine(
            profile.speed,
            PoolLimits(profile.kv_tokens, max_live=profile.max_active, retained_tokens=profile.kv_tokens),
            max_step_tokens=profile.step_tokens,
            sleep=self._clock.sleep,
            answer_tokens=self._answer_tokens,
        )
        scheduler = Scheduler(
            engine,
            SchedulerLimits(profile.max_active, StepLimits(profile.step_tokens, profile.step_target_s)),
            clock=self._clock,
            fit=self._make_times(),
            policy=make_policy(
                profile.scheduling,
                prefill_tokens_per_s=profile.speed.rates().prefill_tokens_per_s,
                decode_tokens_per_s=profile.speed.rates().decode_tokens_per_s,
            ),
            concurrency=Concurrency(profile.max_active) if profile.max_active_auto else None,
        )
        snapshot = scheduler.snapshot()
        self._process = _Process(engine, scheduler, snapshot, snapshot)
        self._processes += 1
        self._show(snapshot, now_s)

    def wake(self) -> list[Event]:
        """The running step is over: what it brought, but for tokens of steps that were planned ahead, none of which is
        a first one. The next step begins."""
        now_s, process = self.wakes_s, self._running
        if self._ends_s:
            if not (self._to_the_end or process.inbox):  # else it ends with news that are told at once
                self._publish_until(now_s)
            self._carry_out(len(self._ends_s))
        else:
            self._publish_until(now_s)
        events, self._events = self._events, []
        for event in events:
            if not isinstance(event, Progress):
                process.here.remove(event.request_id)
        self._between_steps(now_s)
        return events

    def token_times_s(self, request_id: str) -> list[float]:
        """When each token of an ended request came, where that is kept."""
        return self._token_times_s.pop(request_id, [])

    # -- steps -----------------------------------------------------------------------------------------------------

    @property
    def _running(self) -> _Process:
        if self._process is None:
            raise RuntimeError(f"{self.name} is down; nothing can be asked of it")
        return self._process

    def _order(self, order: Request | str, now_s: float) -> None:
        self._running.inbox.append(order)
        if self.wakes_s == NEVER_S:
            self._between_steps(now_s)
        else:
            self._cut(now_s)

    def _cut(self, now_s: float) -> None:
        """Keep only the step that is running of those planned ahead."""
        if self._ends_s:
            running = bisect_right(self._ends_s, now_s)
            if running + 1 < len(self._ends_s):
                del self._ends_s[running + 1 :]
                self._to_the_end = False
                self.wakes_s = self._ends_s[-1]

    def _between_steps(self, now_s: float) -> None:
        process = self._running
        scheduler = process.scheduler
        self._clock.now_s = now_s
        for order in process.inbox:
            if isinstance(order, Request):
                scheduler.submit(order)
                process.here.add(order.id)
            else:
                scheduler.cancel(order)
                process.here.discard(order)
                self._token_times_s.pop(order, None)
        process.inbox.clear()
        process.latest = scheduler.snapshot()
        self._stuck = process.latest.structure == self._structure
        self._structure = process.latest.structure
        if process.latest.structure != process.shown.structure or (
            self._rules.progress_interval_s is not None
            and now_s >= self._published_s + self._rules.progress_interval_s
            and process.latest.sequence != process.shown.sequence
        ):
            self._show(process.latest, now_s)
        self._begin_step(now_s)

    def _begin_step(self, now_s: float) -> None:
        process = self._running
        engine = process.engine
        engine.slowdown = self._slowdown
        if not process.here:
            self.wakes_s = NEVER_S
            return
        if self._nobody_can_join(process):
            leaps = self._rules.leaps and not self._profile.max_active_auto
            durations_s = engine.decode_ahead(_ANY if leaps else 1)
            if durations_s:
                # Summed up as the clock does it, to the same last digit.
                self._ends_s = list(accumulate(durations_s, initial=now_s))[1:]
                self._begun_s = now_s
                self._to_the_end = leaps
                self.wakes_s = self._ends_s[-1]
                return
        self._events = process.scheduler.tick()
        self.wakes_s = self._clock.now_s
        if self._rules.keep_token_times:
            self._note_times(self._events, [self.wakes_s])

    def _nobody_can_join(self, process: _Process) -> bool:
        """The next step admits nobody, and neither do those after it that only decode."""
        live = process.engine.live
        if len(process.here) == live:
            return True
        # A batch size that is chosen anew may let somebody in after any step.
        return not self._profile.max_active_auto and (self._stuck or live == self._profile.max_active)

    def _carry_out(self, steps: int) -> None:
        """The first of the planned steps, on the real scheduler."""
        if not steps:
            return
        process = self._running
        self._clock.now_s = self._begun_s
        process.engine.leap = steps
        events = process.scheduler.tick()
        self._begun_s = self._clock.now_s
        assert self._begun_s == self._ends_s[steps - 1], "the steps did not go as planned"
        if self._rules.keep_token_times:
            self._note_times(events, self._ends_s[:steps])
        del self._ends_s[:steps]
        self._events += [event for event in events if not isinstance(event, Progress)]

    def _note_times(self, events: Sequence[Event], ends_s: Sequence[float]) -> None:
        counts: dict[str, int] = {}
        for event in events:
            if isinstance(event, Progress) and event.token_ids:
                nth = counts.get(event.request_id, 0)
                counts[event.request_id] = nth + 1
                self._token_times_s.setdefault(event.request_id, []).append(ends_s[nth])

    # -- Status ----------------------------------------------------------------------------------------------------

    def _publish_until(self, now_s: float) -> None:
        """Catch up with heartbeats and with news of progress."""
        process, interval_s = self._running, self._rules.progress_interval_s
        at_s = self._published_s
        while True:
            next_s = at_s + HEARTBEAT_S
            if interval_s is not None and self._ends_s:
                place = bisect_left(self._ends_s, at_s + interval_s)
                if place < len(self._ends_s):
                    next_s = min(next_s, self._ends_s[place])
            if next_s > now_s:
                break
            at_s = next_s
        if at_s == self._published_s:
            return
        over = bisect_right(self._ends_s, at_s)
        if over:
            self._carry_out(over)
            process.latest = process.scheduler.snapshot()
        self._show(process.latest, at_s)

    def _show(self, snapshot: Snapshot, now_s: float) -> None:
        if snapshot.structure != self._running.shown.structure or snapshot.sequence == 0:
            self._listener(self.name)
        self._running.shown = snapshot
        self._published_s = now_s
        self._published = None

    def _status(self, process: _Process) -> pb.BackendStatus:
        return to_proto(
            process.shown,
            incarnation=f"{self.name} {self._processes}",
            sequence=process.shown.sequence,
            info=process.engine.info,
            rates=self._profile.speed.rates(),
            max_queued=0,
            draining=False,
            now_s=self._published_s,
        )
