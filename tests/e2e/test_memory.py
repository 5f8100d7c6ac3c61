"""Memory of router and backends over thousands of requests, a fifth of them cancelled. Simulated engines."""

from __future__ import annotations

import asyncio
import random

import psutil
import pytest

from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from phaseroute.v1 import router_pb2_grpc
from service_kit.channels import open_channel
from tests.e2e.processes import SIMULATED, serving, started, until_serving
from tests.integration.backends import collect, request

FAST = (*SIMULATED, "--simulated-decode-ms", "1:0.1", "--simulated-prefill-rate", "1e6", "--max-active", "8")
CONCURRENCY = 16
WARM_UP = 1000
MEASURED = 2000
MAX_GROWTH_BYTES = 3 << 20
"""gRPC itself keeps 0.2 KB of each cancelled stream; the rest is the allocator's play between two readings."""


@pytest.mark.timeout(240)
async def test_memory_does_not_grow_over_2000_requests_with_a_fifth_cancelled():
    async with started("backend_service", *FAST) as first, started("backend_service", *FAST) as second:
        flags = [flag for one in (first, second) for flag in ("--backend", f"b{one.process.pid}={await serving(one)}")]
        async with (
            started("router_service", *flags, "--listen", "127.0.0.1:0", "--log-format", "json") as router,
            open_channel(await serving(router)) as channel,
        ):
            await until_serving(router_pb2_grpc.RouterServiceStub(channel), 2)
            drains = [asyncio.ensure_future(drain(service)) for service in (first, second, router)]
            stub = pb_grpc.InferenceServiceStub(channel)
            processes = {name: psutil.Process(s.process.pid) for name, s in (("backend", first), ("router", router))}
            await load(stub, WARM_UP, seed=1)
            before = {name: process.memory_info().rss for name, process in processes.items()}
            cancelled = await load(stub, MEASURED, seed=2)
            growth = {name: process.memory_info().rss - before[name] for name, process in processes.items()}
            for task in drains:
                task.cancel()
    print(f"growth over {MEASURED} requests, {cancelled} cancelled, in KiB:", {k: v >> 10 for k, v in growth.items()})
    assert cancelled == pytest.approx(MEASURED / 5, rel=0.2)
    assert max(growth.values()) < MAX_GROWTH_BYTES


async def load(stub: pb_grpc.InferenceServiceStub, count: int, *, seed: int) -> int:
    """Run so many requests; how many were cancelled."""
    chance = random.Random(seed)
    remaining = iter(range(count))
    cancelled = 0

    async def client() -> None:
        nonlocal cancelled
        for index in remaining:
            prompt = f"shared prefix of all {'x' * chance.randrange(200)} {index}"
            call = stub.Generate(request(prompt, max_new_tokens=chance.randrange(1, 20), ignore_eos=True))
            if chance.random() < 0.2:
                if chance.random() < 0.5:
                    await call.read()
                call.cancel()
                cancelled += 1
            else:
                await collect(call)

    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
    return cancelled


async def drain(service) -> None:
    """Read a process's log away, so that it never waits for a full pipe."""
    while await service.process.stderr.read(65_536):
        pass
