"""The engine's own thread, and the event loop's side of it.

The thread owns engine and scheduler; the loop talks to it through one inbox and hears back once a step. The loop never
waits for a step, and the thread never waits for the loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from backend_service.engines.base import Engine, EngineInfo
from backend_service.event_stream import EventStream, UnreadLimits
from backend_service.places import Place, Places, QueueLimits
from backend_service.request import Event, Failed, Progress, Request
from backend_service.scheduler import Scheduler, Snapshot
from backend_service.step_model import IsolatedRates
from backend_service.wait_time import full
from service_kit.faults import EngineFailed, Fault, InvalidRequest, Unavailable

_log = logging.getLogger(__name__)
_LOADING = "This backend is still loading its model; try again in a moment."
_STOPPED = "This backend is shutting down; send the request to another one."
LAST_STEP_S = 5.0
"""How long a step may take that runs when the thread is told to end; an engine that hangs is left behind."""


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


class Runner:
    """Starts the thread, hands requests over, and spreads what comes back. All methods on the event loop."""

    def __init__(
        self,
        build: Callable[[], Assembly],
        limits: QueueLimits,
        unread: UnreadLimits | None = None,
        *,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """`limits`: what may be here; more is refused. `on_death`: the thread broke."""
        self._build = build
        self._limits = limits
        self._places = Places(limits)
        self._unread = unread or UnreadLimits()
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
        info = self._assembly.engine.info
        self._limits = self._limits.known(info.context_tokens)
        self._places = Places(self._limits)
        self._wake()
        return info

    async def stop(self) -> None:
        """Requests still running fail as unavailable, and the thread ends after its current step. One that still loads,
        or hangs in a step, is left to die with the process."""
        if self._assembly is None:
            return
        self._fail_all(Unavailable(_STOPPED))
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, LAST_STEP_S)
        if self._thread.is_alive():
            _log.warning("the engine did not end its step within %g s; it is left behind", LAST_STEP_S)

    @property
    def engine(self) -> Engine:
        """For its `info`, `prepare` and `probe`, which any thread may call. Raises `Unavailable` while it loads."""
        return self._built.engine

    @property
    def rates(self) -> IsolatedRates:
        """One request alone. Raises `Unavailable` while the engine loads."""
        return self._built.rates

    @property
    def limits(self) -> QueueLimits:
        """What may wait."""
        return self._limits

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
        """Queue a request. Raises `Overloaded` when the queue is full, unless others give way to it (see `Places`),
        `Unavailable` while draining, `EngineFailed` after the engine died. The caller must call `cancel` when it is
        done with the stream, whatever happened."""
        if self._dead:
            raise self._dead
        if self._draining:
            raise Unavailable(_STOPPED)
        if request.id in self._streams:
            raise InvalidRequest("attempt.id", f'"{request.id}" is running here already; use a new id for each attempt')
        self._take_place(request)
        stream = self._streams[request.id] = EventStream(self._unread, partial(self._end, request.id))
        self._inbox.put(lambda scheduler: scheduler.submit(request))
        return stream

    def cancel(self, request_id: str, stream: EventStream) -> None:
        """Forget the request of this stream; harmless when it has ended, also when there is another of its id since."""
        if self._streams.get(request_id) is stream:
            self._forget(request_id)
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

    def _take_place(self, request: Request) -> None:
        snapshot = self.snapshot
        active = {view.id for view in snapshot.active}
        place = Place(request.client, request.weight, request.prompt_tokens + request.max_new_tokens)
        if shortage := self._places.shortage(place, active, batch=snapshot.max_active):
            fault = full(snapshot, self.rates, shortage)
            losers = self._places.giving_way(place, active, shortage)
            if not losers:
                raise fault
            for loser in losers:
                self._end(loser, fault)
        self._places.take(request.id, place)

    def _end(self, request_id: str, fault: Fault) -> None:
        """Fail a request that goes on, and let the scheduler forget it."""
        if stream := self._forget(request_id):
            stream.put(Failed(request_id, fault))
            self._inbox.put(lambda scheduler: scheduler.cancel(request_id))

    def _forget(self, request_id: str) -> EventStream | None:
        self._places.leave(request_id)
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.close()
        return stream

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
                    self._forget(event.request_id)
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
        for request_id in tuple(self._streams):
            if stream := self._forget(request_id):
                stream.put(Failed(request_id, fault))
