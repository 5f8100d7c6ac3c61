"""Fuzz: all calls of router and backend with nonsense in every field and on the wire. `python -m tests.fuzz --help`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

import service_kit  # noqa: F401 - before anything imports gRPC
from phaseroute.local.child import StartFailed
from tests.chaos.fleet import FleetBroken
from tests.fuzz.calls import Call
from tests.fuzz.inputs import chunks
from tests.fuzz.runner import Found, fuzz


def main() -> int:
    """Run it; the exit code is 1 when something was found."""
    chosen = _parse()
    run_dir = chosen.run_dir or Path(tempfile.mkdtemp(prefix="phaseroute-fuzz-"))
    run_dir.mkdir(parents=True, exist_ok=True)
    # Nothing is read from or written to this user's own files; processes inherit it.
    os.environ["XDG_CACHE_HOME"] = os.environ["XDG_STATE_HOME"] = str(run_dir / "home")
    console = Console(stderr=True, width=120)
    console.print(f"Logs: {run_dir}", highlight=False)
    inputs = _replayed(chosen.replay) if chosen.replay else chunks(chosen.seed, chosen.inputs)
    try:
        found = asyncio.run(asyncio.wait_for(fuzz(inputs, run_dir), chosen.limit_s))
    except TimeoutError:
        console.print(f"error: not over after {chosen.limit_s:g} s; give more with --limit-s", markup=False)
        return 1
    except (StartFailed, FleetBroken) as failure:
        console.print(f"error: {failure}", markup=False)
        return 2
    except KeyboardInterrupt:
        return 130
    _show(found, console)
    if found.problems:
        shown = [call for _, call in found.problems if call is not None]
        path = run_dir / "found.jsonl"
        path.write_text("".join(f"{call.to_json()}\n" for call in shown))
        console.print(f"Send those calls again with: python -m tests.fuzz --replay {path}", highlight=False)
        console.print(f"Everything again: python {' '.join(sys.orig_argv[1:])}", highlight=False)
    print(
        json.dumps(
            {
                "benchmark": "fuzz",
                "seed": chosen.seed,
                "inputs": found.sent,
                "by_kind": dict(sorted(found.by_kind.items())),
                "codes": dict(found.codes.most_common()),
                "problems": len(found.problems),
                "wall_s": round(found.wall_s, 1),
            }
        )
    )
    return 1 if found.problems else 0


def _show(found: Found, console: Console) -> None:
    codes = ", ".join(f"{count} {code}" for code, count in found.codes.most_common())
    console.print(f"{found.sent} calls in {found.wall_s:.0f} s: {codes}", highlight=False)
    for what, call in found.problems:
        at = "" if call is None else f" [{call.method.rpartition('/')[2]}, {call.how}]"
        console.print(f"BROKEN: {what}{at}", style="red", markup=False)


def _replayed(path: Path) -> Iterator[Sequence[Call]]:
    yield [Call.from_json(line) for line in path.read_text().splitlines()]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=Path, help="send the calls of this file instead, as an earlier run found them")
    parser.add_argument("--run-dir", type=Path, help="logs go here; default: a new temporary folder")
    parser.add_argument("--limit-s", type=float, default=1200.0, help="the run is given up after so long")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
