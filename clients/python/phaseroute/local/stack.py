"""Backends and a router on this machine, as child processes: started together, stopped together."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from phaseroute.local.child import Child, StartFailed
from phaseroute.local.plan import Service, StackPlan

DRAIN_S = 35.0
"""The services end their own drain after 30 s."""


class Phase(enum.Enum):
    """Where a service is in its life."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Member:
    """A service of the stack, as it is now."""

    service: Service
    phase: Phase
    since_s: float
    """Of the monotonic clock: when it entered the phase."""
    pid: int


class Stack:
    """Runs while its `async with` block runs; leaving the block stops everything, router first: it may still be
    relaying answers."""

    def __init__(self, plan: StackPlan, run_dir: Path, on_change: Callable[[Member], None]) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._on_change = on_change
        self._children: dict[str, Child] = {}
        self._members: dict[str, Member] = {}

    @property
    def members(self) -> Mapping[str, Member]:
        """By name, in the order of starting."""
        return self._members

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start_backends(self) -> None:
        """Start all of them, then wait until each is healthy. Raises `StartFailed` as soon as one ends instead."""
        for service in self._plan.backends:
            await self._start(service)
        try:
            async with asyncio.TaskGroup() as group:
                for service in self._plan.backends:
                    group.create_task(self._ready(service.name))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def start_router(self) -> None:
        """Start it and wait until it can route. After the backends: what they measure at their start is the truer, the
        less runs beside them. Raises `StartFailed`."""
        await self._start(self._plan.router)
        await self._ready(self._plan.router.name)

    async def next_end(self) -> Child:
        """The next child to end by itself."""
        running = {
            asyncio.create_task(child.process.wait()): child
            for name, child in self._children.items()
            if self._members[name].phase is Phase.READY
        }
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in running:
                task.cancel()
        child = running[done.pop()]
        self._enter(child.service.name, Phase.FAILED)
        return child

    async def stop(self) -> None:
        """Let answers in flight end, then stop everything. Being cancelled kills what still runs."""
        try:
            await self._stop([self._plan.router])
            await self._stop(self._plan.backends)
        finally:
            for child in self._children.values():
                child.kill()
            await asyncio.gather(*(child.process.wait() for child in self._children.values()))

    async def _start(self, service: Service) -> None:
        child = await Child.start(service, self._run_dir)
        self._children[service.name] = child
        self._tell(Member(service, Phase.STARTING, time.monotonic(), child.process.pid))

    async def _ready(self, name: str) -> None:
        try:
            await self._children[name].ready()
        except StartFailed:
            self._enter(name, Phase.FAILED)
            raise
        self._enter(name, Phase.READY)

    async def _stop(self, services: Sequence[Service]) -> None:
        async with asyncio.TaskGroup() as group:
            for service in services:
                if service.name in self._children:
                    group.create_task(self._stop_one(service.name))

    async def _stop_one(self, name: str) -> None:
        child = self._children[name]
        if child.process.returncode is None:
            self._enter(name, Phase.STOPPING)
            await child.stop(DRAIN_S)
            self._enter(name, Phase.STOPPED)

    def _enter(self, name: str, phase: Phase) -> None:
        self._tell(replace(self._members[name], phase=phase, since_s=time.monotonic()))

    def _tell(self, member: Member) -> None:
        self._members[member.service.name] = member
        self._on_change(member)
