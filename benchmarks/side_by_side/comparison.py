"""Rounds of both sides, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from backend_service.models import locate_model
from benchmarks.side_by_side.backend import backend
from benchmarks.side_by_side.figures import MEMORY, RESIDENT, figures_of
from benchmarks.side_by_side.llama_server import llama_server
from benchmarks.side_by_side.load import Running, play
from benchmarks.side_by_side.workload import KV_TOKENS, WORKLOADS, Ask, Workload, token_ids

SIDES = ("ours", "peer")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    rounds: int
    core: int
    client_core: int
    workloads: tuple[str, ...]
    peer_slots: int
    backend_flags: tuple[str, ...]


@dataclass(slots=True)
class SideRound:
    """One side's part of a round."""

    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    """By workload and name."""
    first_tokens: list[int] = field(default_factory=list)
    """Of the measured answers, in order."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Of the last server, the one with the larger cache, as far as it tells them."""


class Comparison:
    """Runs a plan."""

    def __init__(self, plan: Plan, python: Path, profiles: Path) -> None:
        """`python`: the peer's interpreter. `profiles`: where our backend saves what it measures at its first start."""
        self._plan = plan
        self._python = python
        self._profiles = profiles
        self._model = locate_model("default")
        self._progress = Console(stderr=True)

    async def run(self) -> dict[str, list[SideRound]]:
        """By side, one entry a round. The sides take turns at being first."""
        results: dict[str, list[SideRound]] = {side: [] for side in SIDES}
        for round_ in range(self._plan.rounds):
            for side in SIDES if round_ % 2 == 0 else SIDES[::-1]:
                results[side].append(await self._side_round(side, round_))
        return results

    async def _side_round(self, side: str, round_: int) -> SideRound:
        """On servers of its own, with prompts of its own: nothing is warm but what a workload warms."""
        result = SideRound()
        plays = {name: WORKLOADS[name](f"{name} {round_}") for name in self._plan.workloads}
        for kv_tokens in sorted({workload.kv_tokens for workload in plays.values()}):
            async with self._started(side, kv_tokens) as running:
                await play(Workload((Ask(token_ids(f"warm up {round_}", 8), 2),)), running.server)
                for name, workload in plays.items():
                    if workload.kv_tokens == kv_tokens:
                        self._progress.print(f"round {round_ + 1} of {self._plan.rounds}, {side}: {name}", style="dim")
                        played = await play(workload, running.server)
                        result.figures[name] = figures_of(name, played)
                        result.first_tokens += [answer.first_token for answer in played.measured]
                if kv_tokens == KV_TOKENS:
                    result.figures[MEMORY] = {RESIDENT: running.process.resident_mib()}
                result.settings = running.settings
        return result

    def _started(self, side: str, kv_tokens: int) -> AbstractAsyncContextManager[Running]:
        plan = self._plan
        if side == "peer":
            return llama_server(self._python, self._model, kv_tokens=kv_tokens, slots=plan.peer_slots, core=plan.core)
        return backend(
            self._model, kv_tokens=kv_tokens, core=plan.core, profiles=self._profiles, flags=plan.backend_flags
        )
