"""Progress of a play on a terminal; elsewhere a line when it has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from phaseroute.bench.play import OnEvent, Play
from phaseroute.errors import PhaserouteError
from phaseroute.results import Delta, Finished


class PlayBoard:
    """Shows one play after the other."""

    def __init__(self, console: Console, plays: int, runs: int) -> None:
        """`plays`: of the whole benchmark; `runs`: of each scenario under each policy."""
        self._console = console
        self._plays = plays
        self._runs = runs
        self._number = 0

    @contextmanager
    def watch(self, play: Play) -> Iterator[OnEvent]:
        """While it is played."""
        self._number += 1
        tokens = 0
        started: set[int] = set()
        begun_s = time.monotonic()

        def on_event(index: int, event: Delta | Finished | PhaserouteError) -> None:
            nonlocal tokens
            if isinstance(event, Delta):
                tokens += len(event.token_ids)
                started.add(index)

        def line() -> RenderableType:
            total, ended = len(play.scenario.requests), len(play.served)
            lost = sum(not item.ok for item in play.served.values())
            table = Table(box=None, show_header=False, padding=(0, 1))
            table.add_row(
                Text(f"{self._number} of {self._plays}: {self._name(play)}"),
                ProgressBar(total, ended, width=24),
                f"{ended} of {total} ended{f', {lost} lost' if lost else ''}, "
                f"{len(started - play.served.keys())} running, {tokens:,} tokens, {time.monotonic() - begun_s:.0f} s",
            )
            return table

        if self._console.is_terminal:
            with Live(get_renderable=line, console=self._console, refresh_per_second=5, transient=True):
                yield on_event
        else:
            yield on_event
        self._tell(play)

    def _tell(self, play: Play) -> None:
        run = play.as_run()
        answered = sum(item.ok for item in run.served)
        # Not as a str: ":name:" is an emoji to rich.
        self._console.print(
            Text(f"  {self._name(play)}: {run.completion_s:.2f} s, {answered} of {len(run.served)} answered"),
            style="dim",
        )

    def _name(self, play: Play) -> str:
        run = f", run {play.run + 1}" if self._runs > 1 else ""
        return f"{play.scenario.name}, {play.policy}{run}"
