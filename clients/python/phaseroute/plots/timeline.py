"""Who served what, and when: a lane for each backend, a bar for each request."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from phaseroute.plots.canvas import FAINT, GRID, INK, colours_of, drawing, new_figure, seconds, titled
from phaseroute.scenarios.served import Run, Served

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY = 400
"""With more answers than these, a lane shows how many wait and how many are answered instead of a bar for each."""
MOST_LANES = 12
"""Of more backends, only those with most requests are shown."""
WAITING_ALPHA = 0.28
LANE_GAP = 0.14
"""Between two lanes, in heights of the highest."""
BINS = 450
"""Parts of the time in which requests are counted: about two pixels each."""

Values = np.ndarray[tuple[int], np.dtype[np.float64]]


def timeline(run: Run) -> Figure:
    """One run: each answer from its arrival to its first token (light) and from there to its end (solid), on the lane
    of the backend that gave it. A lane is as high as what it had at once. Requests without an answer are crosses at the
    bottom, where they arrived."""
    lanes = _lanes(run)
    busiest = sorted(lanes, key=lambda name: -len(lanes[name]))[:MOST_LANES]
    shown = {name: served for name, served in lanes.items() if name in busiest}
    lost = [item for item in run.served if not item.ok]
    answered = sum(map(len, lanes.values()))
    start_s = min([0.0, *(item.arrived_s for item in run.served)])
    end_s = max([1e-3, *(item.arrived_s + (item.finish_s if item.ok else 0.0) for item in run.served)])
    edges_s = np.linspace(start_s, end_s, BINS + 1) if answered > MANY else None
    colours = colours_of(list(shown))
    with drawing():
        counts = {name: _Counts.of(served, edges_s) for name, served in shown.items()} if edges_s is not None else {}
        heights = {
            name: counts[name].highest if counts else float(max(_rows(served), default=0) + 1)
            for name, served in shown.items()
        }
        most = max([*heights.values(), 1.0])
        # A lane of one request can still be seen beside one of hundreds.
        heights = {name: max(height, most / 6) for name, height in heights.items()}
        gap = most * LANE_GAP
        lanes_in = 1.5 * sum(height + gap for height in heights.values()) / most
        figure = new_figure(9.0, min(8.5, 1.6 + lanes_in + (0.6 if lost else 0.0)))
        axes = figure.add_subplot()
        top = 0.0
        ticks: list[tuple[float, str]] = []
        for name, served in shown.items():
            if counts:
                counts[name].draw(axes, top, colours[name])
            else:
                _bars(axes, served, top, colours[name])
            ticks.append((top - heights[name] / 2, _lane_label(name, len(served))))
            top -= heights[name]
            axes.axhline(top - gap / 2, color=GRID, linewidth=0.7)
            top -= gap
        if lost:
            top -= gap
            axes.plot([item.arrived_s for item in lost], [top] * len(lost), "x", color=INK, markersize=5)
            codes = Counter(item.code for item in lost).most_common(2)
            ticks.append((top, "\n".join(f"{code.lower().replace('_', ' ')}: {count:,}" for code, count in codes)))
            top -= gap
        axes.set_yticks([place for place, _ in ticks], [label for _, label in ticks])
        axes.set_ylim(top + gap / 2, gap / 2)
        axes.set_xlim(start_s, end_s + 0.02 * (end_s - start_s))
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("time, s")
        title = f"{run.scenario}, {run.policy}: all done after {seconds(run.completion_s)}"
        titled(figure, title, simulated=run.simulated)
        _explain(figure, None if edges_s is None else float(edges_s[1] - edges_s[0]), len(lanes) - len(shown))
    return figure


def _lanes(run: Run) -> dict[str, list[Served]]:
    """The answers of each backend, in the order of the fleet."""
    lanes: dict[str, list[Served]] = {name: [] for name in run.backends}
    for item in run.served:
        if item.ok:
            lanes.setdefault(item.backend, []).append(item)
    return lanes


def _lane_label(name: str, count: int) -> str:
    return f"{name or 'unknown'}\n{count:,} request{'' if count == 1 else 's'}"


def _rows(served: Sequence[Served]) -> list[int]:
    """A row for each request, in order of arrival: the uppermost that is free then, so that bars never overlap."""
    free: list[int] = []
    ends: list[tuple[float, int]] = []
    rows: list[int] = []
    for item in served:
        while ends and ends[0][0] <= item.arrived_s:
            heapq.heappush(free, heapq.heappop(ends)[1])
        row = heapq.heappop(free) if free else len(ends)
        heapq.heappush(ends, (item.arrived_s + item.finish_s, row))
        rows.append(row)
    return rows


def _bars(axes: Axes, served: Sequence[Served], top: float, colour: str) -> None:
    rows = _rows(served)
    for alpha, starts, lengths in (
        (WAITING_ALPHA, [item.arrived_s for item in served], [item.ttft_s for item in served]),
        (1.0, [item.arrived_s + item.ttft_s for item in served], [item.finish_s - item.ttft_s for item in served]),
    ):
        axes.barh([top - row - 0.5 for row in rows], lengths, 0.8, left=starts, color=colour, alpha=alpha, linewidth=0)


@dataclass(frozen=True, slots=True)
class _Counts:
    """How many requests a lane had, means over equal parts of the time."""

    edges_s: Values
    waiting: Values
    answering: Values

    @classmethod
    def of(cls, served: Sequence[Served], edges_s: Values) -> _Counts:
        arrived = np.array([item.arrived_s for item in served])
        first = arrived + np.array([item.ttft_s for item in served])
        end = arrived + np.array([item.finish_s for item in served])
        here, begun = _mean_since(arrived, edges_s) - _mean_since(end, edges_s), _mean_since(first, edges_s)
        answering = begun - _mean_since(end, edges_s)
        return cls(edges_s, here - answering, answering)

    @property
    def highest(self) -> float:
        """The most there was of both together."""
        return float((self.waiting + self.answering).max())

    def draw(self, axes: Axes, top: float, colour: str) -> None:
        """Those being answered at the top, those that wait for their first token below."""
        middle, lower = top - self.answering, top - self.answering - self.waiting
        for alpha, upper, under in ((1.0, np.full_like(middle, top), middle), (WAITING_ALPHA, middle, lower)):
            axes.stairs(under, self.edges_s, baseline=upper, fill=True, color=colour, alpha=alpha, linewidth=0)


def _mean_since(moments_s: Values, edges_s: Values) -> Values:
    """How many of the moments are past, on average between one edge and the next."""
    # The integral of that count up to each edge: every moment adds the time since then.
    ordered = np.sort(moments_s)
    past = np.searchsorted(ordered, edges_s)
    integral = past * edges_s - np.concatenate([[0.0], np.cumsum(ordered)])[past]
    means: Values = np.diff(integral) / np.diff(edges_s)
    return means


def _explain(figure: Figure, bin_s: float | None, hidden: int) -> None:
    from matplotlib.patches import Patch

    unit = "a bar a request" if bin_s is None else f"requests at a time, means over {seconds(bin_s)}"
    figure.legend(
        handles=[
            Patch(color=FAINT, alpha=WAITING_ALPHA, label=f"{unit}: waiting for the first token"),
            Patch(color=FAINT, label="first token to the last"),
            *([Patch(color="none", label=f"{hidden:,} more backends not shown")] if hidden else []),
        ],
        loc="outside lower right",
        ncols=3,
        labelcolor=INK,
        fontsize=8.5,
    )
