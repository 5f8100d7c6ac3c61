"""One service running as a child process, from its start to its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from phaseroute.channels import channel_options
from phaseroute.local.plan import Service

_TETHER = Path(__file__).with_name("tether.py")
_TAIL_BYTES = 16_384


class StartFailed(Exception):
    """A service did not come up; the message says which, why, and where its log is."""


class Child:
    """A running service. Its output goes to a file; it dies with this process (on Linux, see `tether`)."""

    def __init__(self, service: Service, process: asyncio.subprocess.Process, log: Path) -> None:
        self.service = service
        self.process = process
        self.log = log

    @classmethod
    async def start(cls, service: Service, run_dir: Path) -> Child:
        """Call it from the main thread: the kernel's parent-death signal follows the thread that started the child."""
        log = run_dir / f"{service.name}.log"
        program = [sys.executable, "-m", service.module, *service.arguments]
        with log.open("wb") as output:
            # A session of its own: Ctrl-C in the terminal reaches the parent alone, which stops the children in order.
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), *program,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        return cls(service, process, log)

    async def ready(self) -> None:
        """Return once it reports itself healthy. Raises `StartFailed` when it exits first."""
        serving = asyncio.create_task(_serving(self.service.address))
        exited = asyncio.create_task(self.process.wait())
        try:
            await asyncio.wait({serving, exited}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                raise StartFailed(f"{self.obituary()} Correct that and start again.")
            serving.result()
        finally:
            for task in (serving, exited):
                task.cancel()

    def obituary(self) -> str:
        """How it ended, in its own last words."""
        code = self.process.returncode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{self.service.name} stopped ({how}): {last_line(self.log)} (log: {self.log})."

    async def stop(self, grace_s: float) -> None:
        """Ask it to stop, and kill it when it has not after `grace_s`. Being cancelled kills it at once."""
        if self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self.process.wait()
        except TimeoutError:
            self.kill()
            await self.process.wait()
        except asyncio.CancelledError:
            self.kill()
            raise

    def kill(self) -> None:
        """End it now."""
        if self.process.returncode is None:
            self.process.kill()


def last_line(log: Path) -> str:
    """The last thing a log says; of a JSON line, its event and error."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    line = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict):
        return line
    return ": ".join(str(record[key]) for key in ("event", "error") if key in record) or line


async def _serving(address: str) -> None:
    """Follow the health service until it says SERVING, however long that takes."""
    async with grpc.aio.insecure_channel(address, channel_options(address)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            watch = health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            try:
                async for answer in watch:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise StartFailed(f"{address} has no health service: {error.details()}") from error
            finally:
                watch.cancel()
