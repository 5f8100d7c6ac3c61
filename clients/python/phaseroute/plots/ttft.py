"""How soon the first token came: the distribution of time to first token, a line for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from phaseroute.plots.canvas import (
    FAINT,
    INK,
    colours_of,
    drawing,
    new_figure,
    plain_log_ticks,
    seconds,
    titled,
)
from phaseroute.scenarios.served import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE = 10.0
"""Where the 99th percentile of all times is so many times the 5th, the axis is logarithmic."""
LEAST_S = 1e-3
"""Times below this are drawn there on a logarithmic axis."""


def ttft_cdf(runs: Sequence[Run]) -> Figure:
    """The share of requests whose first token came within so many seconds, by policy; runs of one policy together.

    Requests without an answer count as never: where some are, a line ends below 100 %. At least one run, all of one
    scenario.
    """
    waits_s = {policy: _waits_s(runs, policy) for policy in dict.fromkeys(run.policy for run in runs)}
    counts = {policy: sum(len(run.served) for run in runs if run.policy == policy) for policy in waits_s}
    pooled = np.concatenate(list(waits_s.values()))
    wide = bool(pooled.size) and np.quantile(pooled, 0.99) > WIDE * max(np.quantile(pooled, 0.05), LEAST_S)
    with drawing():
        figure = new_figure(8.0, 4.4)
        axes = figure.add_subplot()
        for share in (0.5, 0.95):
            axes.axhline(share, color=FAINT, linewidth=0.8, linestyle=(0, (1, 3)))
        colours = colours_of(list(waits_s))
        for policy, waits in waits_s.items():
            shown = np.maximum(waits, LEAST_S) if wide else waits
            shares = np.arange(1, shown.size + 1) / max(1, counts[policy])
            axes.step(
                [*shown[:1], *shown],
                [*shares[:1] * 0, *shares],
                where="post",
                color=colours[policy],
                linewidth=1.8,
                label=_label(policy, waits, counts[policy]),
            )
        if wide:
            axes.set_xscale("log")
            plain_log_ticks(axes, x=True)
        else:
            axes.set_xlim(left=0)
        axes.set_ylim(0, 1.02)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 0.95], ["0", "25 %", "50 %", "75 %", "95 %"])
        axes.set_xlabel("time to first token, s")
        axes.set_ylabel("requests")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), labelcolor=INK, labelspacing=1.0)
        titled(figure, f"{runs[0].scenario}: time to first token", simulated=any(run.simulated for run in runs))
    return figure


def _waits_s(runs: Sequence[Run], policy: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.sort([item.ttft_s for run in runs if run.policy == policy for item in run.served if item.ok])


def _label(policy: str, waits_s: np.ndarray[tuple[int], np.dtype[np.float64]], count: int) -> str:
    if not waits_s.size:
        return f"{policy}\nno answer"
    p95_s = float(np.quantile(waits_s, 0.95, method="inverted_cdf"))
    lost = "" if waits_s.size == count else f"\n{waits_s.size:,} of {count:,} answered"
    return f"{policy}\np50 {seconds(float(np.median(waits_s)))}, p95 {seconds(p95_s)}{lost}"
