"""Plots of runs and maps, as matplotlib figures that know of no window: values in, SVG and PNG out. What a simulator
made says so in its title."""

from phaseroute.plots.canvas import PlotsMissing, save, svg_text
from phaseroute.plots.crossover import crossover
from phaseroute.plots.forecast import predicted_vs_actual
from phaseroute.plots.gallery import Plot, gallery
from phaseroute.plots.timeline import timeline
from phaseroute.plots.ttft import ttft_cdf

__all__ = [
    "Plot",
    "PlotsMissing",
    "crossover",
    "gallery",
    "predicted_vs_actual",
    "save",
    "svg_text",
    "timeline",
    "ttft_cdf",
]
