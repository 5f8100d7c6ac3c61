"""A map of a policy's choices: where one more request goes, by what waits and by what is cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phaseroute.plots.canvas import INK, PAPER, colours_of, drawing, new_figure, titled
from phaseroute.scenarios.crossover import CrossoverMap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_TICKS = 12


def crossover(chart: CrossoverMap) -> Figure:
    """A cell for each number of requests on the busy backend and each length of the prefix that it holds, in the colour
    of the backend that the policy chose. Cells are of equal size, whatever the steps between their values."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colours = colours_of(chart.backends)
    chosen = sorted({index for row in chart.choice for index in row})
    with drawing():
        figure = new_figure(8.0, 4.8)
        axes = figure.add_subplot()
        axes.grid(visible=False)
        axes.pcolormesh(
            chart.choice,
            cmap=ListedColormap([colours[name] for name in chart.backends]),
            vmin=-0.5,
            vmax=len(chart.backends) - 0.5,
            edgecolor=PAPER,
            linewidth=0.6 if len(chart.backlog) * len(chart.cached_tokens) <= 2500 else 0.0,
            rasterized=len(chart.backlog) * len(chart.cached_tokens) > 2500,
        )
        columns, rows = _ticks(chart.cached_tokens), _ticks(chart.backlog)
        axes.set_xticks([index + 0.5 for index in columns], [f"{chart.cached_tokens[index]:,}" for index in columns])
        axes.set_yticks([index + 0.5 for index in rows], [f"{chart.backlog[index]:,}" for index in rows])
        axes.tick_params(length=0)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.set_xlabel(f"of the {chart.prompt_tokens:,} prompt tokens, cached on {chart.busy}")
        axes.set_ylabel(f"requests on {chart.busy}")
        figure.legend(
            handles=[Patch(color=colours[chart.backends[index]], label=chart.backends[index]) for index in chosen],
            loc="outside right upper",
            title="goes to",
            labelcolor=INK,
        )
        note = f", {chart.note}" if chart.note else ""
        titled(
            figure,
            f"{chart.policy}{note}: one more request of {chart.prompt_tokens:,} + {chart.new_tokens:,} tokens",
            simulated=True,
        )
    return figure


def _ticks(values: Sequence[int]) -> list[int]:
    """Indices of cells to label: evenly spaced, few enough to read."""
    step = -(-len(values) // MOST_TICKS)
    return list(range(0, len(values), max(1, step)))
