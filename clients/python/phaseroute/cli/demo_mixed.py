"""`phaseroute demo --mixed`: two engines behind one router, each faster at something."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from phaseroute.aio import AsyncClient
from phaseroute.burst import OnEvent
from phaseroute.cli import comparison_view, tables
from phaseroute.cli.burst_view import BurstBoard
from phaseroute.cli.up import StackBoard
from phaseroute.comparison import FORCED_PREFIX, Row, Step, Turn, compare, schedule, summarize
from phaseroute.local.plan import (
    NOTHING_KEPT,
    StackPlan,
    free_ports,
    make_plan,
    mixed_pair,
    stay_on_last_core,
    usable_cores,
)
from phaseroute.local.stack import Stack
from phaseroute.workloads import WORKLOADS, Sizes, Workload

SIMULATED_PAIR: Mapping[str, Mapping[str, Any]] = {
    "sim-decode": {"engine": "simulated", "simulated_prefill_rate": 1500, "simulated_decode_ms": "1:3,4:10"},
    "sim-prefill": {"engine": "simulated", "simulated_prefill_rate": 6000, "simulated_decode_ms": "1:12,4:40"},
}
"""Each four times as fast as the other at what it is named for."""


def mixed_plan(*, simulated: bool) -> StackPlan:
    """The pair that suits this machine, measured anew, or a simulated one."""
    pair = {name: {**settings, "measure": True} for name, settings in mixed_pair().items()}
    return make_plan(SIMULATED_PAIR if simulated else pair, NOTHING_KEPT, free_ports(1)[0])


class MixedDemo:
    """One run of the demo, told as it goes."""

    def __init__(self, console: Console, plan: StackPlan, requests: int, runs: int, sizes: Sizes) -> None:
        """`requests` of the warm burst; the other two, where each request costs more, have half as many."""
        self._console = console
        self._plan = plan
        self._requests = {name: requests if name == "warm" else (requests + 1) // 2 for name in WORKLOADS}
        self._runs = runs
        self._sizes = sizes
        self._names = [service.name for service in plan.backends]
        self._policies = [*(f"{FORCED_PREFIX}{name}" for name in self._names), "round_robin", *comparison_view.ROUTED]
        self._cores = len(usable_cores())

    async def play(self, run_dir: Path) -> None:
        """Start, play every workload under every policy, show, stop. Raises `StartFailed` or `PhaserouteError`."""
        board = StackBoard(self._console, tell_stopping=False)
        async with Stack(self._plan, run_dir, board.update) as stack:
            self._head("Starting two engines and a router")
            with board.live():
                await stack.start_backends()
                stay_on_last_core()
                await stack.start_router()
            async with AsyncClient(self._plan.router.address) as client:
                await self._compare(client)

    async def _compare(self, client: AsyncClient) -> None:
        backends = await client.backends()
        self._console.print(tables.backend_table(backends))
        notes = tables.backend_text(backends)
        if notes:
            self._console.print(Text(notes))
        simulated = any(entry.status.engine.simulated for entry in backends)
        rows: list[Row] = []
        for name, build in WORKLOADS.items():
            workload = await build(client, self._requests[name], self._sizes)
            rows += await self._workload(client, workload, simulated=simulated)
        self._head(comparison_view.marked("In short", simulated=simulated))
        self._console.print(Text(comparison_view.verdict(rows, backends)), style="bold")
        self._console.print(
            "TTFT: time to first token; ITL: inter-token latency. "
            f"Measured by the client on this machine ({self._cores} cores) just now, client and router included; "
            f"runs: {self._runs}. Other machines, models and loads give other numbers.",
            style="dim",
        )

    async def _workload(self, client: AsyncClient, workload: Workload, *, simulated: bool) -> Sequence[Row]:
        self._head(comparison_view.heading(workload.name, workload.requests, simulated=simulated))
        self._console.print(f"{workload.description}; {workload.gap_s * 1000:.0f} ms apart")
        turns: list[Turn] = []
        steps = schedule([workload], self._policies, self._runs)
        async for turn in compare(client, steps, self._names, self._board):
            turns.append(turn)
            # Not as a str: ":llama:" is an emoji to rich.
            self._console.print(Text(f"  {turn.policy}: {turn.result.completion_s:.2f} s"), style="dim")
        if workload.warm:
            reused = (
                f"{name} {usage.cached_tokens} of {usage.prompt_tokens}" for name, usage in turns[-1].warmed.items()
            )
            self._console.print(f"  prompt tokens that were warm: {', '.join(reused)}", style="dim")
        rows = summarize(turns)
        self._console.print(comparison_view.table(rows))
        return rows

    @contextmanager
    def _board(self, step: Step) -> Iterator[OnEvent]:
        workload = step.workload
        board = BurstBoard(self._console, workload.requests, workload.options["max_new_tokens"], keep=False)
        with board.live():
            yield board.update

    def _head(self, title: str) -> None:
        self._console.print(f"\n{title}", style="bold cyan")
