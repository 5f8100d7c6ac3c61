"""A gRPC server's life: bind, serve, drain, stop; and the process around it."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import structlog

from service_kit import health, reflection
from service_kit.calls import CallsInFlight
from service_kit.channels import server_options
from service_kit.faults import StartupFailed
from service_kit.interceptors import FaultInterceptor
from service_kit.protection import Protection
from service_kit.telemetry import Telemetry

DRAIN_GRACE_S = 30.0
"""Long enough for most answers, short enough for an orchestrator that kills after 60 s."""
FLUSH_GRACE_S = 0.5
"""After a drain only streams without an end are left; this is for the last bytes of everything else."""
LAST_WORDS_S = 1.0
"""After the grace period, for the statuses of the calls that it ended; a client that does not read gets none."""
INTERRUPTED_CODE = 130

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """A service to serve."""

    name: str
    """In full, such as "phaseroute.v1.InferenceService"."""
    register: Callable[[grpc.aio.Server], None]
    """Adds the servicer: `functools.partial(add_InferenceServiceServicer_to_server, servicer)`."""


class Server:
    """Serves while its `async with` block runs; leaving the block stops it at once, unless it was drained before.

    Everything is NOT_SERVING until `set_serving(True)`; calls are accepted all the same.
    """

    def __init__(
        self,
        services: Sequence[Service],
        *,
        address: str,
        telemetry: Telemetry | None = None,
        protection: Protection | None = None,
        drain_grace_s: float = DRAIN_GRACE_S,
        on_drain: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`address` is `host:port` (port 0: any free one) or `unix:path`. `on_drain` is awaited when a drain begins:
        the service's chance to tell its peers; calls in flight go on and observers are still answered. Make it on the
        running event loop."""
        self._loop = asyncio.get_running_loop()
        self._services = tuple(services)
        self._address = address
        self._telemetry = telemetry or Telemetry()
        self._protection = protection or Protection()
        self._drain_grace_s = drain_grace_s
        self._on_drain = on_drain
        self._calls = CallsInFlight(self._protection.calls)
        self._health = health.Health([service.name for service in services])
        self._stop_requested = asyncio.Event()
        self._hurry = asyncio.Event()
        self._exit_code = 0

    async def __aenter__(self) -> Self:
        """Bind and start. Raises `StartupFailed`."""
        access = self._protection.access(self._address)
        credentials = self._protection.tls.credentials() if self._protection.tls else None
        self._server = grpc.aio.server(
            interceptors=[FaultInterceptor(self._calls, self._telemetry, access)],
            options=server_options(self._protection.connections),
        )
        for service in self._services:
            service.register(self._server)
        await self._health.register(self._server)
        if self._protection.reflection:
            names = [service.name for service in self._services]
            reflection.add_reflection(self._server, [*names, health.SERVICE_NAME])
        self._port = _bind(self._server, self._address, credentials)
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._server.stop(None)
        if not await self._telemetry.shutdown():
            _log.warning("some traces were not delivered; the collector did not answer in time")

    @property
    def port(self) -> int:
        """The port that was bound; meaningless for a unix socket."""
        return self._port

    @property
    def target(self) -> str:
        """Where a client on this machine reaches the server."""
        if self._address.startswith("unix"):
            return self._address
        host = self._address.rpartition(":")[0]
        return f"{_LOOPBACK.get(host, host)}:{self._port}"

    async def set_serving(self, serving: bool) -> None:
        """What health checks answer from now on, for all services."""
        await self._health.set_serving(serving)

    def request_stop(self, exit_code: int = 0) -> None:
        """Make `run_until_stopped` drain and return this code; the first request wins. Any thread."""
        self._loop.call_soon_threadsafe(self._request_stop, exit_code)

    async def run_until_stopped(self) -> int:
        """Serve until SIGTERM, SIGINT or `request_stop`, then drain; the process's exit code. A second signal cuts the
        drain short. Main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        try:
            await self._stop_requested.wait()
            await self.drain()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.remove_signal_handler(number)
        return self._exit_code

    async def drain(self) -> None:
        """Health NOT_SERVING, then `on_drain`, then serve on until no call is in flight or the grace period is over.
        What is left then ends UNAVAILABLE, with details, so that whoever relays it can go on elsewhere. Then stop."""
        await self._health.retire()
        self._calls.draining = True
        _log.info("draining", calls_in_flight=self._calls.count, grace_s=self._drain_grace_s)
        hurried = asyncio.create_task(self._hurry.wait())
        wound_down = asyncio.create_task(self._wind_down())
        try:
            await asyncio.wait((hurried, wound_down), timeout=self._drain_grace_s, return_when=asyncio.FIRST_COMPLETED)
            if wound_down.done():
                await wound_down
            else:
                _log.warning("stopping with calls in flight", calls_in_flight=self._calls.count)
                await self._give_up()
        finally:
            hurried.cancel()
            wound_down.cancel()
            await self._server.stop(None if self._calls.count else FLUSH_GRACE_S)

    async def _give_up(self) -> None:
        self._calls.give_up()
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._calls.wait_idle()
        except TimeoutError:
            _log.warning("clients that did not read how their calls ended", calls_in_flight=self._calls.count)

    async def _wind_down(self) -> None:
        if self._on_drain is not None:
            await self._on_drain()
        await self._calls.wait_idle()

    def _request_stop(self, exit_code: int) -> None:
        if not self._stop_requested.is_set():
            self._exit_code = exit_code
            self._stop_requested.set()

    def _on_signal(self, number: signal.Signals) -> None:
        _log.info("signal received", signal=number.name)
        if self._stop_requested.is_set():
            self._hurry.set()
        self._request_stop(0)


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run a service to its end, on uvloop where there is one; the exit code for `sys.exit`.

    `StartupFailed` becomes one line on stderr and its exit code, Ctrl-C before the server runs code 130; neither has a
    traceback.
    """
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(main)
    except StartupFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_CODE


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    if not address.startswith("unix"):
        _check_free(address)
    try:
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise StartupFailed(
            f"Cannot listen on {address}; use host:port or unix:path, free and permitted to this user."
        ) from error


def _check_free(address: str) -> None:
    """Say what is wrong with an address before gRPC is asked, which does not say, takes port 65537 for 1, and is
    content with one of localhost's two addresses while another process has the other. Raises `StartupFailed`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise StartupFailed(f'Cannot listen on "{address}"; write it as host:port with a port from 0 to 65535.')
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise StartupFailed(f"Cannot listen on {address}: {error.strerror}; use this machine's own name.") from error
    problems = [problem for family, _, _, _, where in found if (problem := _bind_problem(family, where))]
    taken = [problem for problem in problems if problem.errno == errno.EADDRINUSE]
    if taken:
        raise StartupFailed(
            f"Cannot listen on {address}: the port is in use; stop the process that has it, or choose another port."
        )
    if len(problems) == len(found):
        raise StartupFailed(
            f"Cannot listen on {address}: {problems[0].strerror}; use an address of this machine and a port that this "
            "user may open."
        )


def _bind_problem(family: socket.AddressFamily, where: Any) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC does: connections of the last process that are still closing do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family is socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(where)
    except OSError as error:
        return error
    return None
