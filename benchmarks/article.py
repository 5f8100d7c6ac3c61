"""Replay the article's bursts in virtual time: what each policy does with 8 and with 48 requests. SIMULATED.

    python -m benchmarks.article [--requests 8 48] [--policies forced:gpu two_phase ...]

Prints a table and, last, one JSON line. Takes seconds; needs no model. The published figures stand beside where the
article has them. simulator/article.py says what is published, what is derived and what is assumed.
"""

from __future__ import annotations

import argparse
import json
import statistics

from rich.console import Console
from rich.table import Table

from router_service.policies.registry import POLICIES
from simulator.article import BurstResult, run_burst

PUBLISHED = {
    (8, "forced:gpu"): (11.47, 0),
    (8, "two_phase"): (10.35, 1),
    (48, "forced:gpu"): (68.43, 0),
    (48, "two_phase"): (60.88, 6),
}
"""(requests, policy) -> completion time in seconds (mean of three runs), requests sent to the CPU."""

POLICIES_SHOWN = [
    "forced:gpu",
    "forced:cpu",
    *(name for name in ("two_phase", "predictive", "least_loaded") if name in POLICIES),
]
LABELS = ("n", "policy", "to CPU", "completion s", "TTFT p50", "p95", "e2e p50", "published s", "to CPU")


def row(requests: int, result: BurstResult) -> dict[str, object]:
    """One line of the table, as numbers."""
    ttft = [served.ttft_s for served in result.run.served]
    finish = [served.finish_s for served in result.run.served]
    published = PUBLISHED.get((requests, result.policy))
    return {
        "requests": requests,
        "policy": result.policy,
        "sent_to_cpu": result.sent_to("cpu"),
        "completion_s": round(result.completion_s, 2),
        "ttft_p50_s": round(statistics.median(ttft), 3),
        "ttft_p95_s": round(statistics.quantiles(ttft, n=20, method="inclusive")[-1], 3),
        "e2e_p50_s": round(statistics.median(finish), 3),
        "published_completion_s": published[0] if published else None,
        "published_sent_to_cpu": published[1] if published else None,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 48])
    parser.add_argument("--policies", nargs="+", default=POLICIES_SHOWN)
    options = parser.parse_args()
    rows = [row(count, run_burst(count, policy)) for count in options.requests for policy in options.policies]
    table = Table(title="The article's bursts in virtual time (simulated), seconds")
    for label in LABELS:
        table.add_column(label, justify="left" if label == "policy" else "right", no_wrap=True)
    for line in rows:
        table.add_row(*("" if value is None else str(value) for value in line.values()))
    Console(width=max(Console().width, 100)).print(table)
    print(json.dumps({"benchmark": "article", "simulated": True, "rows": rows}))


if __name__ == "__main__":
    main()
