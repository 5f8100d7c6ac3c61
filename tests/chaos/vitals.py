"""What the processes use while they run, and what they still hold when nothing runs."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import psutil

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from phaseroute.v1 import router_pb2
from service_kit.channels import open_channel
from tests.chaos.fleet import Fleet, Process

SAMPLE_S = 1.0
IDLE_PATIENCE_S = 30.0
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment of the monotonic clock."""

    at_s: float
    rss_bytes: int
    fds: int
    threads: int


@dataclass(frozen=True, slots=True)
class Growth:
    """The last part of a process's life against an earlier one; medians."""

    rss_mib: float
    fds: int
    threads: int
    first: Sample
    last: Sample
    samples: int


class Vitals:
    """Samples of every process of a fleet, by name and process id."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, int], list[Sample]] = defaultdict(list)

    @asynccontextmanager
    async def watching(self, fleet: Fleet) -> AsyncIterator[None]:
        """Sample once a second while the block runs."""
        task = asyncio.create_task(self._watch(fleet))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self, fleet: Fleet) -> None:
        while True:
            for process in fleet.processes:
                self.sample(process)
            await asyncio.sleep(SAMPLE_S)

    def sample(self, process: Process) -> None:
        """Take a sample now; a process that is just gone has none."""
        pid = process.pid
        try:
            seen = psutil.Process(pid)
            with seen.oneshot():
                sample = Sample(time.monotonic(), seen.memory_info().rss, seen.num_fds(), seen.num_threads())
        except psutil.Error:
            return
        self.samples[process.name, pid].append(sample)

    def growth(self, process: Process, warm_up: float) -> Growth | None:
        """Of its newest process, after that part of its samples; None with fewer than 6 of them."""
        samples = self.samples[process.name, process.pid]
        if len(samples) < 6:
            return None
        settled = samples[int(len(samples) * warm_up) :]
        part = max(1, len(settled) // 5)
        first, last = _median(settled[:part]), _median(settled[-part:])
        return Growth(
            rss_mib=(last.rss_bytes - first.rss_bytes) / MEBIBYTE,
            fds=last.fds - first.fds,
            threads=last.threads - first.threads,
            first=first,
            last=last,
            samples=len(samples),
        )


def _median(samples: Sequence[Sample]) -> Sample:
    return Sample(
        samples[0].at_s,
        int(statistics.median(sample.rss_bytes for sample in samples)),
        int(statistics.median(sample.fds for sample in samples)),
        int(statistics.median(sample.threads for sample in samples)),
    )


async def leftovers(fleet: Fleet) -> list[str]:
    """What is still held although nobody asks for anything; empty once all is free, which may take a moment."""
    until_s = time.monotonic() + IDLE_PATIENCE_S
    while True:
        held = await _held(fleet)
        if not held or time.monotonic() > until_s:
            return held
        await asyncio.sleep(0.2)


async def _held(fleet: Fleet) -> list[str]:
    held = []
    try:
        listed = await fleet.admin.ListBackends(router_pb2.ListBackendsRequest(), timeout=5)
        for entry in listed.backends:
            if entry.booked_requests:
                held.append(f"router: {entry.booked_requests} requests are booked at {entry.name}")
        of_fleet = (await fleet.status.Status(pb.StatusRequest(), timeout=5)).status
        if of_fleet.requests:
            held.append(f"router: its Status shows {len(of_fleet.requests)} requests")
        for process in fleet.backends:
            assert process.child is not None
            async with open_channel(process.child.service.address) as channel:
                stub = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
                status = (await stub.Status(pb.StatusRequest(), timeout=5)).status
            held += [f"{process.name}: {problem}" for problem in _held_by(status)]
    except grpc.aio.AioRpcError as error:
        held.append(f"{error.code().name}: {error.details()}")
    return held


def _held_by(status: pb.BackendStatus) -> list[str]:
    cache = status.kv_cache
    held = []
    if status.requests:
        held.append(f"{len(status.requests)} requests in its Status")
    if cache.reserved_tokens:
        held.append(f"{cache.reserved_tokens} KV cache tokens are reserved")
    if cache.used_tokens != cache.retained_tokens:
        held.append(f"{cache.used_tokens} KV cache tokens are used, but only {cache.retained_tokens} are retained")
    return held
