"""The page: nothing from outside gets into its markup, and it needs nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from phaseroute import plots
from phaseroute.bench.fleet import Member
from phaseroute.bench.report import Picture, Report, render
from phaseroute.scenarios.planned import Planned, Scenario
from phaseroute.scenarios.summary import summarize
from phaseroute.v1 import inference_pb2 as pb
from tests.unit.clients_bench.runs import lost, run_of, served

EVIL = "</title><script>alert('$x')</script>&\"<b>"
VOID = {"meta", "path", "use", "br", "image"}


class Page(HTMLParser):
    """Elements, ids and text; fails where tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        named = dict(attrs)
        self.ids += [named["id"]] if "id" in named else []
        self.links += [named[name] or "" for name in ("href", "src", "xlink:href") if name in named]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data


def report(name: str = "article8", *, pictures: bool = False, simulated: bool = False, complete: bool = True) -> Report:
    runs = [
        run_of(
            served(0, name, predicted_finish_s=2.2, gaps_s=(0.1,)), lost(1, arrived_s=0.5), scenario=name,
            policy=policy, run=run, backends=(name,), simulated=simulated,
        )
        for run in range(2) for policy in (name, "predictive")
    ]  # fmt: skip
    status = pb.BackendStatus(
        engine=pb.EngineInfo(name=name, device=name, simulated=simulated), model=pb.ModelInfo(name=name, precision=name)
    )
    shown = plots.gallery(runs) if pictures else ()
    drawn = [Picture(scenario=plot.scenario, caption=plot.caption, svg=plots.svg_text(plot.figure)) for plot in shown]
    request = Planned(at_s=0.0, prompt_tokens=4, max_new_tokens=2, new_tokens=2)
    return Report(
        command=name, when="today", simulated=simulated, complete=complete,
        scenarios=[Scenario(name, name, (request, request))], rows=summarize(runs), members=[Member(name, status)],
        facts={name: name}, notes=[name], pictures=drawn,
    )  # fmt: skip


@pytest.fixture(scope="module")
def drawn() -> Page:
    return Page(render(report(pictures=True)))


def test_everything_from_outside_is_escaped():
    text = render(report(EVIL, pictures=True, simulated=True))
    page = Page(text)
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert text.count("alert(") == text.count("&lt;script&gt;alert(")
    assert "alert('$x')" in page.text


def test_it_loads_nothing(drawn: Page):
    assert drawn.links
    assert all(link.startswith(("#", "data:")) for link in drawn.links)
    assert not {"script", "link", "iframe", "img"} & set(drawn.tags)


def test_ids_are_unique_and_references_find_them(drawn: Page):
    assert len(drawn.ids) == len(set(drawn.ids))
    assert {link[1:] for link in drawn.links if link.startswith("#")} <= set(drawn.ids)


def test_it_has_table_plots_command_and_notes(drawn: Page):
    assert drawn.tags.count("svg") == 5
    for part in ("predictive", "2.00", "MAPE", "10.0", "2 lost", "±.00", "today", "What the figures are"):
        assert part in drawn.text


def test_plots_take_the_inks_of_the_page():
    text = render(report(pictures=True))
    svgs = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert all("var(--ink)" in svg and "var(--paper)" in svg for svg in svgs)
    assert all("#24292f" not in svg and "#ffffff" not in svg for svg in svgs)


def test_simulated_and_incomplete_results_say_so():
    assert "SIMULATED" not in render(report())
    assert render(report(simulated=True)).count("SIMULATED") >= 3
    assert "Incomplete" in render(report(complete=False))


def test_a_scenario_that_was_not_played_to_its_end_is_there():
    whole = report()
    bare = Report(
        command="c", when="w", simulated=False, complete=False, scenarios=whole.scenarios, rows=(), members=(), facts={}
    )
    assert "No play of it came to its end." in Page(render(bare)).text
