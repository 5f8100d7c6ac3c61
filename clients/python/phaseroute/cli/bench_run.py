"""One benchmark from its first call to its last file."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from phaseroute.aio import AsyncClient
from phaseroute.bench.environment import machine, versions
from phaseroute.bench.fleet import DIRECT, Fleet, check_policies, find_fleet
from phaseroute.bench.output import Folder
from phaseroute.bench.play import Play
from phaseroute.bench.report import Report
from phaseroute.bench.session import Session, schedule
from phaseroute.cli import scenario_view, tables
from phaseroute.cli.bench_board import PlayBoard
from phaseroute.cli.connect import PLAIN, Security
from phaseroute.cli.up import StackBoard
from phaseroute.comparison import FORCED_PREFIX
from phaseroute.errors import PhaserouteError
from phaseroute.local.plan import StackPlan, stay_on_last_core
from phaseroute.local.stack import Stack
from phaseroute.plots import PlotsMissing
from phaseroute.scenarios.planned import Scenario
from phaseroute.scenarios.served import Run
from phaseroute.scenarios.summary import PolicyRow, as_json, summarize

DEFAULT_POLICIES = ("two_phase", "predictive")
"""After every backend on its own."""
LATE_S = 0.05
"""A client that sends a request later than this disturbs what it measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be measured."""

    scenarios: tuple[tuple[Scenario, ...], ...]
    """By run; of equal names in each."""
    policies: tuple[str, ...]
    """Empty: every backend on its own, then `DEFAULT_POLICIES`."""
    seed: int
    command: str
    folder: Folder | None


class BenchRun:
    """One benchmark, told as it goes. What was measured is kept whatever ends it."""

    def __init__(self, console: Console, task: Task) -> None:
        self._console = console
        self._task = task
        self._fleet: Fleet | None = None
        self._session: Session | None = None
        self._policies: tuple[str, ...] = ()
        self._planned = 0
        self._notes: list[str] = []
        self._when = time.strftime("%Y-%m-%d %H:%M %Z")

    async def local(self, plan: StackPlan, run_dir: Path) -> None:
        """Start the plan's services, measure, stop them. Raises `StartFailed` besides what `at` raises."""
        board = StackBoard(self._console, tell_stopping=False)
        async with Stack(plan, run_dir, board.update) as stack:
            self._head("Starting the fleet")
            with board.live():
                await stack.start_backends()
                stay_on_last_core()
                await stack.start_router()
            await self.at(plan.router.address)

    async def at(self, target: str, security: Security = PLAIN) -> None:
        """Measure what runs there. Raises `PhaserouteError` when nobody answers any more, `typer.BadParameter` for a
        policy that is not there, before anything was sent, and `BadFolder`."""
        async with AsyncClient(target, **security) as client:
            fleet = self._fleet = await find_fleet(client)
            self._policies = await self._choose_policies(client, fleet)
            if fleet.routed:
                self._console.print(tables.backend_table(await client.backends()))
            turns = schedule(self._task.scenarios, self._policies)
            self._planned = len(turns)
            board = PlayBoard(self._console, len(turns), len(self._task.scenarios))
            self._head("Playing (SIMULATED backends: no model runs)" if fleet.simulated else "Playing")
            for scenario in self._task.scenarios[0]:
                self._console.print(Text(f"{scenario.name}: {scenario.description}"))
            self._session = Session(client, fleet, seed=self._task.seed, tell=self._note)
            async for play in self._session.run(turns, board.watch):
                self._note_play(play)
                self._keep()

    def finish(self) -> dict[str, Any] | None:
        """Show and write what there is; the summary for machines, None when nothing was begun. Raises `BadFolder`."""
        if self._session is None or self._fleet is None:
            return None
        rows = self._rows()
        if rows:
            self._head("In short" if self._complete else "In short, of what came to its end")
            self._console.print(scenario_view.table(rows, simulated=self._fleet.simulated))
        summary = self._keep()
        if self._task.folder is not None:
            try:
                pictures = self._task.folder.draw(self._runs())
            except PlotsMissing as missing:
                self._note(str(missing))
                pictures = []
            report = Report(
                command=self._task.command,
                when=self._when,
                simulated=self._fleet.simulated,
                complete=self._complete,
                scenarios=self._task.scenarios[0],
                rows=rows,
                members=self._fleet.members,
                facts={**machine(), **versions(), "seed": str(self._task.seed)},
                notes=self._notes,
                pictures=pictures,
            )
            path = self._task.folder.write_report(report)
            self._console.print(Text(f"Report: {path}"), soft_wrap=True)
        return summary

    async def _choose_policies(self, client: AsyncClient, fleet: Fleet) -> tuple[str, ...]:
        wanted = self._task.policies
        if not fleet.routed:
            if wanted:
                raise typer.BadParameter(
                    "a single backend has no policies; leave it out, or give a router's --target", param_hint="--policy"
                )
            return (DIRECT,)
        policies = wanted or (*(f"{FORCED_PREFIX}{name}" for name in fleet.names), *DEFAULT_POLICIES)
        try:
            await check_policies(client, policies)
        except PhaserouteError as error:
            if error.field != "routing.policy":
                raise
            raise typer.BadParameter(str(error), param_hint="--policy") from error
        return policies

    def _keep(self) -> dict[str, Any]:
        """Write every request that ended, those of a play that was cut off too."""
        summary = {
            "benchmark": "scenarios",
            "simulated": self._fleet is not None and self._fleet.simulated,
            "complete": self._complete,
            "plays": len(self._runs()),
            "plays_planned": self._planned,
            "seed": self._task.seed,
            "command": self._task.command,
            "scenarios": {each.name: each.description for each in self._task.scenarios[0]},
            "policies": self._policies,
            "late_s": max((play.late_s for play in self._plays), default=0.0),
            "notes": self._notes,
            "rows": as_json(self._rows()),
            "machine": machine(),
            "versions": versions(),
        }
        if self._task.folder is not None:
            self._task.folder.keep([play.as_run() for play in self._plays], summary)
        return summary

    @property
    def _plays(self) -> Sequence[Play]:
        return self._session.plays if self._session else ()

    @property
    def _complete(self) -> bool:
        return self._planned == len(self._runs())

    def _runs(self) -> list[Run]:
        return [play.as_run() for play in self._plays if play.complete]

    def _rows(self) -> tuple[PolicyRow, ...]:
        return summarize(self._runs())

    def _note_play(self, play: Play) -> None:
        where = f"{play.scenario.name}, {play.policy}, run {play.run + 1}"
        counts = Counter(item.code for item in play.served.values())
        for code, message in play.messages.items():
            self._note(f"{where}: {counts[code]} ended with {code}; the first: {message}")
        if play.late_s > LATE_S:
            self._note(f"{where}: this client sent a request {play.late_s:.2f} s late; give it a core of its own")

    def _note(self, note: str) -> None:
        self._notes.append(note)
        self._console.print(Text(f"  {note}"), style="yellow")

    def _head(self, title: str) -> None:
        self._console.print(f"\n{title}", style="bold cyan")
