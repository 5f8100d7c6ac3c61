"""What a routing decision costs the router in CPU of its own, with 8 candidates.

    python -m benchmarks.router_decision [--decisions 300]

Scope: deciding, not relaying. Set-up: one process holds the router and the client; the 8 stub backends, which answer
CacheProbe at once, run in a second process, so their CPU is not counted. "decide" leaves the network out: the stubs
are plain objects. "Route RPC" leaves nothing out: client, both gRPC servers' share in this process and gRPC's own
threads are in it, so it is an upper bound. Each figure is a median over all decisions, in milliseconds of CPU.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import structlog

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from phaseroute.v1 import router_pb2, router_pb2_grpc
from router_service.backend import State
from router_service.decision import Decision, RoutingRequest
from router_service.fleet import Fleet
from router_service.host import host
from router_service.ledger import Ledger
from router_service.policies.two_phase import TwoPhase
from router_service.router import Router
from router_service.routing import Routing
from router_service.settings import RouterSettings
from router_service.snapshot import Snapshot
from service_kit.channels import open_channel
from service_kit.logs import configure_logs
from service_kit.requests import parse_generate
from service_kit.telemetry import Telemetry

CANDIDATES = 8
TARGET_MS = 5.0
REQUESTS_WAITING = 8
"""On each backend."""
REQUEST = pb.GenerateRequest(prompt=pb.Prompt(text="word " * 400), max_new_tokens=128, workload="chat")


def status(index: int) -> pb.BackendStatus:
    """A busy backend's Status; all are close enough that nobody is pruned."""
    return pb.BackendStatus(
        incarnation=f"i{index}",
        sequence=1,
        model=pb.ModelInfo(name="m", fingerprint="f", context_tokens=8192),
        max_active=4,
        isolated_rates=pb.IsolatedRates(prefill_tokens_per_s=500 + index, decode_tokens_per_s=200 + index),
        requests=[
            pb.RequestStatus(
                attempt_id=f"{index}-{waiting}",
                phase=pb.REQUEST_PHASE_DECODE if waiting < 4 else pb.REQUEST_PHASE_QUEUED,
                remaining_prefill_tokens=0 if waiting < 4 else 20,
                remaining_decode_tokens=100,
            )
            for waiting in range(REQUESTS_WAITING)
        ],
    )


class Stub(pb_grpc.InferenceServiceServicer):
    """Says what `status` says; holds most of any prompt."""

    def __init__(self, index: int) -> None:
        self._status = status(index)

    async def CacheProbe(self, request: pb.CacheProbeRequest, context: Any) -> pb.CacheProbeResponse:
        """A warm prefix."""
        return pb.CacheProbeResponse(prompt_tokens=516, reusable_tokens=496)

    async def WatchStatus(self, request: pb.WatchStatusRequest, context: Any) -> Any:
        """Heartbeats."""
        while True:
            yield pb.WatchStatusResponse(status=self._status)
            await asyncio.sleep(1)


