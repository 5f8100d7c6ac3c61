"""An answer that another engine began goes on as if it had never been cut, and nothing is shared across cache salts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from backend_service.engines.base import Engine, Slice
from service_kit.requests import Sampling
from tests.integration.engines.cases import EngineCase, EngineOptions, Lack
from tests.integration.engines.prompts import LENGTH, NEW, prompt

CUTS = (1, 5, NEW - 1)
SEEDED = Sampling(temperature=3.0, top_k=100, seed=7)
NARROW = Sampling(temperature=0.8, top_p=0.9, top_k=40, seed=7)
"""Often leaves one candidate, for which nothing need be drawn."""
PENALIZED = Sampling(temperature=1.5, top_k=50, seed=7, repetition_penalty=1.3, frequency_penalty=0.5)


def say(
    engine: Engine, tokens: Sequence[int], sampling: Sampling, *, begun: Sequence[int] = (), salt: str = ""
) -> list[int]:
    """The answer of `NEW` tokens, of which `begun` was generated before."""
    known = [*tokens, *begun]
    admission = engine.admit(known, NEW - len(begun), sampling, ignore_eos=True, generated=len(begun), cache_salt=salt)
    assert admission is not None
    said = [*begun]
    missing = len(known) - admission.reused_tokens
    while len(said) < NEW:
        result = engine.step([Slice(admission.handle, missing)])
        said += result.tokens[admission.handle]
        missing = 1
    engine.release(admission.handle, retain=True)
    engine.check_integrity()
    return said


@pytest.fixture
def engine(case: EngineCase) -> Engine:
    return case.make(EngineOptions())


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "sampling", [Sampling(), SEEDED, NARROW, PENALIZED], ids=["greedy", "seeded", "narrow", "penalized"]
)
def test_on_a_fresh_engine(case: EngineCase, engine: Engine, sampling: Sampling, cut: int):
    if not sampling.greedy:
        case.needs(Lack.SAMPLING)
        case.needs(Lack.EXACTNESS)
    tokens = prompt(engine, 0, LENGTH)
    whole = say(engine, tokens, sampling)
    assert say(case.make(EngineOptions()), tokens, sampling, begun=whole[:cut]) == whole


@pytest.mark.parametrize("cut", CUTS)
def test_on_an_engine_that_has_the_prompt_already(case: EngineCase, engine: Engine, cut: int):
    tokens = prompt(engine, 0, LENGTH)
    whole = say(case.make(EngineOptions()), tokens, Sampling())
    say(engine, tokens, Sampling())
    assert say(engine, tokens, Sampling(), begun=whole[:cut]) == whole


def test_twice(case: EngineCase, engine: Engine):
    case.needs(Lack.SAMPLING)
    case.needs(Lack.EXACTNESS)
    tokens = prompt(engine, 1, LENGTH)
    whole = say(engine, tokens, SEEDED)
    for cut in (3, 8):
        again = say(case.make(EngineOptions()), tokens, SEEDED, begun=whole[:cut])
        assert again == whole


def test_another_salt_finds_nothing(case: EngineCase, engine: Engine):
    tokens = prompt(engine, 0, LENGTH)
    say(engine, tokens, Sampling(), salt="mine")
    assert engine.probe(tokens, "yours") == engine.probe(tokens) == 0
    assert Lack.REUSE in case.lacks or engine.probe(tokens, "mine") == LENGTH - 1
    say(engine, tokens, Sampling(), salt="yours")
    say(engine, tokens, Sampling())


def test_another_salt_finds_nothing_in_host_memory(case: EngineCase):
    case.needs(Lack.HOST_TIER)
    engine = case.make(EngineOptions(retained_tokens=0, host_tier=True))
    tokens = prompt(engine, 0, LENGTH)
    say(engine, tokens, Sampling(), salt="mine")
    assert engine.probe(tokens, "mine") > 0
    assert engine.probe(tokens, "yours") == engine.probe(tokens) == 0
