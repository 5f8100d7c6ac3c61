"""A server as a process of its own, on one core."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import PIPE, STDOUT
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import psutil

from benchmarks.side_by_side.faults import SetUpFailed

_KEPT_LINES = 30


@dataclass(frozen=True, slots=True)
class Started:
    """A process that is ready."""

    pid: int
    ready_line: str
    """By which it said so."""

    def resident_mib(self) -> float:
        """Resident memory: its own pages, and the model file's as far as they are in memory."""
        return float(psutil.Process(self.pid).memory_info().rss) / 2**20


@asynccontextmanager
async def started(command: Sequence[str], core: int, is_ready: Callable[[str], bool]) -> AsyncIterator[Started]:
    """Runs while the block does. Raises `SetUpFailed` with its last words when it ends before it is ready."""
    with _on_core(core):
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
    output = process.stdout
    assert output is not None
    drain: asyncio.Task[None] | None = None
    try:
        words: deque[str] = deque(maxlen=_KEPT_LINES)
        async for line in output:
            words.append(line.decode(errors="replace").rstrip())
            if is_ready(words[-1]):
                drain = asyncio.create_task(_drain(output))  # or its log would fill the pipe and stop it
                yield Started(process.pid, words[-1])
                return
        raise SetUpFailed(f"{' '.join(command[:3])} ... ended before it was ready:\n" + "\n".join(words))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        if drain is not None:
            await drain


async def _drain(output: asyncio.StreamReader) -> None:
    async for _ in output:
        pass


@contextmanager
def _on_core(core: int) -> Iterator[None]:
    """What is started in this block inherits the core from its first instruction on, and so do all its threads."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
