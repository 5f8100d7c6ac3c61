"""How a burst and the comparison of two look in a terminal, or in a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from phaseroute.burst import BurstResult, RequestResult
from phaseroute.cli import tables
from phaseroute.results import Delta, Finished


class BurstBoard:
    """Progress of a running burst: a live table on a terminal, a line for each finished request elsewhere. Without
    `keep` nothing of it stays: the table goes away, and elsewhere there are no lines."""

    def __init__(self, console: Console, requests: int, max_new_tokens: int, *, keep: bool = True) -> None:
        self._console = console
        self._max_new_tokens = max_new_tokens
        self._keep = keep
        self._tokens = [0] * requests
        self._finished: dict[int, Finished] = {}

    def update(self, index: int, event: Delta | Finished) -> None:
        """Something came in for a request."""
        if isinstance(event, Delta):
            self._tokens[index] += len(event.token_ids)
            return
        self._finished[index] = event
        if self._keep and not self._console.is_terminal:
            self._console.print(
                f"  request {index + 1} finished on {_backend(event)}, "
                f"{len(self._finished)} of {len(self._tokens)} done"
            )

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show the table while the block runs; its last state stays on the screen if it is to be kept."""
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self._table, console=self._console, refresh_per_second=5, transient=not self._keep):
            yield

    def _table(self) -> RenderableType:
        table = Table(box=None, show_header=False, padding=(0, 1))
        for index, tokens in enumerate(self._tokens):
            finished = self._finished.get(index)
            bar = ProgressBar(self._max_new_tokens, tokens, width=32)
            note = f"finished on {_backend(finished)}" if finished else "generating" if tokens else "waiting"
            table.add_row(f"request {index + 1}", bar, f"{tokens} tokens", Text(note, style="" if finished else "dim"))
        return table


def decisions(result: BurstResult) -> RenderableType:
    """The candidate table of every decision of a burst."""
    table = tables.candidate_table(labelled=True)
    for number, request in enumerate(result.requests, start=1):
        if request.decision:
            tables.add_candidates(table, request.decision, str(number))
            table.add_section()
    return table


def requests_side_by_side(forced: BurstResult, mixed: BurstResult) -> RenderableType:
    """Time to first token and end-to-end of each request in both runs, then their medians."""
    table = tables.plain_table(
        "#", "forced to", "first token (s)", "end to end (s)", "mixed, on", "first token (s)", "end to end (s)",
        left=("forced to", "mixed, on"),
    )  # fmt: skip
    for number, (one, other) in enumerate(zip(forced.requests, mixed.requests, strict=True), start=1):
        style = "bold green" if one.backend != other.backend else ""
        table.add_row(str(number), *_times(one), *_times(other), style=style)
    table.add_section()
    table.add_row("", *_medians(forced), *_medians(mixed))
    return table


def summary(forced: BurstResult, mixed: BurstResult) -> str:
    """Completion times and their ratio."""
    ratio = mixed.completion_s / forced.completion_s
    counts: dict[str, int] = {}
    for request in mixed.requests:
        counts[request.backend] = counts.get(request.backend, 0) + 1
    split = ", ".join(f"{count} on {name}" for name, count in sorted(counts.items()))
    return (
        f"Completion of the burst: forced {forced.completion_s:.2f} s "
        f"({forced.generated_tokens / forced.completion_s:.0f} tokens/s), "
        f"mixed {mixed.completion_s:.2f} s ({mixed.generated_tokens / mixed.completion_s:.0f} tokens/s; {split}); "
        f"mixed / forced = {ratio:.2f}"
    )


def _times(request: RequestResult) -> tuple[str, str, str]:
    return request.backend, f"{request.ttft_s:.2f}", f"{request.e2e_s:.2f}"


def _medians(result: BurstResult) -> tuple[str, str, str]:
    return (
        "median",
        f"{median(request.ttft_s for request in result.requests):.2f}",
        f"{median(request.e2e_s for request in result.requests):.2f}",
    )


def _backend(event: Finished) -> str:
    return event.routing.backend if event.routing else "the backend"
