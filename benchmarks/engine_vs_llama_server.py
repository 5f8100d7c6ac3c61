"""Our llama.cpp backend beside llama.cpp's own server: same core, same model file, same requests, in one go.

    python -m benchmarks.engine_vs_llama_server [--rounds 3] [--core 0] [--client-core 1] [--workloads steady cold]
                                                [--backend-flag=--retained-tokens=4096] [--peer-slots -1]

The peer is the server in the PyPI package xllamacpp, which is installed in an environment of its own (.venv-peer). In
each round either side is started anew, one after the other, the first one alternating, and plays every workload with
new prompts (benchmarks/side_by_side/workload.py has them). The server's whole process is on one core with one thread,
the load client on another. Prints a table and, last, one JSON line. Linux. About 20 minutes.

A `..._ratio` in that line is the median over the rounds of peer's time / our time, so above 1 we are faster;
`ttft_p95_ratio` is that of the steady burst, `gap_ratio` sets the worst gaps against each other, and `memory_ratio` is
the other way round, ours / peer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.side_by_side.comparison import SIDES, Comparison, Plan, SideRound
from benchmarks.side_by_side.faults import SetUpFailed
from benchmarks.side_by_side.figures import Line, lines
from benchmarks.side_by_side.peer_environment import PEER, PEER_VERSION, peer_python
from benchmarks.side_by_side.workload import KV_TOKENS, SLOTS, WORKLOADS
from service_kit.faults import StartupFailed


def plan_of(arguments: Sequence[str] | None = None) -> Plan:
    """From the command line. Raises `SetUpFailed` for what this machine has not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", type=int, default=0, help="the server's core")
    parser.add_argument("--client-core", type=int, help="the load client's; default: the next one there is")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument(
        "--peer-slots",
        type=int,
        choices=(SLOTS, -1),
        default=SLOTS,
        help="4: as many slots with a quarter of the cells each; -1: the peer's own choice, 4 that share all cells",
    )
    parser.add_argument(
        "--backend-flag", action="append", default=[], help="one more flag for our backend, as --backend-flag=--a=b"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    if not hasattr(os, "sched_setaffinity"):
        raise SetUpFailed("This benchmark puts processes on cores, which this system does not offer; run it on Linux.")
    available = sorted(os.sched_getaffinity(0))
    others = [core for core in available if core != options.core]
    client_core = options.client_core
    if client_core is None:
        client_core = others[0] if others else options.core
    for name, core in (("--core", options.core), ("--client-core", client_core)):
        if core not in available:
            raise SetUpFailed(f"{name} {core} is not here; available are {', '.join(map(str, available))}.")
    return Plan(
        options.rounds,
        options.core,
        client_core,
        tuple(name for name in WORKLOADS if name in options.workloads),
        options.peer_slots,
        tuple(options.backend_flag),
    )


def table(plan: Plan, result: Sequence[Line]) -> Table:
    """For people."""
    title = f"Our backend beside llama-server, medians, rounds: {plan.rounds}"
    shown = Table(title=title)
    for label in ("workload", "figure", "ours", "peer", "ratio", "range"):
        shown.add_column(label, justify="left" if label in ("workload", "figure") else "right")
    before = ""
    for line in result:
        name = line.figure.workload
        if before and name != before:
            shown.add_section()
        middle = "" if line.ratio is None else f"{line.ratio:.2f}"
        spread = f"{min(line.ratios):.2f} - {max(line.ratios):.2f}" if len(line.ratios) > 1 else ""
        row = (name if name != before else "", line.figure.name, f"{line.ours:.3g}", f"{line.peer:.3g}", middle, spread)
        shown.add_row(*row)
        before = name
    return shown


def summary(plan: Plan, results: Mapping[str, Sequence[SideRound]], result: Sequence[Line]) -> dict[str, object]:
    """For programs: the last line."""
    ours, peer = (results[side] for side in SIDES)
    first_tokens = [
        left == right
        for one, other in zip(ours, peer, strict=True)
        for left, right in zip(one.first_tokens, other.first_tokens, strict=True)
    ]
    return {
        "benchmark": "engine_vs_llama_server",
        **{line.figure.headline: rounded(line.ratio) for line in result if line.figure.headline},
        "rounds": plan.rounds,
        "machine": machine(),
        "core": plan.core,
        "client_core": plan.client_core,
        "kv_tokens": KV_TOKENS,
        "backend": {"llama-cpp-python": version("llama-cpp-python"), "flags": plan.backend_flags},
        "peer": {PEER: PEER_VERSION, **peer[0].settings},
        "same_first_token": rounded(sum(first_tokens) / len(first_tokens)),
        "figures": [
            {
                "workload": line.figure.workload,
                "figure": line.figure.name,
                "ours": rounded(line.ours),
                "peer": rounded(line.peer),
                "ratios": [rounded(value) for value in line.ratios],
            }
            for line in result
        ],
    }


def rounded(value: float | None) -> float | None:
    """To four significant digits."""
    return None if value is None else float(f"{value:.4g}")


def machine() -> str:
    """For people: processor, cores, system."""
    try:
        words = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        words = []
    names = [line.partition(":")[2].strip() for line in words if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, {platform.platform()}"


def main() -> None:
    """Command line."""
    notes = Console(stderr=True)
    try:
        plan = plan_of()
        if plan.client_core == plan.core:
            notes.print(f"The load client shares core {plan.core} with the servers, which slows both sides.")
        python = peer_python()
        os.sched_setaffinity(0, {plan.client_core})
        with tempfile.TemporaryDirectory() as profiles:
            results = asyncio.run(Comparison(plan, python, Path(profiles)).run())
    except (SetUpFailed, StartupFailed) as failure:
        sys.exit(str(failure))
    result = lines(*([entry.figures for entry in results[side]] for side in SIDES))
    Console(width=max(Console().width, 100)).print(table(plan, result))
    print(json.dumps(summary(plan, results, result)))


if __name__ == "__main__":
    main()
