"""One simulation from its first play to its last file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from phaseroute.bench.output import PLOTS_FOLDER, BadFolder, Folder
from phaseroute.bench.session import schedule
from phaseroute.cli import scenario_view
from phaseroute.cli.tables import plain_table
from phaseroute.comparison import FORCED_PREFIX
from phaseroute.plots import PlotsMissing, crossover, save
from phaseroute.scenarios.planned import Scenario
from phaseroute.scenarios.served import Run
from phaseroute.scenarios.summary import as_json, summarize
from phaseroute.scenarios.trace import write_trace
from simulator.crossover import Asked
from simulator.fleet import step_models
from simulator.maps import fastest, maps_of
from simulator.play import PlayOptions, play
from simulator.profiles import Profile

FEW_BACKENDS = 16
"""Up to so many, each has a line of its own, and Statuses are as frequent as real ones."""
MOST_GAPS = 20_000
"""Requests of a scenario of which inter-token latencies are kept."""
TRACES_FOLDER = "traces"
_USUAL = Asked(prompt_tokens=516, max_new_tokens=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be played."""

    scenarios: tuple[tuple[Scenario, ...], ...]
    """By run; of equal names in each."""
    backends: Mapping[str, Profile]
    policies: tuple[str, ...]
    lengths: str
    seed: int
    learn: bool
    command: str
    folder: Folder | None
    out: Path
    """Where that is."""
    plots: bool


def default_policies(backends: Mapping[str, Profile]) -> tuple[str, ...]:
    """All to the backend that answers fastest while it is alone, then the two that choose."""
    if len(backends) > FEW_BACKENDS:
        return ("two_phase", "predictive")
    return (f"{FORCED_PREFIX}{fastest(backends, _USUAL)}", "two_phase", "predictive")


class SimulateRun:
    """One simulation, told as it goes. What was played is shown and kept whatever ends it."""

    def __init__(self, console: Console, task: Task) -> None:
        self._console = console
        self._task = task
        self._turns = schedule(task.scenarios, task.policies)
        self._runs: list[Run] = []
        self._notes: list[str] = []

    def run(self) -> None:
        """Raises `BadFolder`, and `KeyboardInterrupt` when that ended it, in both cases after the table and the JSON
        line of what was played."""
        self._introduce()
        try:
            self._play()
        finally:
            self._finish()

    def _introduce(self) -> None:
        task = self._task
        if len(task.backends) <= FEW_BACKENDS:
            table = plain_table("backend", "prefill tok/s", "decode tok/s", "batch", "from", left=("backend", "from"))
            for name, profile in task.backends.items():
                rates = profile.speed.rates()
                batch = f"auto, {profile.max_active} at most" if profile.max_active_auto else str(profile.max_active)
                table.add_row(
                    Text(name),
                    f"{rates.prefill_tokens_per_s:.0f}",
                    f"{rates.decode_tokens_per_s:.0f}",
                    batch,
                    Text(profile.source),
                )
            self._console.print(table)
        else:
            self._console.print(f"{len(task.backends):,} simulated backends")
        for scenario in task.scenarios[0]:
            self._console.print(Text(f"{scenario.name}: {scenario.description}"), soft_wrap=True)
        self._console.print()

    def _play(self) -> None:
        task = self._task
        few = len(task.backends) <= FEW_BACKENDS
        models = None if task.learn else step_models(task.backends)
        with self._console.status("") as status:
            for number, turn in enumerate(self._turns, 1):
                run = f", run {turn.run + 1}" if len(task.scenarios) > 1 else ""
                status.update(Text(f"{number} of {len(self._turns)}: {turn.scenario.name}, {turn.policy}{run}"))
                options = PlayOptions(
                    policy=turn.policy,
                    lengths=task.lengths,
                    seed=task.seed + turn.run,
                    learn=task.learn,
                    progress_interval_s=PlayOptions().progress_interval_s if few else None,
                    keep_gaps=len(turn.scenario.requests) <= MOST_GAPS,
                )
                self._runs.append(play(turn.scenario, task.backends, options, run=turn.run, models=models).run)

    def _finish(self) -> None:
        rows = summarize(self._runs)
        if rows:
            self._console.print(scenario_view.table(rows, simulated=True))
        try:
            if self._task.folder is not None:
                self._keep(self._task.folder)
        finally:
            print(json.dumps(self._summary()), flush=True)

    def _summary(self) -> dict[str, Any]:
        task = self._task
        rows = as_json(summarize(self._runs))
        few = len(task.backends) <= FEW_BACKENDS
        if not few:
            for row in rows:
                del row["backends"]
        return {
            "benchmark": "simulate",
            "simulated": True,
            "complete": len(self._runs) == len(self._turns),
            "plays": len(self._runs),
            "plays_planned": len(self._turns),
            "seed": task.seed,
            "command": task.command,
            "scenarios": {each.name: each.description for each in task.scenarios[0]},
            "policies": task.policies,
            "lengths": task.lengths,
            "learn": task.learn,
            "backends": {name: profile.source for name, profile in task.backends.items()}
            if few
            else len(task.backends),
            "notes": self._notes,
            "rows": rows,
        }

    def _keep(self, folder: Folder) -> None:
        folder.keep(self._runs, self._summary())
        traces = self._task.out / TRACES_FOLDER
        try:
            traces.mkdir(exist_ok=True)
            for scenario in self._task.scenarios[0]:
                write_trace(traces / f"{scenario.name.replace(':', '-')}.csv", scenario)
        except OSError as error:
            raise BadFolder(f"{traces} cannot be written: {error.strerror}. Choose another --out.") from error
        self._draw(folder)
        self._console.print(Text(f"Requests, figures, traces{', plots' if self._task.plots else ''}: {self._task.out}"))

    def _draw(self, folder: Folder) -> None:
        if not (self._task.plots and self._runs):
            return
        try:
            with self._console.status("plots"):
                folder.draw(self._runs)
                self._draw_maps(self._task.out / PLOTS_FOLDER)
        except PlotsMissing as missing:
            self._notes.append(str(missing))
            folder.keep(self._runs, self._summary())
            self._console.print(Text(str(missing)), style="yellow")

    def _draw_maps(self, folder: Path) -> None:
        task = self._task
        for stem, chart in maps_of(task.scenarios[0], task.backends, task.policies, task.lengths, task.seed):
            try:
                save(crossover(chart), folder / stem)
            except OSError as error:
                raise BadFolder(f"{folder} cannot be written: {error.strerror}. Choose another --out.") from error
