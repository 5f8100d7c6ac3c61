"""How a comparison of policies looks in a terminal, or in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from phaseroute.cli.tables import plain_table
from phaseroute.comparison import FORCED_PREFIX, Row, Spread
from phaseroute.v1 import router_pb2

ROUTED = ("two_phase", "predictive")
"""Policies that price, from the simplest on."""
ALIKE = 1.05
"""Times that differ by less than this factor are called the same."""


def marked(title: str, *, simulated: bool) -> str:
    """A title that says where no model ran."""
    return f"{title} (SIMULATED)" if simulated else title


def heading(workload: str, requests: int, *, simulated: bool) -> str:
    """Of one workload."""
    return marked(f"Workload {workload}: {_requests(requests)}", simulated=simulated)


def table(rows: Sequence[Row]) -> RenderableType:
    """One workload under every policy: medians over the runs, and the range where there are several. TTFT is the time
    to first token, ITL the inter-token latency."""
    shown = plain_table(
        "policy", "went to", "TTFT p50 (s)", "p95", "ITL p50 (ms)", "p95", "all done (s)",
        "/ best forced", left=("policy", "went to"),
    )  # fmt: skip
    for column in shown.columns[:2]:
        column.no_wrap = True
    routed = _routed_best(rows)
    for row in rows:
        figures = row.figures
        shown.add_row(
            Text(row.policy),
            Text("\n".join(f"{name} {_count(counts)}" for name, counts in row.sent.items())),
            middle(figures.get("ttft_p50_s")),
            middle(figures.get("ttft_p95_s")),
            middle(figures.get("inter_token_p50_s"), scale=1000),
            middle(figures.get("inter_token_p95_s"), scale=1000),
            _ranged(figures["completion_s"]),
            _ranged(row.ratio),
            style="bold green" if row is routed else "",
        )
    return shown


def middle(figure: Spread | None, *, scale: float = 1.0) -> str:
    """The median; a dash where there is none."""
    return "-" if figure is None else three(figure.median * scale)


def three(value: float) -> str:
    """A positive number with three digits that count, at least below 1,000 and down to a hundredth."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def verdict(rows: Sequence[Row], backends: Sequence[router_pb2.BackendEntry]) -> str:
    """Which backend is faster at what, and what routing made of it; plain words, a line each."""
    alone = [
        f"{entry.status.isolated_rates.prefill_tokens_per_s:.0f} prompt tokens and "
        f"{entry.status.isolated_rates.decode_tokens_per_s:.0f} new tokens a second with {entry.name}"
        for entry in backends
        if entry.status.HasField("isolated_rates")
    ]
    sentences = [f"One request alone: {', '.join(alone)}."] if alone else []
    bursts = dict.fromkeys((row.workload, row.requests) for row in rows)
    for workload, requests in bursts:
        mine = [row for row in rows if (row.workload, row.requests) == (workload, requests)]
        sentences.append(f"{workload} ({_requests(requests)}): {_faster(mine)}{_routed(mine)}.")
    return "\n".join(sentences)


def _faster(rows: Sequence[Row]) -> str:
    forced = sorted(
        (row.figures["completion_s"].median, row.policy.removeprefix(FORCED_PREFIX))
        for row in rows
        if row.policy.startswith(FORCED_PREFIX)
    )
    if len(forced) < 2:
        return "nothing to compare with"
    (best_s, best), (next_s, second) = forced[:2]
    if next_s < best_s * ALIKE:
        return f"{best} and {second} are about as fast"
    return f"{best} is {next_s / best_s:.1f} times as fast as {second}"


def _routed(rows: Sequence[Row]) -> str:
    routed = _routed_best(rows)
    if routed is None:
        return ""
    time = f" and took {routed.ratio.median:.2f} times as long as the best of them alone" if routed.ratio else ""
    shares = [f"{_count(counts)} to {name}" for name, counts in routed.sent.items()]
    return f"; {routed.policy} sent {' and '.join(shares)}{time}"


def _routed_best(rows: Sequence[Row]) -> Row | None:
    """Under the policy that should be the best of those that price."""
    by_policy = {row.policy: row for row in rows}
    return next((by_policy[policy] for policy in reversed(ROUTED) if policy in by_policy), None)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _count(counts: Sequence[int]) -> str:
    """By run; a range where the runs differ."""
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)}-{max(counts)}"


def _ranged(figure: Spread | None) -> str:
    if figure is None:
        return "-"
    several = f" ({three(figure.low)}-{three(figure.high)})" if figure.low < figure.high else ""
    return f"{three(figure.median)}{several}"
