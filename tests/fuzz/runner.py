"""One fuzz run: a small fleet that is sent nonsense, and must go on as if nothing were."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from phaseroute.v1 import router_pb2
from service_kit.channels import open_channel
from tests.chaos.fleet import Fleet, FleetBroken, FleetPlan
from tests.chaos.reference import Reference
from tests.chaos.vitals import leftovers
from tests.chaos.workload import PlannedRequest
from tests.fuzz.calls import BY_PATH, Call
from tests.integration.backends import collect

AT_ONCE = 64
CHANNELS = 4
"""To each service: one connection would do, but not show what several do."""
PATIENCE_S = 30.0
"""Every call's deadline; nothing here takes long, so whatever runs into it hangs."""
GLANCE_S = 0.1
"""How long an endless stream is read."""
MOST_PROBLEMS = 50
CONTEXT_TOKENS = 512
_BACKEND = (
    "--engine", "simulated", "--simulated-prefill-rate", "1e6", "--simulated-decode-ms", "1:0.1",
    "--kv-tokens", str(CONTEXT_TOKENS), "--max-active", "8", "--log-format", "json", "--log-level", "warning",
)  # fmt: skip
FLEET = FleetPlan([_BACKEND, _BACKEND], ("--log-format", "json", "--log-level", "warning"))

_NEVER = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED, grpc.StatusCode.DATA_LOSS}
"""A bug of the service, or a cancel that was none of the client's."""
_GOOD = PlannedRequest(0, "ada", "Is all well?", 24)


@dataclass
class Found:
    """What a run came to."""

    codes: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    problems: list[tuple[str, Call | None]] = field(default_factory=list)
    sent: int = 0
    wall_s: float = 0.0

    def problem(self, what: str, call: Call | None = None) -> None:
        """Note it, and the call that shows it."""
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append((what, call))


async def fuzz(inputs: Iterable[Sequence[Call]], run_dir: Path) -> Found:
    """Send everything; logs are in `run_dir`. Raises `StartFailed` or `FleetBroken` when the fleet does not come up."""
    found = Found()
    began_s = time.monotonic()
    async with Fleet(FLEET, run_dir) as fleet, AsyncExitStack() as exits:
        assert fleet.backends[0].child is not None
        targets = {True: fleet.target, False: fleet.backends[0].child.service.address}
        channels = {
            at_router: [await exits.enter_async_context(open_channel(target)) for _ in range(CHANNELS)]
            for at_router, target in targets.items()
        }
        for chunk in inputs:
            remaining = iter(chunk)
            async with asyncio.TaskGroup() as group:
                for number in range(AT_ONCE):
                    group.create_task(_send(remaining, channels, number % CHANNELS, found))
            for process in fleet.processes:
                try:
                    process.check()
                except FleetBroken as failure:
                    found.problem(str(failure))
                    return found
            await _undo_drains(fleet)
        await _still_well(fleet, found)
    found.wall_s = time.monotonic() - began_s
    return found


async def _send(
    remaining: Iterator[Call], channels: dict[bool, list[grpc.aio.Channel]], channel: int, found: Found
) -> None:
    for call in remaining:
        code, message = await _answered(channels[call.at_router][channel], call)
        found.sent += 1
        found.by_kind[call.how] += 1
        found.codes[code.name] += 1
        where = "router" if call.at_router else "backend"
        if code in _NEVER:
            found.problem(f"{where}: {code.name}: {message}", call)
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            found.problem(f"{where}: no answer within {PATIENCE_S:g} s", call)
        elif code is grpc.StatusCode.UNAVAILABLE and not call.at_router:
            found.problem(f"backend: UNAVAILABLE: {message}", call)
        elif code is not grpc.StatusCode.OK and not message:
            found.problem(f"{where}: {code.name} without a message", call)


async def _answered(channel: grpc.aio.Channel, call: Call) -> tuple[grpc.StatusCode, str]:
    """How a call ends; one without an end is left after its first message, or once it is taken up."""
    method: Any = channel.unary_stream(call.method)
    wire = method(call.body, timeout=PATIENCE_S, metadata=call.metadata)
    try:
        if BY_PATH[call.method].endless:
            # Headers without a message are all that a quiet stream says, and what a refusal begins with.
            await wire.initial_metadata()
            try:
                async with asyncio.timeout(GLANCE_S):
                    if await wire.read() is not grpc.aio.EOF:
                        return grpc.StatusCode.OK, ""
            except TimeoutError:
                return grpc.StatusCode.OK, ""
        async for _ in wire:
            pass
        return await wire.code(), await wire.details() or ""
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    finally:
        wire.cancel()


async def _undo_drains(fleet: Fleet) -> None:
    """Backends whose names were guessed are drained by now."""
    for process in fleet.backends:
        await fleet.admin.DrainBackend(router_pb2.DrainBackendRequest(backend=process.name, undo=True), timeout=10)


async def _still_well(fleet: Fleet, found: Found) -> None:
    """A good request is answered, by the router and by each backend, and nothing is left of the bad ones."""
    for problem in await leftovers(fleet):
        found.problem(problem)
    expected = Reference(CONTEXT_TOKENS).answer(_GOOD)
    for process in fleet.processes:
        assert process.child is not None
        async with open_channel(process.child.service.address) as channel:
            stub = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                answer = await collect(stub.Generate(_GOOD.to_proto(), timeout=10))
            except grpc.aio.AioRpcError as error:
                found.problem(f"{process.name}: a good request ends {error.code().name}: {error.details()}")
                continue
        if (tuple(answer.token_ids), answer.text) != (expected.token_ids, expected.text):
            found.problem(f"{process.name}: a good request gets a wrong answer")
