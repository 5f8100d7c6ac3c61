"""Short forms of the chaos, soak and fuzz runs; the long ones are `make chaos soak fuzz`."""

from __future__ import annotations

import pytest

from tests.chaos import runner, soak
from tests.chaos.ledger import Outcome
from tests.fuzz.inputs import chunks
from tests.fuzz.runner import fuzz

SOAK_GROWTH_MIB = 8.0
"""In a minute buffers and tables are still filling: this finds a leak of a kilobyte a request, the half hour finds
the small ones."""


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    """Processes inherit it: nothing is read from or written to this user's own files."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.timeout(300)
async def test_no_request_is_lost_or_wrong_while_backends_and_router_fail(tmp_path):
    report = await runner.run(runner.Options(requests=220, faults=22, seed=11), tmp_path)
    assert not report.problems, "\n".join(report.problems)
    assert len(report.ledger.entries) == 220
    assert report.ledger.outcomes()[Outcome.ANSWERED] > 150
    assert len({fault.kind for fault in report.injected}) >= 10


@pytest.mark.timeout(240)
async def test_memory_and_descriptors_stay_where_they_are_at_a_steady_load(tmp_path):
    soaked = await soak.soak(soak.Options(minutes=1.2, most_growth_mib=SOAK_GROWTH_MIB), tmp_path)
    assert not soaked.problems, "\n".join(soaked.problems)
    assert soaked.ledger.outcomes()[Outcome.ANSWERED] > 300


@pytest.mark.timeout(240)
async def test_nonsense_in_every_field_and_on_the_wire_is_refused_and_nothing_else_happens(tmp_path):
    found = await fuzz(chunks(11, 2000), tmp_path)
    assert not found.problems, "\n".join(what for what, _ in found.problems)
    assert found.sent == 2000
