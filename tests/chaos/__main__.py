"""Chaos: a fleet of processes under load, and what happens to fleets. `python -m tests.chaos --help`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console

import service_kit  # noqa: F401 - before anything imports gRPC
from phaseroute.local.child import StartFailed
from tests.chaos.fleet import FleetBroken
from tests.chaos.runner import Options, run


def main() -> int:
    """Run it; the exit code is 1 when a promise was broken."""
    options, run_dir, limit_s = _parse()
    run_dir.mkdir(parents=True, exist_ok=True)
    # Nothing is read from or written to this user's own files; processes inherit it.
    os.environ["XDG_CACHE_HOME"] = os.environ["XDG_STATE_HOME"] = str(run_dir / "home")
    console = Console(stderr=True, width=120)
    console.print(f"Logs: {run_dir}", highlight=False)
    try:
        report = asyncio.run(asyncio.wait_for(run(options, run_dir), limit_s))
    except TimeoutError:
        console.print(f"error: not over after {limit_s:g} s; give more with --limit-s", markup=False)
        return 1
    except (StartFailed, FleetBroken) as failure:
        console.print(f"error: {failure}", markup=False)
        return 2
    except KeyboardInterrupt:
        return 130
    report.show(console)
    if report.broken:
        again = " ".join(sys.orig_argv[1:])
        console.print(f"Play it again with: python {again}", markup=False, highlight=False)
        console.print(
            f"What happened when: faults.jsonl, requests.jsonl and logs in {run_dir}", markup=False, highlight=False
        )
    print(report.line())
    return 1 if report.broken else 0


def _parse() -> tuple[Options, Path, float]:
    default = Options()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--requests", type=int, default=default.requests)
    parser.add_argument("--faults", type=int, default=default.faults)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--engine", choices=("simulated", "llama_cpp"), default=default.engine)
    parser.add_argument("--router-faults", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--run-dir", type=Path, help="logs go here; default: a new temporary folder")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="the run is given up after so long")
    chosen = parser.parse_args()
    options = Options(chosen.requests, chosen.faults, chosen.seed, chosen.engine, chosen.router_faults)
    return options, chosen.run_dir or Path(tempfile.mkdtemp(prefix="phaseroute-chaos-")), chosen.limit_s


if __name__ == "__main__":
    sys.exit(main())
