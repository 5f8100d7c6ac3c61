"""A benchmark as one HTML page that needs nothing else: tables, plots, and how it came about."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template

from phaseroute.bench.fleet import Member
from phaseroute.plots.canvas import FAINT, GRID, INK, PAPER
from phaseroute.scenarios import summary_cells
from phaseroute.scenarios.planned import Scenario
from phaseroute.scenarios.summary import PolicyRow
from phaseroute.scenarios.summary_cells import COLUMNS, Cell

_PAGE = Path(__file__).with_name("report.html")
_INKS = {INK: "var(--ink)", FAINT: "var(--faint)", GRID: "var(--grid)", PAPER: "var(--paper)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A plot to show."""

    scenario: str
    caption: str
    svg: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that a page shows, unescaped."""

    command: str
    """As it was typed."""
    when: str
    simulated: bool
    complete: bool
    """Every play that was asked for came to its end."""
    scenarios: Sequence[Scenario]
    """One for each name: of the first run."""
    rows: Sequence[PolicyRow]
    members: Sequence[Member]
    facts: Mapping[str, str]
    """Of machine and versions."""
    notes: Sequence[str] = ()
    """What made plays less than clean."""
    pictures: Sequence[Picture] = field(default=())


def render(report: Report) -> str:
    """The page. All that comes from outside is escaped."""
    names = ", ".join(dict.fromkeys(row.scenario for row in report.rows)) or "nothing was measured"
    marks = []
    if report.simulated:
        marks.append("SIMULATED: behind some backends no model runs; their times are given and their tokens made up.")
    if not report.complete:
        marks.append("Incomplete: this was stopped early. Only plays that came to their end are counted.")
    return Template(_PAGE.read_text(encoding="utf-8")).substitute(
        title=escape(f"phaseroute bench: {names}{' (SIMULATED)' if report.simulated else ''}"),
        subtitle=escape(f"{report.when}; {summary_cells.certainty(report.rows)}"),
        marks="\n".join(f'<p class="mark">{escape(mark)}</p>' for mark in marks),
        scenarios="\n".join(_scenario(report, scenario) for scenario in report.scenarios),
        explanation=escape(summary_cells.EXPLANATION),
        notes=_list(report.notes),
        command=escape(report.command),
        backends=_backends(report.members),
        facts=_facts(report.facts),
    )


def _scenario(report: Report, scenario: Scenario) -> str:
    rows = [row for row in report.rows if row.scenario == scenario.name]
    pictures = [
        _figure(number, picture) for number, picture in enumerate(report.pictures) if picture.scenario == scenario.name
    ]
    about = f"{scenario.description}. {len(scenario.requests):,} requests over {scenario.duration_s:.1f} s."
    return "\n".join(
        [
            f"<section>\n<h2>{escape(scenario.name)}</h2>\n<p>{escape(about)}</p>",
            _figures(rows) if rows else "<p>No play of it came to its end.</p>",
            *pictures,
            "</section>",
        ]
    )


def _figures(rows: Sequence[PolicyRow]) -> str:
    headings = ("policy", "requests", *(column.heading for column in COLUMNS))
    body = []
    for row in rows:
        body.append(_row(row.policy, [summary_cells.requests(row), *(column.of(row) for column in COLUMNS)]))
        for name, backend in row.backends.items():
            cells = [summary_cells.backend_requests(backend), *(column.of_backend(backend) for column in COLUMNS)]
            body.append(_row(name or "unknown", cells, kind="backend"))
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    return _wide(f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{''.join(body)}</tbody>\n</table>")


def _row(name: str, cells: Iterable[Cell], kind: str = "policy") -> str:
    shown = "".join(
        f"<td>{escape(cell.text)}{f'<small>{escape(cell.detail)}</small>' if cell.detail else ''}</td>"
        for cell in cells
    )
    return f'<tr class="{kind}"><th scope="row">{escape(name)}</th>{shown}</tr>\n'


def _figure(number: int, picture: Picture) -> str:
    caption = escape(picture.caption)
    return f"<figure>\n{_wide(_inline(picture, number))}\n<figcaption>{caption}</figcaption>\n</figure>"


def _inline(picture: Picture, number: int) -> str:
    """The SVG element alone, its ids unlike those of the other pictures, its neutral colours those of the page."""
    svg = picture.svg[picture.svg.index("<svg") :]
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>p{number}-", svg)
    for colour, variable in _INKS.items():
        svg = svg.replace(colour, variable)
    label = escape(f"{picture.scenario}, {picture.caption}", quote=True)
    # As wide as it was drawn and no wider, so that letters are of one size in all of them.
    return re.sub(
        r'<svg [^>]*?width="([\d.]+pt)"[^>]*?viewBox',
        lambda found: f'<svg role="img" aria-label="{label}" style="max-width: {found[1]}" viewBox',
        svg,
        count=1,
    )


def _backends(members: Sequence[Member]) -> str:
    headings = (
        "backend",
        "engine",
        "device",
        "model",
        "precision",
        "max active",
        "prefill tokens/s",
        "decode tokens/s",
    )
    body = []
    for member in members:
        status = member.status
        rates = status.isolated_rates if status.HasField("isolated_rates") else None
        cells = (
            f"{status.engine.name}{' (SIMULATED)' if status.engine.simulated else ''}",
            status.engine.device,
            status.model.name,
            status.model.precision,
            str(status.max_active),
            f"{rates.prefill_tokens_per_s:.0f}" if rates else "",
            f"{rates.decode_tokens_per_s:.0f}" if rates else "",
        )
        body.append(_row(member.name, map(Cell, cells)))
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    return _wide(f'<table class="left"><thead><tr>{head}</tr></thead>\n<tbody>\n{"".join(body)}</tbody></table>')


def _facts(facts: Mapping[str, str]) -> str:
    return (
        "<dl>\n"
        + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>\n" for name, value in facts.items())
        + "</dl>"
    )


def _list(items: Sequence[str]) -> str:
    return "<ul>\n" + "".join(f"<li>{escape(item)}</li>\n" for item in items) + "</ul>" if items else ""


def _wide(content: str) -> str:
    """On a narrow screen it scrolls by itself, and not the page."""
    return f'<div class="wide">{content}</div>'
