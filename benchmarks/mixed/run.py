"""Starts the backends, sends everything, stops them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.mixed.options import Options
from benchmarks.mixed.sweep import SweepRow, sweep
from phaseroute.aio import AsyncClient
from phaseroute.burst import OnEvent
from phaseroute.cli import tables
from phaseroute.comparison import Step, Turn, compare, schedule
from phaseroute.local.plan import BadPlan, StackPlan, plan_of_flags
from phaseroute.local.stack import Member, Stack
from phaseroute.v1 import inference_pb2
from phaseroute.workloads import WORKLOADS


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that was measured so far."""

    backends: Mapping[str, inference_pb2.BackendStatus]
    """What each said of itself before the first request."""
    turns: tuple[Turn, ...] = ()
    sweeps: tuple[SweepRow, ...] = ()
    complete: bool = False
    """Nothing is left to do."""

    @property
    def simulated(self) -> bool:
        """No model ran on some backend."""
        return any(status.engine.simulated for status in self.backends.values())


class Run:
    """One run of the benchmark."""

    def __init__(self, options: Options, tell: Callable[[str], None], keep: Callable[[Outcome], None]) -> None:
        """`tell` gets the progress in words, `keep` all that was measured, after each burst and each sweep."""
        self._options = options
        self._tell = tell
        self._keep = keep
        self._plan = plan_of_flags(options.backends)

    async def play(self, run_dir: Path) -> Outcome:
        """Start everything, measure everything, stop everything. Raises `StartFailed`, `BadPlan` or
        `PhaserouteError`."""
        options = self._options
        async with Stack(self._plan, run_dir, self._on_change) as stack:
            await stack.start_backends()
            if options.client_cpus:
                os.sched_setaffinity(0, options.client_cpus)
            outcome = Outcome(await _statuses(self._plan))
            _check_sweeps(options, outcome.backends)
            if options.workloads:
                await stack.start_router()
                async with AsyncClient(self._plan.router.address) as client:
                    outcome = await self._compare(client, outcome)
            addresses = {service.name: service.address for service in self._plan.backends}
            for each in options.sweeps:
                async with AsyncClient(addresses[each.backend]) as client:
                    rows = await sweep(client, each.backend, each.requests, options.runs, self._tell)
                outcome = replace(outcome, sweeps=(*outcome.sweeps, *rows))
                self._keep(outcome)
        return replace(outcome, complete=True)

    async def _compare(self, client: AsyncClient, outcome: Outcome) -> Outcome:
        options = self._options
        notes = tables.backend_text(await client.backends())
        if notes:
            self._tell(notes)
        workloads = [
            await WORKLOADS[name](client, requests, options.sizes)
            for requests in options.requests
            for name in options.workloads
        ]
        steps = schedule(workloads, options.policies, options.runs)
        async for turn in compare(client, steps, list(options.backends), self._watch):
            outcome = replace(outcome, turns=(*outcome.turns, turn))
            self._keep(outcome)
        return outcome

    @contextmanager
    def _watch(self, step: Step) -> Iterator[OnEvent]:
        work = step.workload
        self._tell(f"run {step.run + 1} of {self._options.runs}, {work.name}, requests: {work.requests}, {step.policy}")
        yield lambda *_: None

    def _on_change(self, member: Member) -> None:
        self._tell(f"{member.service.name}: {member.phase.value}")


async def _statuses(plan: StackPlan) -> Mapping[str, inference_pb2.BackendStatus]:
    statuses = {}
    for service in plan.backends:
        async with AsyncClient(service.address) as client:
            statuses[service.name] = await client.status()
    return statuses


def _check_sweeps(options: Options, backends: Mapping[str, inference_pb2.BackendStatus]) -> None:
    for each in options.sweeps:
        most, largest = max(each.requests), backends[each.backend].max_active
        if most > largest:
            raise BadPlan(
                f"--sweep {each.backend} goes up to {most} requests at once, but {each.backend} runs {largest}; give "
                f"it --max-active {most} and as many --kv-tokens as that needs, or end the sweep at {largest}."
            )
