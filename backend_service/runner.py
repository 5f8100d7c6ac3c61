"""The engine's own thread, and the event loop's side of it.

The thread owns engine and scheduler; the loop talks to it through one inbox and hears back once a step. The loop never
waits for a step, and the thread never waits for the loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from backend_service.engines.base import Engine, EngineInfo
from backend_service.request import Event, Failed, Progress, Request
from backend_service.scheduler import Scheduler, Snapshot
from backend_service.step_model import IsolatedRates
from service_kit.faults import EngineFailed, Fault, InvalidRequest, Overloaded, Unavailable

_log = logging.getLogger(__name__)
_LOADING = "This backend is still loading its model; try again in a moment."
_STOPPED = "This backend is shutting down; send the request to another one."


@dataclass(frozen=True, slots=True)
class Assembly:
    """What the thread runs, built on the thread itself."""

    engine: Engine
    scheduler: Scheduler
    rates: IsolatedRates


@dataclass(frozen=True, slots=True)
class State:
    """A point in the backend's history, for those who wait for the next."""

    sequence: int
    """Grows with every change."""
    structure: int
    """Grows with changes other than generated tokens."""


class EventStream:
    """One request's events on the loop's side. Tokens that arrive while nobody reads are merged."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    def put(self, event: Event) -> None:
        """Add an event; never waits."""
        last = self._events[-1] if self._events else None
        if isinstance(event, Progress) and isinstance(last, Progress):
            self._events[-1] = Progress(event.request_id, last.text + event.text, last.token_ids + event.token_ids)
        else:
            self._events.append(event)
        self._arrived.set()

    async def get(self) -> Event:
        """The next event."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()


class Runner:
    """Starts the thread, hands requests over, and spreads what comes back. All methods on the event loop."""

    def __init__(
        self,
        build: Callable[[], Assembly],
        *,
        max_outstanding: int,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """`max_outstanding`: requests queued or active; more are refused. `on_death`: the thread broke."""
        self._build = build
        self._max_outstanding = max_outstanding
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[Callable[[Scheduler], None] | None] = SimpleQueue()
        self._streams: dict[str, EventStream] = {}
        self._ready: asyncio.Future[Assembly] = self._loop.create_future()
        self._changed: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._assembly: Assembly | None = None
        self._dead: EngineFailed | None = None
        self._draining = False
        self._snapshot: Snapshot | None = None

    async def start(self) -> EngineInfo:
        """Load the engine and measure it; returns when requests can be served. Raises what the build raised."""
        self._thread.start()
        self._assembly = await self._ready
        self._wake()
        return self._assembly.engine.info

    async def stop(self) -> None:
        """End the thread after its current step; requests still running fail as unavailable. A thread that is still
        loading is left to die with the process."""
        if self._assembly is None:
            return
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        self._fail_all(Unavailable(_STOPPED))

    @property
    def engine(self) -> Engine:
        """For its `info`, `prepare` and `probe`, which any thread may call. Raises `Unavailable` while it loads."""
        return self._built.engine

    @property
    def rates(self) -> IsolatedRates:
        """One request alone. Raises `Unavailable` while the engine loads."""
        return self._built.rates

    @property
    def snapshot(self) -> Snapshot:
        """The latest state. Raises `Unavailable` while the engine loads."""
        if self._snapshot is None:
            raise Unavailable(_LOADING)
        return self._snapshot

    @property
    def state(self) -> State:
        """Where the snapshot and `draining` are now."""
        told = int(self._draining)
        return State(self.snapshot.sequence + told, self.snapshot.structure + told)

    @property
    def draining(self) -> bool:
        """No new request is taken."""
        return self._draining

    def drain(self) -> None:
        """Take no new requests; those here go on."""
        self._draining = True
        self._wake()

    def submit(self, request: Request) -> EventStream:
        """Queue a request. Raises `Overloaded` when the queue is full, `Unavailable` while draining, `EngineFailed`
        after the engine died. The caller must call `cancel` when it is done with the stream, whatever happened."""
        if self._dead:
            raise self._dead
        if self._draining:
            raise Unavailable(_STOPPED)
        if len(self._streams) >= self._max_outstanding:
            raise Overloaded(
                f"All {self._max_outstanding} places here are taken; retry later or use another backend.",
                retry_after_s=self._drain_estimate_s(),
            )
        if request.id in self._streams:
            raise InvalidRequest("attempt.id", f'"{request.id}" is running here already; use a new id for each attempt')
        stream = self._streams[request.id] = EventStream()
        self._inbox.put(lambda scheduler: scheduler.submit(request))
        return stream

    def cancel(self, request_id: str) -> None:
        """Forget a request; harmless when it has ended."""
        if self._streams.pop(request_id, None):
            self._inbox.put(lambda scheduler: scheduler.cancel(request_id))

    async def changed(self, timeout_s: float) -> bool:
        """Wait for the next change of the snapshot or of `draining`; False when none came in time."""
        done, _ = await asyncio.wait((self._changed,), timeout=timeout_s)
        return bool(done)

    @property
    def _built(self) -> Assembly:
        if self._assembly is None:
            raise Unavailable(_LOADING)
        return self._assembly

    def _drain_estimate_s(self) -> float:
        """Until one of the requests here has used its decode budget, at the isolated rate: a floor, not a forecast."""
        shortest = min((view.remaining_decode_tokens for view in self.snapshot.requests), default=0)
        return max(0.1, shortest / self.rates.decode_tokens_per_s)

    # -- engine thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            assembly = self._build()
        except Exception as error:  # noqa: BLE001 - whatever it was, start() raises it
            self._post(self._ready.set_exception, error)
            return
        scheduler = assembly.scheduler
        self._post(self._deliver, [], scheduler.snapshot())
        self._post(self._ready.set_result, assembly)
        try:
            while self._take_orders(scheduler):
                events = scheduler.tick()
                self._post(self._deliver, events, scheduler.snapshot())
        except Exception:  # noqa: BLE001 - a bug or a broken engine: nothing here can be trusted any more
            _log.exception("the engine thread died")
            self._post(self._die)

    def _take_orders(self, scheduler: Scheduler) -> bool:
        """Carry out what the loop asked for; wait for it when there is nothing else to do. False: stop."""
        changed = False
        while True:
            try:
                order = self._inbox.get(block=not scheduler.busy)
            except Empty:
                break
            if order is None:
                return False
            order(scheduler)
            changed = True
            if not scheduler.busy:
                self._post(self._deliver, [], scheduler.snapshot())
        if changed:  # said now, not after the step that follows: a freed slot, a new request in the queue
            self._post(self._deliver, [], scheduler.snapshot())
        return True

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: the process is on its way out
            _log.debug("event loop closed before the engine thread ended")

    # -- event loop ---------------------------------------------------------------------------------------------

    def _deliver(self, events: list[Event], snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        for event in events:
            if stream := self._streams.get(event.request_id):
                stream.put(event)
                if not isinstance(event, Progress):
                    del self._streams[event.request_id]
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, self._loop.create_future()
        changed.set_result(None)

    def _die(self) -> None:
        self._dead = EngineFailed("The engine of this backend died; send the request to another one.")
        self._fail_all(self._dead)
        self._wake()
        self._on_death()

    def _fail_all(self, fault: Fault) -> None:
        for request_id, stream in self._streams.items():
            stream.put(Failed(request_id, fault))
        self._streams.clear()
