"""Applies planned faults to a fleet, of which one backend stays whole at any time."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, TextIO

import grpc

from phaseroute.local.child import StartFailed
from phaseroute.v1 import router_pb2
from tests.chaos.fleet import Fleet, FleetBroken
from tests.chaos.pace import Pace
from tests.chaos.plan import FaultKind, PlannedFault

SLOW_STOPPED_S = 0.09
SLOW_RUNNING_S = 0.01
DELAY_S = 0.03


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that was; times on the monotonic clock."""

    index: int
    kind: str
    hit: str
    began_s: float
    ended_s: float
    """The process runs again, the link is whole, the drain is taken back."""
    rejoin_s: float
    """From then on until requests could go there again."""


class Injector:
    """One run's faults. `log` gets a JSON line for each that is over."""

    def __init__(self, fleet: Fleet, plan: Sequence[PlannedFault], pace: Pace, log: TextIO) -> None:
        self._fleet = fleet
        self._plan = plan
        self._pace = pace
        self._log = log
        self._down: set[int] = set()
        self._changed = asyncio.Condition()
        self.injected: list[Injected] = []
        self.problems: list[str] = []

    async def run(self) -> None:
        """Inject everything; return when all is whole again."""
        try:
            async with asyncio.TaskGroup() as group:
                for fault in self._plan:
                    if fault.kind.of_router:
                        await self._all_whole()
                        await self._pace.fault()
                        await self._at_router(fault)
                    else:
                        backend = await self._take(fault.backend)
                        await self._pace.fault()
                        group.create_task(self._at_backend(fault, backend))
        finally:
            await self._pace.end_faults()

    async def _take(self, wanted: int) -> int:
        """A backend to hit, once enough are whole."""
        count = len(self._fleet.backends)
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._down) < count - 1)
            backend = next(index for offset in range(count) if (index := (wanted + offset) % count) not in self._down)
            self._down.add(backend)
            return backend

    async def _all_whole(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._down)

    async def _at_backend(self, fault: PlannedFault, backend: int) -> None:
        began_s = ended_s = time.monotonic()
        rejoin_s = float("nan")
        try:
            await self._ways[fault.kind](self, backend, fault)
            ended_s = time.monotonic()
            rejoin_s = await self._fleet.until_serving(backend)
        except (FleetBroken, StartFailed, grpc.aio.AioRpcError) as failure:
            self.problems.append(f"fault {fault.index} ({fault.kind.value} of b{backend}): {_said(failure)}")
        finally:
            async with self._changed:
                self._down.discard(backend)
                self._changed.notify_all()
        self._note(Injected(fault.index, fault.kind.value, f"b{backend}", began_s, ended_s, rejoin_s))

    async def _at_router(self, fault: PlannedFault) -> None:
        began_s = time.monotonic()
        try:
            await self._fleet.restart_router(kill=fault.kind is FaultKind.ROUTER_KILL, pause_s=fault.lasts_s)
        except (FleetBroken, StartFailed) as failure:
            self.problems.append(f"fault {fault.index} ({fault.kind.value}): {_said(failure)}")
            raise
        ended_s = time.monotonic()
        self._note(Injected(fault.index, fault.kind.value, "router", began_s, ended_s, 0.0))

    def _note(self, injected: Injected) -> None:
        self.injected.append(injected)
        print(json.dumps(asdict(injected)), file=self._log, flush=True)

    async def _kill(self, backend: int, fault: PlannedFault) -> None:
        await self._fleet.backends[backend].kill()
        await asyncio.sleep(fault.lasts_s)
        await self._fleet.backends[backend].start()

    async def _term(self, backend: int, fault: PlannedFault) -> None:
        await self._fleet.backends[backend].terminate()
        await asyncio.sleep(fault.lasts_s)
        await self._fleet.backends[backend].start()

    async def _stop(self, backend: int, fault: PlannedFault) -> None:
        process = self._fleet.backends[backend]
        process.signal(signal.SIGSTOP)
        await asyncio.sleep(fault.lasts_s)
        process.signal(signal.SIGCONT)

    async def _slow(self, backend: int, fault: PlannedFault) -> None:
        process = self._fleet.backends[backend]
        until_s = time.monotonic() + fault.lasts_s
        while time.monotonic() < until_s:
            process.signal(signal.SIGSTOP)
            await asyncio.sleep(SLOW_STOPPED_S)
            process.signal(signal.SIGCONT)
            await asyncio.sleep(SLOW_RUNNING_S)

    async def _cut(self, backend: int, fault: PlannedFault) -> None:
        await self._break_link(backend, fault, self._fleet.links[backend].cut)

    async def _blackhole(self, backend: int, fault: PlannedFault) -> None:
        await self._break_link(backend, fault, self._fleet.links[backend].blackhole)

    async def _half_open(self, backend: int, fault: PlannedFault) -> None:
        await self._break_link(backend, fault, self._fleet.links[backend].half_open)

    async def _delay(self, backend: int, fault: PlannedFault) -> None:
        await self._break_link(backend, fault, lambda: self._fleet.links[backend].delay(DELAY_S))

    async def _break_link(self, backend: int, fault: PlannedFault, how: Callable[[], None]) -> None:
        how()
        await asyncio.sleep(fault.lasts_s)
        self._fleet.links[backend].heal()

    async def _drain(self, backend: int, fault: PlannedFault) -> None:
        name = f"b{backend}"
        drain = router_pb2.DrainBackendRequest(backend=name, grace_s=fault.grace_s)
        await self._fleet.admin.DrainBackend(drain, timeout=10)
        await asyncio.sleep(fault.lasts_s)
        await self._fleet.admin.DrainBackend(router_pb2.DrainBackendRequest(backend=name, undo=True), timeout=10)

    _ways: ClassVar[dict[FaultKind, Callable[[Injector, int, PlannedFault], Awaitable[None]]]] = {
        FaultKind.KILL: _kill,
        FaultKind.TERM: _term,
        FaultKind.STOP: _stop,
        FaultKind.SLOW: _slow,
        FaultKind.CUT: _cut,
        FaultKind.BLACKHOLE: _blackhole,
        FaultKind.HALF_OPEN: _half_open,
        FaultKind.DELAY: _delay,
        FaultKind.DRAIN: _drain,
    }


def _said(failure: Exception) -> str:
    if isinstance(failure, grpc.aio.AioRpcError):
        return f"{failure.code().name}: {failure.details()}"
    return str(failure)
