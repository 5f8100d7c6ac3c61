"""Services as processes of their own, as people start them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from phaseroute.v1 import router_pb2, router_pb2_grpc


@dataclass
class Service:
    """A started process."""

    process: asyncio.subprocess.Process
    log: list[str]
    """Lines it wrote to stderr so far."""

    async def wait_line(self, pattern: str) -> str:
        """The next line on stderr that matches."""
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            line = raw.decode().rstrip()
            self.log.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"exited with {await self.process.wait()} before {pattern!r}:\n" + "\n".join(self.log))

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it; its exit code. What it still wrote is in `log`."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        assert self.process.stderr is not None
        rest = await self.process.stderr.read()
        self.log += rest.decode().splitlines()
        return await self.process.wait()


@asynccontextmanager
async def started(module: str, *flags: str, **environment: str) -> AsyncIterator[Service]:
    """Run `python -m module flags`; it is killed at the end if it still lives."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *flags, stderr=asyncio.subprocess.PIPE, env={**os.environ, **environment}
    )
    service = Service(process, [])
    try:
        yield service
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def serving(service: Service) -> str:
    """The address that a service says it serves on."""
    return str(json.loads(await service.wait_line('"serving"'))["address"])


SIMULATED = ("--engine", "simulated", "--listen", "127.0.0.1:0", "--log-format", "json")


async def run(module: str, *flags: str) -> tuple[int, str]:
    """A process that ends by itself: exit code and stderr."""
    async with started(module, *flags) as service:
        code = await service.end(signal.SIGCONT)
        return code, "\n".join(service.log)


async def until_serving(router: router_pb2_grpc.RouterServiceStub, count: int) -> None:
    """Return when the router lists so many serving backends."""
    for _ in range(100):
        listed = await router.ListBackends(router_pb2.ListBackendsRequest())
        if sum(entry.state == router_pb2.BACKEND_STATE_SERVING for entry in listed.backends) == count:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"never {count} serving backends: {listed}")
