"""Backends and a router as processes of their own, each backend behind a link that can be broken."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc

from phaseroute.channels import channel_options
from phaseroute.local.child import Child
from phaseroute.local.plan import Service, free_ports
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from phaseroute.v1 import router_pb2, router_pb2_grpc
from service_kit.channels import open_channel
from tests.chaos.ledger import RouterTrouble
from tests.chaos.proxy import Link

STOP_GRACE_S = 60.0
"""The services end their own drains long before."""
REJOIN_PATIENCE_S = 30.0


class FleetBroken(Exception):
    """A process did not do what it was told; the message says which, and how."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What to run."""

    backends: Sequence[tuple[str, ...]]
    """Flags of each backend, all but `--listen`."""
    router: tuple[str, ...]
    """Flags of the router, all but `--listen` and `--backend`."""


class Process:
    """A service on a fixed port, through all its processes."""

    def __init__(self, service: Service, run_dir: Path) -> None:
        self._service = service
        self._run_dir = run_dir
        self._starts = 0
        self.child: Child | None = None

    @property
    def name(self) -> str:
        """The service's."""
        return self._service.name

    @property
    def pid(self) -> int:
        """Of the newest process."""
        assert self.child is not None
        return self.child.process.pid

    async def start(self) -> None:
        """A new process; return when it is healthy. Raises `StartFailed`."""
        self._starts += 1
        name = f"{self._service.name}-{self._starts}"
        service = Service(name, self._service.module, self._service.arguments, self._service.address)
        self.child = await Child.start(service, self._run_dir)
        await self.child.ready()

    def signal(self, number: signal.Signals) -> None:
        """Send it to the process, unless that ended by itself. Raises `FleetBroken` then."""
        self.check()
        assert self.child is not None
        self.child.process.send_signal(number)

    def check(self) -> None:
        """Raise `FleetBroken` when it ended by itself."""
        if self.child is None or self.child.process.returncode is not None:
            raise FleetBroken(f"{self.name} is gone: {self.child.obituary() if self.child else 'never started'}")

    async def kill(self) -> None:
        """End it now, stopped or not."""
        self.signal(signal.SIGKILL)
        assert self.child is not None
        await self.child.process.wait()

    async def terminate(self) -> None:
        """Ask it to stop. Raises `FleetBroken` when it does not, or ends with an error."""
        self.check()
        assert self.child is not None
        began_s = time.monotonic()
        await self.child.stop(STOP_GRACE_S)
        if self.child.process.returncode != 0:
            took_s = time.monotonic() - began_s
            raise FleetBroken(f"after SIGTERM and {took_s:.1f} s: {self.child.obituary()}")

    async def close(self) -> None:
        """End it, stopped or not: nothing is left behind."""
        if self.child is not None:
            self.child.kill()
            await self.child.process.wait()


@dataclass(frozen=True, slots=True)
class TroubleSpan:
    """When the router was not there for everybody; on the monotonic clock."""

    trouble: RouterTrouble
    began_s: float
    ended_s: float


class Fleet:
    """Runs while its `async with` block runs."""

    def __init__(self, plan: FleetPlan, run_dir: Path) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._exits = AsyncExitStack()
        self.backends: list[Process] = []
        self.links: list[Link] = []
        self.router_up = asyncio.Event()
        self.troubles: list[TroubleSpan] = []

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as exits:
            *ports, router_port = free_ports(len(self._plan.backends) + 1)
            targets: list[str] = []
            for index, (flags, port) in enumerate(zip(self._plan.backends, ports, strict=True)):
                address = f"127.0.0.1:{port}"
                service = Service(f"b{index}", "backend_service", (*flags, "--listen", address), address)
                link = await exits.enter_async_context(Link(port))
                targets += ["--backend", f"b{index}=127.0.0.1:{link.port}"]
                self.links.append(link)
                self.backends.append(self._process(exits, service))
            self.target = f"127.0.0.1:{router_port}"
            flags = (*self._plan.router, "--listen", self.target, *targets)
            self.router = self._process(exits, Service("router", "router_service", flags, self.target))
            try:
                async with asyncio.TaskGroup() as group:
                    for process in self.backends:
                        group.create_task(process.start())
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
            await self.router.start()
            self.router_up.set()
            channel = await exits.enter_async_context(open_channel(self.target))
            self.admin = router_pb2_grpc.RouterServiceStub(channel)  # type: ignore[no-untyped-call]
            self.status = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            for index in range(len(self.backends)):
                await self.until_serving(index)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    def _process(self, exits: AsyncExitStack, service: Service) -> Process:
        process = Process(service, self._run_dir)
        exits.push_async_callback(process.close)
        return process

    @property
    def processes(self) -> Sequence[Process]:
        """All of them."""
        return [*self.backends, self.router]

    def client_channel(self) -> grpc.aio.Channel:
        """As the shipped client opens one: with its retries."""
        return grpc.aio.insecure_channel(self.target, channel_options(self.target))

    async def until_serving(self, index: int) -> float:
        """Wait until the router sends requests to a backend; the seconds that it took. Raises `FleetBroken`."""
        began_s = time.monotonic()
        name = f"b{index}"
        detail = "the router does not answer"
        while time.monotonic() < began_s + REJOIN_PATIENCE_S:
            try:
                listed = await self.admin.ListBackends(router_pb2.ListBackendsRequest(), timeout=5)
            except grpc.aio.AioRpcError as error:
                detail = f"the router says {error.code().name}: {error.details()}"
            else:
                entry = next(entry for entry in listed.backends if entry.name == name)
                if (
                    entry.state == router_pb2.BACKEND_STATE_SERVING
                    and entry.breaker.state != router_pb2.BREAKER_STATE_OPEN
                ):
                    return time.monotonic() - began_s
                detail = f"{router_pb2.BackendState.Name(entry.state)}, {entry.detail or 'no detail'}"
            await asyncio.sleep(0.05)
        raise FleetBroken(f"{name} was not back after {REJOIN_PATIENCE_S:g} s: {detail}")

    def trouble_of(self, began_s: float, ended_s: float) -> RouterTrouble:
        """What the router went through in that time; being killed outdoes a restart."""
        met = {span.trouble for span in self.troubles if span.began_s <= ended_s and began_s <= span.ended_s}
        for trouble in (RouterTrouble.KILLED, RouterTrouble.RESTART):
            if trouble in met:
                return trouble
        return RouterTrouble.NONE

    async def restart_router(self, *, kill: bool, pause_s: float) -> None:
        """End the router and start it again. Requests notice: see `troubles`."""
        trouble = RouterTrouble.KILLED if kill else RouterTrouble.RESTART
        began_s = time.monotonic()
        self.router_up.clear()
        # Known at once: requests end while it goes on.
        self.troubles.append(TroubleSpan(trouble, began_s, float("inf")))
        if kill:
            await self.router.kill()
        else:
            await self.router.terminate()
        await asyncio.sleep(pause_s)
        await self.router.start()
        for index in range(len(self.backends)):
            await self.until_serving(index)
        # A client that backs off for 2 s may find it a little later.
        self.troubles[-1] = TroubleSpan(trouble, began_s, time.monotonic() + 2.5)
        self.router_up.set()
