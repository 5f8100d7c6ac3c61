"""A channel to another service that may ask for TLS, a certificate and a token, all of them from files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import structlog

from service_kit.addresses import stays_here
from service_kit.certificates import ClientTls
from service_kit.tokens import HEADER, read_token
from service_kit.watched import Watched

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PeerSecurity:
    """How to know another service, and how to be known there. False when there is nothing to it."""

    tls: ClientTls | None = None
    token_file: Path | None = None

    def __bool__(self) -> bool:
        return self.tls is not None or self.token_file is not None


class PeerChannel(grpc.aio.Channel):
    """Like any channel, but each call brings the token that is in its file then, and is made with the certificates that
    are in theirs: gRPC's channels keep the credentials that they were made with, so this one changes over to a new one.
    Calls in flight stay where they are, and an old channel is closed after its last.
    """

    def __init__(self, target: str, options: Sequence[tuple[str, Any]], security: PeerSecurity) -> None:
        """On the running event loop. Raises `StartupFailed`."""
        self._target = target
        self._options = options
        self._credentials = security.tls.watch() if security.tls else None
        path = security.token_file
        self._token: Watched[str] | None = Watched([path], partial(read_token, path)) if path else None
        self._closed = False
        self._closing: set[asyncio.Task[None]] = set()
        self._lines: list[_Line] = [self._new_line()]
        if self._token and not self._credentials and not stays_here(target):
            _log.warning("the token is sent without TLS: whoever is on the way can read it", target=target)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Ends calls in flight, after `grace` seconds."""
        self._closed = True
        await asyncio.gather(*(line.channel.close(grace) for line in self._lines), *self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Of the newest connection."""
        return self._line().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Of the newest connection; one that is given up for a newer one has changed."""
        line = self._line()
        try:
            await line.channel.wait_for_state_change(last_observed_state)
        except grpc.aio.UsageError:
            if line is self._lines[-1]:
                raise

    async def channel_ready(self) -> None:
        """Return once it is connected."""
        await self._line().channel.channel_ready()

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        """As any channel's."""
        return self._callable("unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        """As any channel's."""
        return self._callable("unary_stream", args, options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        """As any channel's."""
        return self._callable("stream_unary", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        """As any channel's."""
        return self._callable("stream_stream", args, options)

    def _callable(self, kind: str, args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Any]:
        def make(line: _Line) -> Any:
            return getattr(line.channel, kind)(*args, **options)

        line = self._lines[-1]
        multicallable = make(line)

        def call(*arguments: Any, metadata: Sequence[tuple[str, Any]] | None = None, **rest: Any) -> Any:
            nonlocal line, multicallable
            newest = self._line()
            if newest is not line:
                line, multicallable = newest, make(newest)
            if self._token:
                metadata = (*(metadata or ()), (HEADER, f"Bearer {self._token.get()}"))
            started = multicallable(*arguments, metadata=metadata, **rest)
            line.calls += 1
            started.add_done_callback(partial(self._call_over, line))
            return started

        return call

    def _line(self) -> _Line:
        line = self._lines[-1]
        if self._closed or self._credentials is None or self._credentials.get() is line.credentials:
            return line
        self._lines.append(self._new_line())
        self._retire(line)
        return self._lines[-1]

    def _new_line(self) -> _Line:
        if self._credentials is None:
            return _Line(grpc.aio.insecure_channel(self._target, options=self._options), None)
        credentials = self._credentials.get()
        return _Line(grpc.aio.secure_channel(self._target, credentials, options=self._options), credentials)

    def _call_over(self, line: _Line, _: object) -> None:
        line.calls -= 1
        self._retire(line)

    def _retire(self, line: _Line) -> None:
        if line.calls or line is self._lines[-1] or line not in self._lines:
            return
        self._lines.remove(line)
        task = asyncio.get_running_loop().create_task(line.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


@dataclass(slots=True, eq=False)
class _Line:
    """One channel of gRPC's, and the calls in flight on it."""

    channel: grpc.aio.Channel
    credentials: grpc.ChannelCredentials | None
    calls: int = 0
