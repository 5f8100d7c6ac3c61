"""A network between router and backend that can be broken in several ways."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self

CHUNK_BYTES = 1 << 16


class Link:
    """A TCP proxy on a loopback port of its own. Whole until it is told otherwise."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._connections: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusing = False
        self._delay_s = 0.0
        self._there = _gate()
        self._back = _gate()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._reset_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection, and each new one."""
        self._refusing = True
        self._reset_all()

    def blackhole(self) -> None:
        """Keep every connection, and let nothing pass."""
        self._there.clear()
        self._back.clear()

    def half_open(self) -> None:
        """Let nothing pass that the target says."""
        self._back.clear()

    def delay(self, seconds: float) -> None:
        """Let every piece wait so long, in both directions."""
        self._delay_s = seconds

    def heal(self) -> None:
        """Whole again; what was held back passes now."""
        self._refusing = False
        self._delay_s = 0.0
        self._there.set()
        self._back.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._refusing:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, far_writer)
        self._connections.add(pair)
        try:
            if self._refusing:
                return
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, far_writer, self._there))
                group.create_task(self._pump(far_reader, writer, self._back))
        except* OSError:
            pass
        finally:
            self._connections.discard(pair)
            _reset(pair)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        """One direction, until its end; then the other direction ends, too."""
        while data := await reader.read(CHUNK_BYTES):
            await gate.wait()
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()

    def _reset_all(self) -> None:
        for pair in list(self._connections):
            _reset(pair)


def _gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


def _reset(pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
    for writer in pair:
        writer.transport.abort()
