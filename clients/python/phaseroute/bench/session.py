"""A whole benchmark: every scenario under every policy, several times, on a fleet that is warm and idle each time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from phaseroute.aio import AsyncClient
from phaseroute.bench.fleet import Fleet, until_idle, warm
from phaseroute.bench.play import OnEvent, Play
from phaseroute.bench.prompts import ScenarioPrompts
from phaseroute.scenarios.planned import Scenario


@dataclass(frozen=True, slots=True)
class Turn:
    """One play to come."""

    scenario: Scenario
    policy: str
    run: int
    """Counts from 0."""


Watch = Callable[[Play], AbstractContextManager[OnEvent]]
"""Entered around each play; what it gives is told of each event."""


def schedule(scenarios: Sequence[Sequence[Scenario]], policies: Sequence[str]) -> tuple[Turn, ...]:
    """Every scenario of each run under every policy. Every other run takes the policies from last to first: what drifts
    with time then favours none of them. `scenarios`: by run; those of equal place differ in what was drawn."""
    return tuple(
        Turn(scenario, policy, run)
        for run, drawn in enumerate(scenarios)
        for scenario in drawn
        for policy in (policies if run % 2 == 0 else policies[::-1])
    )


class Session:
    """Plays turns one after the other and keeps what came of them."""

    def __init__(self, client: AsyncClient, fleet: Fleet, *, seed: int, tell: Callable[[str], None]) -> None:
        """`tell` gets a sentence about whatever makes a play less than clean."""
        self._client = client
        self._fleet = fleet
        self._seed = seed
        self._tell = tell
        self.plays: list[Play] = []
        """In order; the last one is incomplete while it is played, and when it was cut off."""

    async def run(self, turns: Sequence[Turn], watch: Watch) -> AsyncIterator[Play]:
        """Give each play when it has ended. Raises `PhaserouteError` when nobody is left to ask."""
        for number, turn in enumerate(turns):
            prompts = ScenarioPrompts(turn.scenario, seed=self._seed, play=number)
            await until_idle(self._client, self._fleet, self._tell)
            await warm(self._client, self._fleet, prompts, self._tell)
            await until_idle(self._client, self._fleet, self._tell)
            play = Play(turn.scenario, turn.policy, turn.run, self._fleet)
            self.plays.append(play)
            with watch(play) as on_event:
                await play.send(self._client, prompts, on_event)
            yield play
