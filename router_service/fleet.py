"""Who is there: every configured backend with its channel, its latest Status and its state."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import NoReturn, Self

import structlog

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from router_service.backend import Backend, State, as_candidate
from router_service.breaker import Breaker, BreakerLimits, BreakerState, BreakerView
from router_service.decision import NO_OUTLOOK, Candidate, Outlook
from router_service.feed import Feed
from router_service.follower import Follower, Following
from router_service.ledger import Lease, Ledger
from router_service.likeness import Differences, tokenizer_in_use, why_left_out
from router_service.losses import Losses
from router_service.snapshot import BadStatus, Snapshot
from router_service.stall import STALL_S, why_stalled
from service_kit.channels import open_channel
from service_kit.errors import UpstreamFailed
from service_kit.faults import InvalidRequest, UnknownName
from service_kit.peer_channel import PeerSecurity

MAX_DRAIN_GRACE_S = 7 * 24 * 3600.0

log = structlog.get_logger(__name__)


class Fleet:
    """Used as an async context manager: inside it, every backend is followed. A backend that cannot be reached delays
    nothing and nobody."""

    def __init__(
        self,
        targets: Mapping[str, str],
        ledger: Ledger,
        *,
        security: PeerSecurity | None = None,
        following: Following | None = None,
        breaker: BreakerLimits | None = None,
        stall_s: float = STALL_S,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`targets`: gRPC target by backend name. `stall_s`: see `stall.why_stalled`. Call it on the running event
        loop. Raises `StartupFailed` for files of `security` that cannot be used."""
        self._rng = rng or random.Random()
        self._channels = {name: open_channel(target, security) for name, target in targets.items()}
        self.backends: Mapping[str, Backend] = {
            name: Backend(
                name,
                targets[name],
                pb_grpc.InferenceServiceStub(channel),  # type: ignore[no-untyped-call]
                Breaker(breaker or BreakerLimits(), self._rng),
            )
            for name, channel in self._channels.items()
        }
        self.changes: Feed[None] = Feed(limit=1)
        """A Status came, a state changed, or something was booked or released."""
        self._ledger = ledger
        self._following = following or Following()
        self._stall_s = stall_s
        self._clock = clock
        self._losses = Losses()
        self._drain_timers: dict[str, asyncio.TimerHandle] = {}
        self._followers: list[asyncio.Task[NoReturn]] = []
        self._differences = Differences()

    async def __aenter__(self) -> Self:
        for backend in self.backends.values():
            follower = Follower(
                backend,
                self._channels[backend.name],
                self._following,
                on_status=self._on_status,
                on_loss=self._on_loss,
                rng=self._rng,
            )
            task = asyncio.create_task(follower.run(), name=f"follow {backend.name}")
            task.add_done_callback(partial(self._on_follower_end, backend))
            self._followers.append(task)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._followers:
            task.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)
        for timer in self._drain_timers.values():
            timer.cancel()
        self._losses.tell_all("This router is stopping")
        for channel in self._channels.values():
            await channel.close()

    @property
    def routable(self) -> bool:
        """Some backend takes work."""
        return any(backend.state is State.SERVING for backend in self.backends.values())

    @property
    def in_use(self) -> Sequence[Backend]:
        """Those that requests go to: serving, with a breaker that is not open, unless it is open on all of them."""
        now_s = self._clock()
        serving = [backend for backend in self.backends.values() if backend.state is State.SERVING]
        return [each for each in serving if each.breaker.state(now_s) is not BreakerState.OPEN] or serving

    def drain(self, name: str, *, undo: bool, grace_s: float | None = None) -> Backend:
        """Give a backend no new work, or take that back. What still runs there after `grace_s` is given up; None: it
        runs to its end. The last call counts. Raises `UnknownName`, and `InvalidRequest` for a time that is none."""
        if name not in self.backends:
            raise UnknownName(f"No backend is called {name!r}; there are {', '.join(sorted(self.backends))}.")
        if grace_s is not None and not 0 <= grace_s <= MAX_DRAIN_GRACE_S:
            raise InvalidRequest("grace_s", f"is {grace_s:g}; give seconds from 0 to {MAX_DRAIN_GRACE_S:g}, or none")
        backend = self.backends[name]
        before = backend.state
        if timer := self._drain_timers.pop(name, None):
            timer.cancel()
        backend.drained = not undo
        backend.drain_over = ""
        if grace_s is not None and not undo:
            loop = asyncio.get_running_loop()
            self._drain_timers[name] = loop.call_later(grace_s, self._on_drain_over, backend, grace_s)
        self._changed(backend, before)
        return backend

    async def until_lost(self, name: str, incarnation: str) -> str:
        """Why attempts on that process of a backend are to be given up, as a sentence without a full stop; returns
        when they are: its Status is lost or silent, it makes no progress, another process is there, or the grace of its
        drain is over. Cancel it when the attempt is over."""
        return await self._losses.wait(self.backends[name], incarnation)

    def breaker(self, backend: Backend) -> BreakerView:
        """The backend's breaker now."""
        return backend.breaker.view(self._clock())

    def booked(self, lease: Lease) -> None:
        """A request is about to go there."""
        self.backends[lease.backend].breaker.booked(lease.attempt_id, self._clock())
        self.changes.publish(None)

    def released(self, lease: Lease, *, answered: bool) -> None:
        """An attempt is over. `answered`: in full."""
        backend = self.backends[lease.backend]
        with self._breaker_changes(backend):
            if answered and self._is_there(backend, lease.incarnation):
                backend.breaker.answered()
            backend.breaker.over(lease.attempt_id)
        self.changes.publish(None)

    def attempt_over(self, name: str, incarnation: str, failure: UpstreamFailed | None) -> None:
        """An attempt that reached that process of a backend is over; None: with nothing to hold against it. What is
        the client's or the request's fault counts for nothing, and so does what a draining backend breaks off."""
        backend = self.backends[name]
        if failure is None or not self._is_there(backend, incarnation) or backend.state is State.DRAINING:
            return
        with self._breaker_changes(backend):
            backend.breaker.failed(failure.code.name, self._clock())
        self.changes.publish(None)

    def candidate(self, name: str, snapshot: Snapshot, prompt_tokens: int, outlook: Outlook = NO_OUTLOOK) -> Candidate:
        """A backend with its bookings, before it was asked for its prefix."""
        return as_candidate(
            name,
            snapshot,
            self._ledger.pending(name),
            last_turn=self._ledger.last_turn(name),
            status_age_s=self.status_age_s(self.backends[name]),
            prompt_tokens=prompt_tokens,
            outlook=outlook,
        )

    def bookings(self, name: str) -> Iterator[Lease]:
        """What its last Status does not show."""
        return self._ledger.unseen(name)

    def status_age_s(self, backend: Backend) -> float:
        """Seconds since the backend's last Status."""
        return backend.status_age_s(self._clock())

    def left_out(self, backend: Backend) -> str:
        """Why only pinned requests go to a serving backend; empty when others do, or it does not serve."""
        if backend.snapshot is None or backend.state is not State.SERVING:
            return ""
        return why_left_out(backend.snapshot, tokenizer_in_use(self.backends.values(), backend.snapshot.model))

    def _on_status(self, backend: Backend, status: pb.BackendStatus) -> None:
        before = backend.state
        try:
            snapshot = Snapshot.of(status)
        except BadStatus as bad:
            self._on_loss(backend, str(bad), False)
            return
        # Status comes every second, so how old it is makes no difference here.
        with self._breaker_changes(backend):
            heard = backend.hear(snapshot, self._clock(), stalled=why_stalled(snapshot, self._stall_s))
            if backend.breaker.trial is not None and snapshot.answers(backend.breaker.trial):
                backend.breaker.answered()
        if heard:
            self._ledger.on_status(backend.name, snapshot.incarnation, snapshot.attempt_ids)
            self._differences.tell(self.backends.values(), snapshot.model)
            self._changed(backend, before)

    def _on_loss(self, backend: Backend, problem: str, gone: bool) -> None:
        before = backend.state
        backend.lose(problem, gone=gone)
        self._changed(backend, before)

    def _on_drain_over(self, backend: Backend, grace_s: float) -> None:
        backend.drain_over = f"Backend {backend.name} is drained, and its grace of {grace_s:g} s is over"
        log.info("drain grace over", backend=backend.name, grace_s=grace_s)
        self._changed(backend, backend.state)

    def _on_follower_end(self, backend: Backend, task: asyncio.Task[NoReturn]) -> None:
        """A backend that nobody follows must not go on as serving."""
        if not task.cancelled():
            log.error("no longer followed", backend=backend.name, exc_info=task.exception())
            self._on_loss(backend, "following it failed, see this router's log; restart the router", False)

    def _changed(self, backend: Backend, before: State) -> None:
        if backend.state is not before:
            log.info("backend", backend=backend.name, state=backend.state.value, detail=backend.detail)
        self._losses.tell(backend)
        self.changes.publish(None)

    @staticmethod
    def _is_there(backend: Backend, incarnation: str) -> bool:
        return backend.snapshot is not None and backend.snapshot.incarnation == incarnation

    @contextmanager
    def _breaker_changes(self, backend: Backend) -> Iterator[None]:
        """Log what becomes of its breaker."""
        before = self.breaker(backend).state
        yield
        after = self.breaker(backend)
        if after.state is not before:
            tell = log.info if after.state is BreakerState.CLOSED else log.warning
            tell(
                "breaker",
                backend=backend.name,
                state=after.state.value,
                failures=after.failures,
                retry_in_s=round(after.retry_in_s, 3),
            )
