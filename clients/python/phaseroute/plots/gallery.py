"""The plots that a set of runs gives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phaseroute.plots.forecast import predicted_vs_actual
from phaseroute.plots.timeline import timeline
from phaseroute.plots.ttft import ttft_cdf
from phaseroute.scenarios.served import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure with what it is called in a folder and on a page."""

    stem: str
    """For a file; unlike those of the other plots."""
    scenario: str
    caption: str
    figure: Figure


def gallery(runs: Sequence[Run]) -> Iterator[Plot]:
    """For each scenario: time to first token of all policies, then for each policy its forecasts, if it makes any, over
    all runs, and the timeline of its first run. Raises `PlotsMissing`."""
    for scenario in dict.fromkeys(run.scenario for run in runs):
        mine = [run for run in runs if run.scenario == scenario]
        yield Plot(_stem(scenario, "ttft"), scenario, "Time to first token", ttft_cdf(mine))
        for policy in dict.fromkeys(run.policy for run in mine):
            under = [run for run in mine if run.policy == policy]
            if any(item.finish_error is not None for run in under for item in run.served):
                caption = f"{policy}: predicted against actual finish"
                yield Plot(_stem(scenario, policy, "forecast"), scenario, caption, predicted_vs_actual(under))
            caption = f"{policy}: who served what, run {under[0].run + 1}"
            yield Plot(_stem(scenario, policy, "timeline"), scenario, caption, timeline(under[0]))


def _stem(*parts: str) -> str:
    return "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-.") for part in parts)
