"""A backend as a process of its own, for benchmarks."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc

from service_kit.channels import open_channel


@asynccontextmanager
async def backend(flags: Sequence[str], prefix: Sequence[str] = ()) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to `python -m backend_service FLAGS` on a free port; `prefix` goes before the command."""
    command = [*prefix, sys.executable, "-m", "backend_service", "--listen", "127.0.0.1:0", "--log-format", "json"]
    process = await asyncio.create_subprocess_exec(*command, *flags, stderr=PIPE)
    assert process.stderr is not None
    lines = []
    try:
        async for line in process.stderr:
            lines.append(line.decode().rstrip())
            if '"serving"' in lines[-1]:
                async with open_channel(json.loads(line)["address"]) as channel:
                    yield channel
                return
        raise RuntimeError("the backend did not start:\n" + "\n".join(lines))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
