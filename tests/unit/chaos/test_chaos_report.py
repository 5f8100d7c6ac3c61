"""What a chaos run tells of itself."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace

from rich.console import Console

from phaseroute.v1 import inference_pb2 as pb
from tests.chaos.injector import Injected
from tests.chaos.ledger import Ending, Entry, Ledger, Outcome, Verdict
from tests.chaos.report import Report
from tests.chaos.vitals import MEBIBYTE, Sample, Vitals
from tests.chaos.workload import PlannedRequest


def entry(index, began_s, ended_s, outcome=Outcome.ANSWERED, *, resent=0, **routing):
    finished = pb.Finished(routing=pb.RoutingRecord(**{"attempts": 1, **routing}))
    ending = Ending("OK", "", (1, 2), "ab", finished, 0, began_s, ended_s, 0.25)
    return Entry(PlannedRequest(index, "ada", "hello", 2), ending, Verdict(outcome, "wrong"), resent)


def report(*entries, injected=(), problems=()):
    ledger = Ledger()
    for one in entries:
        ledger.open(one.planned)
        ledger.close(one)
    return Report({"seed": 5}, ledger, injected, None, problems, 12.0)


KILL = Injected(0, "kill", "b1", 10.0, 11.0, 0.5)


def test_requests_count_for_the_faults_that_they_met():
    told = json.loads(
        report(
            entry(0, 1.0, 9.0),
            entry(1, 9.0, 10.5, attempts=2, continuations=1),
            entry(2, 10.2, 12.0, attempts=2),
            entry(3, 12.9, 14.0, resent=1),
            entry(4, 13.5, 14.0, attempts=2, continuations=1),
            injected=[KILL, replace(KILL, index=1, began_s=0.0, ended_s=0.1, rejoin_s=0.7)],
        ).line()
    )
    assert told["by_fault"] == {
        "kill": {
            "injected": 2, "in_flight": 1, "continued": 1, "retried": 1, "resent": 1, "longest_gap_s": 0.25,
            "rejoin_p50_s": 0.6, "rejoin_max_s": 0.7,
        }
    }  # fmt: skip
    assert (told["seed"], told["continued"], told["tokens"], told["lost"]) == (5, 2, 10, 0)
    assert told["outcomes"]["answered"] == 5


def test_problems_are_shown_and_break_the_run():
    whole = report(entry(0, 1.0, 2.0))
    assert not whole.broken
    broken = report(entry(0, 1.0, 2.0, Outcome.BROKEN), problems=["request 0: [red] is wrong"])
    assert broken.broken
    console = Console(file=io.StringIO(), width=200)
    broken.show(console)
    assert "BROKEN: request 0: [red] is wrong" in console.file.getvalue()
    assert json.loads(broken.line())["problems"] == 1


def test_growth_is_of_the_newest_process_after_its_warm_up():
    vitals = Vitals()
    vitals.samples["router", 1] = [Sample(0.0, 900 * MEBIBYTE, 90, 9)] * 20
    vitals.samples["router", 2] = [Sample(second, second * MEBIBYTE, 10 + second // 10, 5) for second in range(20)]
    growth = vitals.growth(SimpleNamespace(name="router", pid=2), warm_up=0.5)
    assert (growth.rss_mib, growth.fds, growth.threads) == (8.0, 0, 0)
    assert vitals.growth(SimpleNamespace(name="router", pid=3), warm_up=0.5) is None
