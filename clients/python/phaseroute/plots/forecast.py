"""When a request was said to finish, against when it did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from phaseroute.plots.canvas import (
    COLOURS,
    FAINT,
    GRID,
    INK,
    OTHERS,
    colours_of,
    drawing,
    new_figure,
    plain_log_ticks,
    titled,
)
from phaseroute.scenarios.served import Run, Served

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAND = 0.15
"""Half the width of the band around a right forecast."""
WIDE = 10.0
"""Where the longest time is so many times the shortest, both axes are logarithmic."""
_REST = "other backends"
MANY = 1500
"""More points than these are drawn small, and as an image within an SVG."""


def predicted_vs_actual(runs: Sequence[Run]) -> Figure:
    """Time to finish, predicted when a request was routed, over what it was: a point a request, a colour a backend.

    At least one run, all of one scenario; several policies share a plot if their runs are given together. The MAPE in
    the title is the mean of |predicted - actual| / actual.
    """
    served = [item for run in runs for item in run.served if item.finish_error is not None]
    errors = np.array([item.finish_error for item in served])
    policies = " and ".join(dict.fromkeys(run.policy for run in runs))
    verdict = (
        f"finish predicted with a MAPE of {_percent(np.abs(errors).mean())}" if served else "nothing was predicted"
    )
    with drawing():
        figure = new_figure(6.6, 5.6)
        axes = figure.add_subplot()
        titled(figure, f"{runs[0].scenario}, {policies}: {verdict}", simulated=any(run.simulated for run in runs))
        if served:
            within = float(np.mean(np.abs(errors) <= BAND))
            note = f"bias {_percent(errors.mean(), sign='+')}\n{_percent(within)} within ±{BAND * 100:.0f} %, the band"
            axes.text(0.02, 0.98, note, transform=axes.transAxes, va="top", color=INK, linespacing=1.5)
            _scatter(axes, _by_backend(runs, served))
        axes.set_xlabel("actual time to finish, s")
        axes.set_ylabel("predicted when routed, s")
    return figure


def _by_backend(runs: Sequence[Run], served: Sequence[Served]) -> dict[str, list[Served]]:
    """Those with most requests, in the order of the fleet, and the rest together under `_REST`."""
    fleet = dict.fromkeys(name for run in runs for name in run.backends)
    points: dict[str, list[Served]] = {name: [] for name in fleet}
    for item in served:
        points.setdefault(item.backend, []).append(item)
    busiest = sorted(points, key=lambda name: -len(points[name]))[: len(COLOURS)]
    rest = [item for name, items in points.items() if name not in busiest for item in items]
    return {_REST: rest} | {name: items for name, items in points.items() if name in busiest}


def _scatter(axes: Axes, points: dict[str, list[Served]]) -> None:
    from matplotlib.collections import PathCollection

    times = [(item.finish_s, item.predicted_finish_s or 0.0) for items in points.values() for item in items]
    positive = np.array([value for pair in times for value in pair if value > 0])
    wide = positive.max() > WIDE * positive.min()
    low, high = (positive.min() / 1.25, positive.max() * 1.25) if wide else (0.0, positive.max() * 1.06)
    line = np.geomspace(low, high, 100) if wide else np.array([low, high])
    axes.fill_between(line, line * (1 - BAND), line * (1 + BAND), color=GRID, alpha=0.6, linewidth=0)
    axes.plot(line, line, color=FAINT, linewidth=1.0)
    many = len(times) > MANY
    colours = colours_of([name for name in points if name is not _REST]) | {_REST: OTHERS}
    for name, items in points.items():
        if not items:
            continue
        axes.scatter(
            [item.finish_s for item in items],
            # On a logarithmic axis a forecast of nothing is drawn at the lower edge.
            [max(item.predicted_finish_s or 0.0, low) for item in items],
            s=5 if many else 26,
            alpha=0.35 if many else 0.8,
            color=colours[name],
            edgecolor="none",
            label=f"{name or 'unknown'}, {len(items):,}",
            rasterized=many,
        )
    if wide:
        axes.set_xscale("log")
        axes.set_yscale("log")
        plain_log_ticks(axes, x=True, y=True)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_aspect("equal")
    handles, labels = axes.get_legend_handles_labels()
    if points[_REST]:  # drawn first, so that it lies below; named last
        handles, labels = [*handles[1:], handles[0]], [*labels[1:], labels[0]]
    legend = axes.legend(handles, labels, loc="lower right", title="backend, requests", labelcolor=INK)
    for handle in legend.legend_handles:
        if isinstance(handle, PathCollection):
            handle.set_alpha(0.9)
            handle.set_sizes([26])


def _percent(share: float, sign: str = "-") -> str:
    return f"{share * 100:{sign}.{0 if share >= 0.995 else 1}f} %"
