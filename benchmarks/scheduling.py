"""Who waits for whom under each scheduling policy: head-of-line blocking, and interactive requests beside a backlog.

    python -m benchmarks.scheduling [--scenarios head_of_line mixed backlog] [--seed 1] [--max-active 4]     SIMULATED
    python -m benchmarks.scheduling --live [--scenarios head_of_line backlog] [--cpus 0] [-- extra flags of the backend]

Without --live: the real scheduler over the simulated engine in virtual time (simulator/scheduling.py); takes half a
minute. With it: smaller scenarios on a real llama.cpp backend, one process a policy; takes minutes, and seconds are the
client's. Prints a table and, last, one JSON line. Seconds count from a request's arrival, except "all done", which
counts from the first arrival.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence

import grpc
from rich.console import Console
from rich.table import Table

from benchmarks.launch import backend
from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from simulator.scheduling import BATCH, SCENARIOS, Arrival, Outcome, Rule, prompt, rules, simulate

LABELS = ("scenario", "policy", "kind", "n", "TTFT p50", "p95", "max", "all done")
LIVE_SCENARIOS = ("head_of_line", "backlog")


async def run_live(arrivals: Sequence[Arrival], rule: Rule, flags: Sequence[str]) -> list[Outcome]:
    """On a llama.cpp backend of its own; a first request, not counted, warms it up."""
    told = ["--scheduling", rule.name, "--promote-batch-after-s", str(rule.promote_after_s)]
    async with backend([*told, *flags]) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        await _ask(stub, len(arrivals), Arrival(0.0, "warm", 32, 8), time.perf_counter())
        begin_s = time.perf_counter()
        return await asyncio.gather(*(_ask(stub, index, each, begin_s) for index, each in enumerate(arrivals)))


async def _ask(stub: pb_grpc.InferenceServiceStub, index: int, arrival: Arrival, begin_s: float) -> Outcome:
    await asyncio.sleep(begin_s + arrival.at_s - time.perf_counter())
    sent_s = time.perf_counter()
    call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse] = stub.Generate(
        pb.GenerateRequest(
            prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt(index, arrival.prompt_tokens, range(1000, 40_000)))),
            max_new_tokens=arrival.new_tokens,
            ignore_eos=True,
            priority=arrival.priority.value,
        )
    )
    await call.read()
    ttft_s = time.perf_counter() - sent_s
    while await call.read() is not grpc.aio.EOF:
        pass
    return Outcome(arrival.kind, ttft_s, time.perf_counter() - begin_s)


def rows(scenario: str, rule: Rule, outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """One line for each kind of request, as numbers."""
    lines: list[dict[str, object]] = []
    for kind in sorted({outcome.kind for outcome in outcomes} - {"running"}):
        mine = [outcome for outcome in outcomes if outcome.kind == kind]
        ttft = [outcome.ttft_s for outcome in mine]
        p95 = statistics.quantiles(ttft, n=20, method="inclusive")[-1] if len(ttft) > 1 else ttft[0]
        lines.append(
            {
                "scenario": scenario,
                "policy": rule.label,
                "kind": kind,
                "requests": len(mine),
                "ttft_p50_s": round(statistics.median(ttft), 2),
                "ttft_p95_s": round(p95, 2),
                "ttft_max_s": round(max(ttft), 2),
                "all_done_s": round(max(outcome.ended_at_s for outcome in mine), 1),
            }
        )
    return lines


async def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """Every scenario under every rule."""
    lines = []
    flags = ["--cpus", options.cpus, "--max-active", str(options.max_active), *options.backend_flags]
    for scenario in options.scenarios or (LIVE_SCENARIOS if options.live else SCENARIOS):
        arrivals = SCENARIOS[scenario](random.Random(options.seed), small=options.live)
        for rule in rules(arrivals):
            if options.live:
                outcomes = await run_live(arrivals, rule, flags)
            else:
                outcomes = simulate(arrivals, rule, max_active=options.max_active)
            lines += rows(scenario, rule, outcomes)
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", action="store_true", help="on a llama.cpp backend instead of in virtual time")
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), help="default: all, live without mixed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-active", type=int, default=BATCH, help="largest batch; the workload stays the same")
    parser.add_argument("--cpus", default="0", help="cores of the live backend")
    parser.add_argument("backend_flags", nargs="*", help="more flags for the live backend, after --")
    options = parser.parse_args()
    lines = asyncio.run(measure(options))
    source = "llama.cpp" if options.live else "SIMULATED"
    table = Table(title=f"Time to first token by scheduling policy, seconds ({source}, batch of {options.max_active})")
    for label in LABELS:
        table.add_column(label, justify="left" if label in ("scenario", "policy", "kind") else "right", no_wrap=True)
    for line in lines:
        table.add_row(*map(str, line.values()))
    Console(width=max(Console().width, 100)).print(table)
    summary = {"simulated": not options.live, "seed": options.seed, "max_active": options.max_active, "rows": lines}
    print(json.dumps({"benchmark": "scheduling", **summary}))


if __name__ == "__main__":
    main()
