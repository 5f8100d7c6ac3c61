"""Who is there: every configured backend with its channel, its latest Status and its state."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import NoReturn, Self

import structlog

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from router_service.backend import Backend, State, as_candidate
from router_service.decision import NO_OUTLOOK, Candidate, Outlook
from router_service.feed import Feed
from router_service.follower import Follower, Following
from router_service.ledger import Lease, Ledger
from router_service.likeness import Likeness, tokenizer_in_use, why_left_out
from router_service.snapshot import BadStatus, Snapshot
from service_kit.channels import open_channel
from service_kit.faults import UnknownName

log = structlog.get_logger(__name__)


class Fleet:
    """Used as an async context manager: inside it, every backend is followed. A backend that cannot be reached delays
    nothing and nobody."""

    def __init__(
        self,
        targets: Mapping[str, str],
        ledger: Ledger,
        *,
        following: Following | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`targets`: gRPC target by backend name. Call it on the running event loop."""
        self._channels = {name: open_channel(target) for name, target in targets.items()}
        self.backends: Mapping[str, Backend] = {
            name: Backend(name, targets[name], pb_grpc.InferenceServiceStub(channel))  # type: ignore[no-untyped-call]
            for name, channel in self._channels.items()
        }
        self.changes: Feed[None] = Feed(limit=1)
        """A Status came, a state changed, or something was booked or released."""
        self._ledger = ledger
        self._following = following or Following()
        self._rng = rng or random.Random()
        self._clock = clock
        self._followers: list[asyncio.Task[NoReturn]] = []
        self._likeness: dict[str, Likeness] = {}

    async def __aenter__(self) -> Self:
        for backend in self.backends.values():
            follower = Follower(
                backend, self._following, on_status=self._on_status, on_loss=self._on_loss, rng=self._rng
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
        for channel in self._channels.values():
            await channel.close()

    @property
    def routable(self) -> bool:
        """Some backend takes work."""
        return any(backend.state is State.SERVING for backend in self.backends.values())

    def drain(self, name: str, *, undo: bool) -> Backend:
        """Give a backend no new work, or take that back. Raises `UnknownName`."""
        if name not in self.backends:
            raise UnknownName(f"No backend is called {name!r}; there are {', '.join(sorted(self.backends))}.")
        backend = self.backends[name]
        before = backend.state
        backend.drained = not undo
        self._changed(backend, before)
        return backend

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
            self._on_loss(backend, str(bad))
            return
        if backend.hear(snapshot, self._clock()):
            self._ledger.on_status(backend.name, snapshot.incarnation, snapshot.attempt_ids)
            self._tell_differences(snapshot.model)
            self._changed(backend, before)

    def _on_loss(self, backend: Backend, problem: str) -> None:
        before = backend.state
        backend.lose(problem)
        self._changed(backend, before)

    def _on_follower_end(self, backend: Backend, task: asyncio.Task[NoReturn]) -> None:
        """A backend that nobody follows must not go on as serving."""
        if not task.cancelled():
            log.error("no longer followed", backend=backend.name, exc_info=task.exception())
            self._on_loss(backend, "following it failed, see this router's log; restart the router")

    def _changed(self, backend: Backend, before: State) -> None:
        if backend.state is not before:
            log.info("backend", backend=backend.name, state=backend.state.value, detail=backend.detail)
        self.changes.publish(None)

    def _tell_differences(self, model: str) -> None:
        """Log what differs under one model name, again whenever that changes."""
        in_use = tokenizer_in_use(self.backends.values(), model)
        if in_use is None:
            return
        likeness = Likeness.of(self.backends.values(), model, in_use)
        if likeness == self._likeness.get(model):
            return
        self._likeness[model] = likeness
        if not likeness.one_tokenizer:
            log.warning(
                "one model name, different tokenizers: only the backends in use get work that is not pinned",
                model=model,
                tokenizers=likeness.tokenizers,
                used=likeness.used,
            )
        if not (likeness.one_origin and likeness.one_precision):
            # Precisions differ on purpose, as on unlike devices; other weights give other answers.
            tell = log.info if likeness.one_origin else log.warning
            tell(
                "one model name, different weights or precisions: taken as interchangeable unless a request demands a "
                "precision",
                model=model,
                fingerprints=likeness.fingerprints,
                precisions=likeness.precisions,
            )
