"""Soak: a fleet at a steady load for a long time, whose memory and descriptors stay where they are.
`python -m tests.chaos.soak --help`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
from rich.console import Console
from rich.table import Table

import service_kit  # noqa: F401 - before anything imports gRPC
from phaseroute.local.child import StartFailed
from phaseroute.v1 import inference_pb2 as pb
from tests.chaos.fleet import Fleet, FleetBroken, FleetPlan
from tests.chaos.ledger import Ledger, Outcome
from tests.chaos.player import Player
from tests.chaos.reference import Reference
from tests.chaos.vitals import SAMPLE_S, Growth, Vitals, leftovers
from tests.chaos.workload import CLIENTS, PlannedRequest

BACKENDS = 3
BATCH = 8
CONTEXT_TOKENS = 8192
PREFILL_TOKENS_PER_S = 5000.0
FULL_STEP_S = 0.04
PROMPT_TOKENS = (50, 400)
NEW_TOKENS = (10, 70)
CANCELLED = 0.05
WARM_UP = 0.25
"""Of the run; what grows in it are buffers, tables of lengths and prefixes, and the allocator's own."""
MOST_FDS = 2
_BACKEND = (
    "--engine", "simulated", "--simulated-prefill-rate", f"{PREFILL_TOKENS_PER_S:g}",
    "--simulated-decode-ms", f"1:20,{BATCH}:{1000 * FULL_STEP_S:g}", "--max-active", str(BATCH),
    "--kv-tokens", str(CONTEXT_TOKENS), "--log-format", "json", "--log-level", "warning",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """What to run."""

    minutes: float = 30.0
    load: float = 0.8
    """Of what the backends' full batches can do."""
    seed: int = 1
    most_growth_mib: float = 5.0
    """Of any process, after the warm-up."""

    @property
    def requests_per_s(self) -> float:
        """A request's work at a full batch: its prompt alone, then its share of each step."""
        prefill_s = statistics.mean(PROMPT_TOKENS) / PREFILL_TOKENS_PER_S
        decode_s = statistics.mean(NEW_TOKENS) * FULL_STEP_S / BATCH
        return self.load * BACKENDS / (prefill_s + decode_s)


@dataclass
class Soaked:
    """What a run came to."""

    options: Options
    ledger: Ledger = field(default_factory=Ledger)
    growths: dict[str, Growth | None] = field(default_factory=dict)
    active: list[int] = field(default_factory=list)
    """Requests in the batches of all backends, second by second."""
    problems: list[str] = field(default_factory=list)

    @property
    def batch_use(self) -> float:
        """How full the batches were on average; how full they were meant to be is `Options.load`."""
        return statistics.mean(self.active) / (BACKENDS * BATCH) if self.active else 0.0


async def soak(options: Options, run_dir: Path) -> Soaked:
    """Play it; logs are in `run_dir`. Raises `StartFailed` or `FleetBroken` when the fleet does not come up."""
    soaked, vitals = Soaked(options), Vitals()
    plan = FleetPlan([_BACKEND] * BACKENDS, ("--log-format", "json", "--log-level", "warning"))
    async with Fleet(plan, run_dir) as fleet:
        player = Player(fleet, soaked.ledger, Reference(CONTEXT_TOKENS).answer)
        async with player.connected(), vitals.watching(fleet), _counting(fleet, soaked.active):
            async with asyncio.TaskGroup() as group:
                async for planned in _arrivals(options):
                    group.create_task(player.request(planned))
            soaked.growths = {process.name: vitals.growth(process, WARM_UP) for process in fleet.processes}
            soaked.problems += await leftovers(fleet)
        for process in fleet.processes:
            process.check()
    soaked.problems += soaked.ledger.problems
    if lost := len(list(soaked.ledger.lost)):
        soaked.problems.append(f"{lost} requests never ended")
    for name, growth in soaked.growths.items():
        soaked.problems += [f"{name} {problem}" for problem in _grown(growth, options)]
    return soaked


async def _arrivals(options: Options) -> AsyncIterator[PlannedRequest]:
    """Each at its moment, at random intervals."""
    chance = random.Random(f"soak {options.seed}")
    until_s = time.monotonic() + 60 * options.minutes
    due_s = time.monotonic()
    for planned in _requests(chance):
        due_s += chance.expovariate(options.requests_per_s)
        if due_s > until_s:
            return
        await asyncio.sleep(due_s - time.monotonic())
        yield planned


def _requests(chance: random.Random) -> Iterator[PlannedRequest]:
    index = 0
    prefixes = [bytes(chance.choices(range(97, 123), k=PROMPT_TOKENS[0] // 2)).decode() for _ in range(8)]
    while True:
        own = chance.randint(*PROMPT_TOKENS) - PROMPT_TOKENS[0] // 2
        prompt = chance.choice(prefixes) + bytes(chance.choices(range(97, 123), k=own)).decode()
        new_tokens = chance.randint(*NEW_TOKENS)
        gives_up = chance.random() < CANCELLED
        yield PlannedRequest(
            index=index,
            client=chance.choice(CLIENTS),
            prompt=prompt,
            max_new_tokens=new_tokens,
            cancel_after_tokens=chance.randint(1, new_tokens) if gives_up else None,
        )
        index += 1


@asynccontextmanager
async def _counting(fleet: Fleet, active: list[int]) -> AsyncIterator[None]:
    async def count() -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            try:
                status = (await fleet.status.Status(pb.StatusRequest(), timeout=5)).status
            except grpc.aio.AioRpcError:
                continue
            active.append(sum(request.phase != pb.REQUEST_PHASE_QUEUED for request in status.requests))

    task = asyncio.create_task(count())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _grown(growth: Growth | None, options: Options) -> Sequence[str]:
    if growth is None:
        return ["ran too short to say whether it grows"]
    problems = []
    if growth.rss_mib > options.most_growth_mib:
        problems.append(f"grew by {growth.rss_mib:.1f} MiB, more than {options.most_growth_mib:g}")
    if growth.fds > MOST_FDS:
        problems.append(f"has {growth.fds} more file descriptors")
    return problems


def summary(soaked: Soaked) -> Mapping[str, object]:
    """The JSON line."""
    outcomes = soaked.ledger.outcomes()
    return {
        "benchmark": "soak",
        **asdict(soaked.options),
        "requests": len(soaked.ledger.entries),
        "requests_per_s": round(soaked.options.requests_per_s, 2),
        "batch_use": round(soaked.batch_use, 3),
        "outcomes": {outcome.value: outcomes[outcome] for outcome in Outcome if outcomes[outcome]},
        "rss_growth_mib": {name: growth and round(growth.rss_mib, 2) for name, growth in soaked.growths.items()},
        "fd_growth": {name: growth and growth.fds for name, growth in soaked.growths.items()},
        "problems": len(soaked.problems),
    }


def _show(soaked: Soaked, console: Console) -> None:
    table = Table(title="After the warm-up, medians of the first and the last fifth of the time")
    for column in ("process", "MiB then", "MiB last", "growth MiB", "descriptors", "threads"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for name, growth in soaked.growths.items():
        if growth is not None:
            then, last = (sample.rss_bytes / (1 << 20) for sample in (growth.first, growth.last))
            cells = (f"{then:.1f}", f"{last:.1f}", f"{growth.rss_mib:+.2f}", f"{growth.fds:+}", f"{growth.threads:+}")
            table.add_row(name, *cells)
    console.print(table)
    for problem in soaked.problems:
        console.print(f"BROKEN: {problem}", style="red", markup=False)


def main() -> int:
    """Run it; the exit code is 1 when something grew or an answer was wrong."""
    default = Options()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=default.minutes)
    parser.add_argument("--load", type=float, default=default.load, help="of what full batches can do")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--most-growth-mib", type=float, default=default.most_growth_mib)
    parser.add_argument("--run-dir", type=Path, help="logs go here; default: a new temporary folder")
    chosen = parser.parse_args()
    run_dir = chosen.run_dir or Path(tempfile.mkdtemp(prefix="phaseroute-soak-"))
    run_dir.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = os.environ["XDG_STATE_HOME"] = str(run_dir / "home")
    console = Console(stderr=True, width=120)
    console.print(f"Logs: {run_dir}", highlight=False)
    options = Options(chosen.minutes, chosen.load, chosen.seed, chosen.most_growth_mib)
    try:
        soaked = asyncio.run(soak(options, run_dir))
    except (StartFailed, FleetBroken) as failure:
        console.print(f"error: {failure}", markup=False)
        return 2
    except KeyboardInterrupt:
        return 130
    _show(soaked, console)
    print(json.dumps(summary(soaked)))
    return 1 if soaked.problems else 0


if __name__ == "__main__":
    sys.exit(main())