async def serve_stubs() -> None:
    """The second process: prints its targets, then serves until stdin closes."""
    servers = []
    targets = []
    for index in range(CANDIDATES):
        server = grpc.aio.server()
        pb_grpc.add_InferenceServiceServicer_to_server(Stub(index), server)  # type: ignore[no-untyped-call]
        targets.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    print(json.dumps(targets), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for server in servers:
        await server.stop(None)


class AnsweredCall:
    """A CacheProbe call that is over already."""

    def __await__(self) -> Any:
        return pb.CacheProbeResponse(prompt_tokens=516, reusable_tokens=496)
        yield

    def cancel(self) -> None:
        """Too late."""


class AnsweringStub:
    """An InferenceServiceStub without a network."""

    def CacheProbe(self, request: pb.CacheProbeRequest, **options: Any) -> AnsweredCall:
        """A warm prefix."""
        return AnsweredCall()


def median_ms(clock: Callable[[], float], work: Callable[[], object], times: int) -> float:
    """CPU of one call."""
    costs = []
    for _ in range(times):
        began = clock()
        work()
        costs.append(clock() - began)
    return 1e3 * statistics.median(costs)


async def median_async_ms(clock: Callable[[], float], work: Callable[[], Awaitable[object]], times: int) -> float:
    """CPU of one call and of whatever else this process does meanwhile."""
    costs = []
    for _ in range(times):
        began = clock()
        await work()
        costs.append(clock() - began)
    return 1e3 * statistics.median(costs)


async def in_process(decisions: int) -> dict[str, float]:
    """The parts of a decision, and all of it but the network."""
    ledger = Ledger()
    names = [f"backend-{index}" for index in range(CANDIDATES)]
    fleet = Fleet(dict.fromkeys(names, "127.0.0.1:1"), ledger)
    for index, name in enumerate(names):
        fleet.backends[name].hear(Snapshot.of(status(index)), time.monotonic())
        fleet.backends[name].stub = AnsweringStub()
    routing = Routing(fleet, ledger, policy="two_phase", probe_timeout_s=0.05, telemetry=Telemetry())
    spec = parse_generate(REQUEST)
    log = logger()

    async def decide() -> Decision:
        routed = await routing.decide(REQUEST.prompt, spec, book=True)
        log(routed.decision)
        if routed.lease is not None:
            ledger.release(routed.lease)
        return routed.decision

    decision = await decide()
    policy, request = TwoPhase(random.Random(0)), RoutingRequest.of(spec)

    def book() -> None:
        ledger.release(ledger.book(names[0], "i0", prompt_tokens=516, reusable_tokens=496, max_new_tokens=128))

    clock = time.thread_time
    return {
        "policy": median_ms(clock, lambda: policy(request, decision.candidates), decisions),
        "ledger": median_ms(clock, book, decisions),
        "record": median_ms(clock, decision.to_proto, decisions),
        "log line": median_ms(clock, lambda: log(decision), decisions),
        "decide": await median_async_ms(clock, decide, decisions),
    }


def logger() -> Callable[[Decision], None]:
    """Writes a decision's log line to memory."""
    configure_logs("json", stream=io.StringIO())
    log = structlog.get_logger("benchmark")
    return lambda decision: log.info("decision", **decision.log_fields())


async def over_grpc(decisions: int) -> dict[str, float]:
    """Route, from call to answer, over loopback."""
    stubs = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        "--stubs",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert stubs.stdout is not None
    assert stubs.stdin is not None
    targets = json.loads(await stubs.stdout.readline())
    flags = [f"--backend=backend-{index}={target}" for index, target in enumerate(targets)]
    settings = RouterSettings.load([*flags, "--listen=127.0.0.1:0", "--probe-timeout-s=1"])
    try:
        async with host(settings) as hosted, open_channel(hosted.server.target) as channel:
            await _all_serving(hosted.router)
            stub = router_pb2_grpc.RouterServiceStub(channel)  # type: ignore[no-untyped-call]
            asked = router_pb2.RouteRequest(request=REQUEST)

            async def route() -> None:
                response = await stub.Route(asked)
                answered = [c.probe == router_pb2.PROBE_OUTCOME_ANSWERED for c in response.decision.candidates]
                assert answered == [True] * CANDIDATES

            await route()
            return {"Route RPC": await median_async_ms(time.process_time, route, decisions)}
    finally:
        stubs.stdin.close()
        await stubs.wait()


async def _all_serving(router: Router) -> None:
    with router.fleet.changes.subscribe() as changes:
        while any(backend.state is not State.SERVING for backend in router.fleet.backends.values()):
            await changes.get()


async def measure(decisions: int) -> dict[str, float]:
    """All figures, in milliseconds."""
    return {**await in_process(decisions), **await over_grpc(decisions)}


def main(argv: Sequence[str]) -> int:
    """Print the table; 0 when a whole Route RPC stays under the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=300, help="how many of each (default: %(default)s)")
    parser.add_argument("--stubs", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.stubs:
        asyncio.run(serve_stubs())
        return 0
    figures = asyncio.run(measure(arguments.decisions))
    print(f"{'part':<12}{'CPU ms':>8}")
    for part, cpu_ms in figures.items():
        print(f"{part:<12}{cpu_ms:>8.3f}")
    print(
        json.dumps(
            {
                "benchmark": "router_decision",
                "candidates": CANDIDATES,
                "decisions": arguments.decisions,
                "python": platform.python_version(),
                "target_ms": TARGET_MS,
                "cpu_ms": {part: round(cpu_ms, 4) for part, cpu_ms in figures.items()},
            }
        )
    )
    return 0 if figures["Route RPC"] < TARGET_MS else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
