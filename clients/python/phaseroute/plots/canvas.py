"""What all plots have in common: ink, colours, files that are the same bytes each time."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#24292f"
FAINT = "#6e7781"
GRID = "#d8dee4"
PAPER = "#ffffff"
"""The four neutral colours; a page that shows a plot on a dark ground puts others in their place."""

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6d31")
"""Okabe and Ito's, told apart by colour-blind people, without black, and with an ochre for the yellow that is too light
for lines; readable on white and on black."""
OTHERS = "#8b949e"
"""For whatever comes after the last of them."""

PNG_DPI = 160
_TITLE_LETTERS_PER_IN = 10.5

_STYLE: dict[Any, Any] = {
    # Text stays text: it can be searched and read aloud, and files are small.
    "svg.fonttype": "none",
    # Ids are hashes of what they name, salted at random unless told otherwise.
    "svg.hashsalt": "phaseroute",
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9.5,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    # A dollar in a name is a dollar.
    "text.parse_math": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "lines.solid_capstyle": "butt",
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
}


class PlotsMissing(Exception):
    """The plotting library is not installed; the message says how to get it."""


@contextmanager
def drawing() -> Iterator[None]:
    """In this block figures are made and written in one style. Raises `PlotsMissing`."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise PlotsMissing('Plots need matplotlib: pip install "phaseroute[plots]".') from error
    with matplotlib.rc_context():
        # Not the user's own style, which would give everybody other files.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure whose parts share out its space."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), layout="constrained")


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name, the same whenever the names are."""
    return {name: COLOURS[index] if index < len(COLOURS) else OTHERS for index, name in enumerate(names)}


def titled(figure: Figure, title: str, *, simulated: bool) -> None:
    """Set the title; what is simulated says so."""
    text = f"{title} (SIMULATED)" if simulated else title
    # By hand: matplotlib's own wrapping takes dollars for formulas.
    wrapped = textwrap.fill(text, round(figure.get_figwidth() * _TITLE_LETTERS_PER_IN))
    figure.suptitle(wrapped, x=0.01, horizontalalignment="left")


def plain_log_ticks(axes: Axes, *, x: bool = False, y: bool = False) -> None:
    """Numbers as people write them on logarithmic axes: 0.1, 1, 10."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for wanted, axis in ((x, axes.xaxis), (y, axes.yaxis)):
        if wanted:
            axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=12))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())


def seconds(value: float) -> str:
    """With unit and three digits that count: "0.124 s", "12.4 s"."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f} s"


def save(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Write `stem`.svg and `stem`.png, the same bytes for the same figure; their paths. Raises `OSError`."""
    svg, png = (stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "png"))
    svg.write_text(svg_text(figure), encoding="utf-8")
    with drawing():
        figure.savefig(png, dpi=PNG_DPI, metadata={"Software": None})
    return svg, png


def svg_text(figure: Figure) -> str:
    """The figure as an SVG document, without a date."""
    written = io.StringIO()
    with drawing():
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return written.getvalue()
