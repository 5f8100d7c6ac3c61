"""How a summary of runs looks in a terminal, or in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from phaseroute.cli.tables import plain_table
from phaseroute.scenarios import summary_cells
from phaseroute.scenarios.summary import PolicyRow
from phaseroute.scenarios.summary_cells import Cell

MOST_BACKENDS = 8
"""Of more, a table has only those with most requests."""

_FIRST = "policy, requests"


def table(rows: Sequence[PolicyRow], *, simulated: bool) -> Table:
    """Every policy with its figures, and below it what each backend made of them; one scenario after the other."""
    columns = [column for column in summary_cells.COLUMNS if column.brief]
    shown = plain_table(_FIRST, *(column.heading for column in columns), left=(_FIRST,))
    shown.columns[0].no_wrap = True
    shown.title = "SIMULATED: times are given, no model ran" if simulated else None
    shown.title_style = "yellow"
    shown.caption = f"{summary_cells.EXPLANATION}; {summary_cells.certainty(rows)}."
    shown.caption_style = "dim"
    shown.caption_justify = "left"
    for scenario in dict.fromkeys(row.scenario for row in rows):
        shown.add_row(Text(scenario, style="bold cyan"))
        for row in (row for row in rows if row.scenario == scenario):
            count = summary_cells.requests(row)
            name = Text(row.policy, style="bold").append(f" {count.text}", style="not bold")
            shown.add_row(_with_detail(name, count), *(_text(column.of(row)) for column in columns))
            busiest = sorted(row.backends, key=lambda name: -row.backends[name].requests.mean)[:MOST_BACKENDS]
            for name_there in sorted(busiest):
                there = row.backends[name_there]
                label = Text(f"  {name_there} {summary_cells.backend_requests(there).text}")
                # Without the margins: these rows are to be skimmed.
                shown.add_row(label, *(Text(column.of_backend(there).text) for column in columns), style="dim")
            if len(row.backends) > len(busiest):
                shown.add_row(Text(f"  and {len(row.backends) - len(busiest)} more"), style="dim")
        shown.add_section()
    return shown


def _text(cell: Cell) -> Text:
    return _with_detail(Text(cell.text), cell)


def _with_detail(text: Text, cell: Cell) -> Text:
    return text.append(f"\n{cell.detail}", style="not bold dim") if cell.detail else text
