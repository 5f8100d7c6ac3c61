"""What a decision of the predictive policy costs the router in CPU: 8 backends with 50 requests waiting on each, and a
fleet of 1,000.

    python -m benchmarks.predictive_decision [--decisions 100] [--wide 1000]

Everything but the network: eligibility, shortlist, probes (answered at once), forecasts, choice, booking, record and
log line. "news" replaces every backend's Status before each decision, so nothing can be remembered from the one before;
"burst" decides on the same Statuses again and again, each decision's booking kept. Reading a Status off the wire is
listed on its own: it is paid once a Status, not once a decision. Medians in milliseconds of the thread's CPU; the last
line is JSON. Exit code 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import time
from collections.abc import Sequence

from benchmarks.router_decision import AnsweringStub, logger, median_async_ms, median_ms
from phaseroute.v1 import inference_pb2 as pb
from router_service.decision import Decision
from router_service.fleet import Fleet
from router_service.ledger import Ledger
from router_service.routing import Routing
from router_service.snapshot import Snapshot
from service_kit.requests import parse_generate
from service_kit.telemetry import Telemetry

CANDIDATES = 8
QUEUED = 50
TARGET_MS = 10.0
WIDE_QUEUED = 4
WIDE_TARGET_MS = 20.0
REQUEST = pb.GenerateRequest(prompt=pb.Prompt(text="word " * 400), max_new_tokens=128, workload="chat")


def status(index: int, queued: int, sequence: int) -> pb.BackendStatus:
    """Four decode, the others wait with a prefix of 496 of 516 tokens."""
    scale = 1 + index % 7 / 10
    return pb.BackendStatus(
        incarnation=f"i{index}",
        sequence=sequence,
        model=pb.ModelInfo(name="m", fingerprint="f", context_tokens=8192),
        max_active=4,
        isolated_rates=pb.IsolatedRates(prefill_tokens_per_s=170 / scale, decode_tokens_per_s=80 / scale),
        step_model=pb.StepModel(
            base_s=0.004 * scale,
            per_token_s=0.005 * scale,
            per_row_s=0.006 * scale,
            per_attended_s=2e-6,
            samples=500,
            row_corrections=[pb.RowCorrection(rows=1, seconds=0.001), pb.RowCorrection(rows=4, seconds=-0.001)],
        ),
        step_rules=pb.StepRules(step_tokens=256, step_target_s=0.15),
        kv_cache=pb.KvCacheStatus(capacity_tokens=65_536),
        scheduling_policy="fcfs",
        requests=[
            pb.RequestStatus(
                attempt_id=f"{index}-{waiting}",
                phase=pb.REQUEST_PHASE_DECODE if waiting < 4 else pb.REQUEST_PHASE_QUEUED,
                remaining_prefill_tokens=0 if waiting < 4 else 20,
                remaining_decode_tokens=100 + waiting % 28,
                generated_tokens=28 - waiting % 28 if waiting < 4 else 0,
                context_tokens=530 if waiting < 4 else 0,
                prompt_tokens=516,
                cached_tokens=496 if waiting < 4 else 0,
                workload="chat",
            )
            for waiting in range(4 + queued)
        ],
    )


async def measure(decisions: int, backends: int, queued: int) -> dict[str, float]:
    """One fleet's figures."""
    ledger = Ledger()
    names = [f"backend-{index}" for index in range(backends)]
    fleet = Fleet(dict.fromkeys(names, "127.0.0.1:1"), ledger)
    wire = [status(index, queued, 1) for index in range(backends)]
    for name in names:
        fleet.backends[name].stub = AnsweringStub()
    routing = Routing(fleet, ledger, policy="predictive", probe_timeout_s=0.05, telemetry=Telemetry())
    spec = parse_generate(REQUEST)
    log = logger()

    def hear() -> None:
        for name, message in zip(names, wire, strict=True):
            fleet.backends[name].hear(Snapshot.of(message), time.monotonic())

    async def decide(*, keep: bool) -> Decision:
        routed = await routing.decide(REQUEST.prompt, spec, book=True)
        log(routed.decision)
        assert routed.lease is not None
        if not keep:
            ledger.release(routed.lease)
        return routed.decision

    hear()
    decision = await decide(keep=False)
    assert decision.price.priced_by == "forecast"
    spent_s = []
    for _ in range(decisions):
        hear()
        began_s = time.thread_time()
        await decide(keep=False)
        spent_s.append(time.thread_time() - began_s)
    return {
        "status": median_ms(time.thread_time, lambda: Snapshot.of(wire[0]), decisions),
        "news": 1e3 * sorted(spent_s)[len(spent_s) // 2],
        "burst": await median_async_ms(time.thread_time, lambda: decide(keep=True), decisions),
    }


def main(argv: Sequence[str]) -> int:
    """Print the table; 0 when both fleets stay under their targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=100, help="how many of each kind (default: %(default)s)")
    parser.add_argument("--wide", type=int, default=1000, help="backends of the wide fleet (default: %(default)s)")
    arguments = parser.parse_args(argv)
    narrow = asyncio.run(measure(arguments.decisions, CANDIDATES, QUEUED))
    wide = asyncio.run(measure(arguments.decisions, arguments.wide, WIDE_QUEUED))
    print(f"{'CPU ms':<34}{'one Status':>12}{'news':>9}{'burst':>9}{'target':>9}")
    for label, figures, target_ms in (
        (f"{CANDIDATES} backends, {QUEUED} queued on each", narrow, TARGET_MS),
        (f"{arguments.wide} backends, {WIDE_QUEUED} queued on each", wide, WIDE_TARGET_MS),
    ):
        cells = "".join(f"{figures[kind]:>{width}.3f}" for kind, width in (("status", 12), ("news", 9), ("burst", 9)))
        print(f"{label:<34}{cells}{target_ms:>9.0f}")
    print(
        json.dumps(
            {
                "benchmark": "predictive_decision",
                "python": platform.python_version(),
                "decisions": arguments.decisions,
                "cpu_ms": {str(CANDIDATES): narrow, str(arguments.wide): wide},
                "target_ms": {str(CANDIDATES): TARGET_MS, str(arguments.wide): WIDE_TARGET_MS},
            }
        )
    )
    met = max(narrow["news"], narrow["burst"]) < TARGET_MS and max(wide["news"], wide["burst"]) < WIDE_TARGET_MS
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
