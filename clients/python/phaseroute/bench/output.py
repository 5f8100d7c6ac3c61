"""What a benchmark leaves behind in a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phaseroute import plots
from phaseroute.bench.report import Picture, Report, render
from phaseroute.bench.requests_csv import write_csv
from phaseroute.scenarios.served import Run

CSV_FILE = "requests.csv"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
PLOTS_FOLDER = "plots"


class BadFolder(Exception):
    """Results cannot be kept there; the message says why and what to do."""


class Folder:
    """Where results are kept. What is written again replaces what was there as a whole."""

    def __init__(self, path: Path) -> None:
        """Makes the folder. Raises `BadFolder`, also where results of an earlier benchmark would be lost."""
        self._path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            taken = next((name for name in (CSV_FILE, SUMMARY_FILE, REPORT_FILE) if (path / name).exists()), None)
        except OSError as error:
            raise self._unwritable(error) from error
        if taken:
            raise BadFolder(f"{path} has a {taken} already; choose another folder, or move that one away.")

    def keep(self, runs: Sequence[Run], summary: Mapping[str, Any]) -> None:
        """Every request and the figures so far. Raises `BadFolder`."""
        try:
            write_csv(self._path / CSV_FILE, runs)
            draft = self._path / f"{SUMMARY_FILE}.part"
            draft.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            draft.replace(self._path / SUMMARY_FILE)
        except OSError as error:
            raise self._unwritable(error) from error

    def draw(self, runs: Sequence[Run]) -> list[Picture]:
        """All plots, as files and for the report. Raises `PlotsMissing` or `BadFolder`."""
        pictures = []
        folder = self._path / PLOTS_FOLDER
        try:
            folder.mkdir(exist_ok=True)
            for plot in plots.gallery(runs):
                svg, _ = plots.save(plot.figure, folder / plot.stem)
                text = svg.read_text(encoding="utf-8")
                pictures.append(Picture(scenario=plot.scenario, caption=plot.caption, svg=text))
        except OSError as error:
            raise self._unwritable(error) from error
        return pictures

    def write_report(self, report: Report) -> Path:
        """The page; its path. Raises `BadFolder`."""
        path = self._path / REPORT_FILE
        try:
            path.write_text(render(report), encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error
        return path

    def _unwritable(self, error: OSError) -> BadFolder:
        return BadFolder(f"{self._path} cannot be written: {error.strerror}. Choose another --out.")
