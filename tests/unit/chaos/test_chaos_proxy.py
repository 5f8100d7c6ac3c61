"""The breakable link between router and backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.chaos.proxy import Link

PATIENCE_S = 10.0


@asynccontextmanager
async def linked() -> AsyncIterator[Link]:
    """A link to a server that echoes."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1024):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    try:
        async with asyncio.timeout(PATIENCE_S), Link(server.sockets[0].getsockname()[1]) as link:
            yield link
    finally:
        server.close()


async def connect(link: Link) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", link.port)


async def said(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    return await reader.readexactly(len(data))


async def gone(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


async def test_whole_link_passes_everything_and_its_end():
    async with linked() as link:
        reader, writer = await connect(link)
        assert await said(reader, writer, b"x" * 5000) == b"x" * 5000
        writer.write_eof()
        assert await gone(reader)


async def test_cut_link_resets_old_and_new_connections_until_it_heals():
    async with linked() as link:
        reader, writer = await connect(link)
        assert await said(reader, writer, b"1") == b"1"
        link.cut()
        assert await gone(reader)
        again, _ = await connect(link)
        assert await gone(again)
        link.heal()
        assert await said(*await connect(link), b"2") == b"2"


@pytest.mark.parametrize("way", ["blackhole", "half_open"])
async def test_link_that_passes_nothing_back_delivers_it_when_it_heals(way):
    async with linked() as link:
        reader, writer = await connect(link)
        assert await said(reader, writer, b"1") == b"1"
        getattr(link, way)()
        writer.write(b"2")
        heard = asyncio.ensure_future(reader.readexactly(1))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not heard.done()
        link.heal()
        assert await heard == b"2"


async def test_closed_target_looks_like_a_reset():
    async with Link(1) as link, asyncio.timeout(PATIENCE_S):
        reader, _ = await connect(link)
        assert await gone(reader)
