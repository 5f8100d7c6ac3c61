"""What a chaos run came to: a table, and one JSON line."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos.injector import Injected
from tests.chaos.ledger import Entry, Ledger, Outcome
from tests.chaos.vitals import Growth

REJOIN_MARGIN_S = 2.0
"""A fault's end does not end its consequences: requests that began so soon after it count as its own."""


@dataclass(frozen=True, slots=True)
class Report:
    """A run, and what of it breaks the promise."""

    options: Mapping[str, Any]
    ledger: Ledger
    injected: Sequence[Injected]
    router_growth: Growth | None
    problems: Sequence[str]
    wall_s: float

    @property
    def broken(self) -> bool:
        """Some invariant does not hold."""
        return bool(self.problems)

    def line(self) -> str:
        """Everything in one JSON line."""
        entries = list(self.ledger.entries.values())
        growth = self.router_growth
        return json.dumps(
            {
                "benchmark": "chaos",
                **self.options,
                "outcomes": {outcome.value: count for outcome, count in sorted_outcomes(entries).items()},
                "lost": len(list(self.ledger.lost)),
                "resent": sum(entry.resent > 0 for entry in entries),
                "continued": sum(entry.continuations > 0 for entry in entries),
                "continuations": sum(entry.continuations for entry in entries),
                "tokens": sum(len(entry.ending.token_ids) for entry in entries),
                "by_fault": self._rows(),
                "router_rss_growth_mib": None if growth is None else round(growth.rss_mib, 2),
                "router_fd_growth": None if growth is None else growth.fds,
                "router_thread_growth": None if growth is None else growth.threads,
                "problems": len(self.problems),
                "wall_s": round(self.wall_s, 1),
            }
        )

    def show(self, console: Console) -> None:
        """The table, and what is wrong."""
        table = Table(
            title="Faults, the requests that were in flight when they came, and what became of those they met"
        )
        columns = ("fault", "injected", "in flight", "continued", "retried", "resent")
        for column in (*columns, "longest gap s", "rejoin p50 s", "rejoin max s"):
            table.add_column(column, justify="left" if column == "fault" else "right", no_wrap=True)
        for kind, row in self._rows().items():
            table.add_row(kind, *(_shown(value) for value in row.values()))
        console.print(table)
        outcomes = sorted_outcomes(list(self.ledger.entries.values()))
        console.print("Outcomes: " + ", ".join(f"{count} {outcome.value}" for outcome, count in outcomes.items()))
        for problem in self.problems:
            console.print(f"BROKEN: {problem}", style="red", markup=False)

    def _rows(self) -> dict[str, dict[str, float | int | None]]:
        by_kind: dict[str, list[Injected]] = defaultdict(list)
        for one in self.injected:
            by_kind[one.kind].append(one)
        return {kind: self._row(by_kind[kind]) for kind in sorted(by_kind)}

    def _row(self, faults: Sequence[Injected]) -> dict[str, float | int | None]:
        met = [
            entry
            for entry in self.ledger.entries.values()
            if any(
                fault.began_s <= entry.ending.ended_s and entry.ending.began_s <= fault.ended_s + REJOIN_MARGIN_S
                for fault in faults
            )
        ]
        under_way = [
            entry
            for entry in met
            if any(entry.ending.began_s <= fault.began_s <= entry.ending.ended_s for fault in faults)
        ]
        rejoins = [fault.rejoin_s for fault in faults if not math.isnan(fault.rejoin_s)]
        return {
            "injected": len(faults),
            "in_flight": len(under_way),
            "continued": sum(entry.continuations > 0 for entry in met),
            "retried": sum(entry.attempts - entry.continuations > 1 for entry in met),
            "resent": sum(entry.resent > 0 for entry in met),
            "longest_gap_s": round(max((entry.ending.longest_gap_s for entry in met), default=0.0), 2),
            "rejoin_p50_s": round(statistics.median(rejoins), 2) if rejoins else None,
            "rejoin_max_s": round(max(rejoins), 2) if rejoins else None,
        }


def sorted_outcomes(entries: Sequence[Entry]) -> dict[Outcome, int]:
    """Counts in the order of the enumeration; those that did not occur, too."""
    return {outcome: sum(entry.verdict.outcome is outcome for entry in entries) for outcome in Outcome}


def _shown(value: float | int | None) -> str:
    return "-" if value is None else f"{value:g}"
