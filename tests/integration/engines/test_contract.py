"""The six methods of `Engine`, called directly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from backend_service.engines.base import Admission, Engine, Slice
from service_kit.faults import InvalidRequest
from service_kit.requests import Sampling, TokenPrompt
from tests.integration.engines.cases import EngineCase, EngineOptions, Lack
from tests.integration.engines.conftest import Alone
from tests.integration.engines.prompts import LENGTH, NEW, Tokens, branch, prompt

SHORT = 30
MAX_LIVE = 3


@pytest.fixture
def engine(case: EngineCase) -> Engine:
    return case.make(EngineOptions(capacity_tokens=256, max_live=MAX_LIVE, max_retained=4))


def admit(engine: Engine, tokens: Sequence[int], max_new_tokens: int = NEW) -> Admission:
    admission = engine.admit(tokens, max_new_tokens, Sampling(), ignore_eos=True)
    assert admission is not None
    return admission


def compute(engine: Engine, tokens: Sequence[int], *, new: int = 1) -> tuple[int, list[int]]:
    """Admit and generate; the handle and what was generated."""
    admission = admit(engine, tokens, new)
    said = list(engine.step([Slice(admission.handle, len(tokens) - admission.reused_tokens)]).tokens[admission.handle])
    while len(said) < new:
        said += engine.step([Slice(admission.handle, 1)]).tokens[admission.handle]
    return admission.handle, said


def test_prepare_refuses_ids_beyond_the_vocabulary(engine: Engine):
    size = engine.info.vocabulary.size
    assert list(engine.prepare(TokenPrompt((0, size - 1)))) == [0, size - 1]
    with pytest.raises(InvalidRequest, match=str(size)):
        engine.prepare(TokenPrompt((0, size)))


def test_admit_returns_none_when_the_worst_case_does_not_fit_beside_the_live_ones(engine: Engine):
    """Two halves fill the cache, whether a batch takes the sum of its rows or is padded to the longest."""
    capacity = engine.stats().capacity_tokens
    half = capacity // 2 - SHORT
    first = admit(engine, prompt(engine, 0, SHORT), half)
    before = engine.stats()
    assert engine.admit(prompt(engine, 1, SHORT), half + 1, Sampling(), ignore_eos=True) is None
    assert engine.stats() == before, "a refused admission left something behind"
    second = admit(engine, prompt(engine, 1, SHORT), half)
    assert engine.admit(prompt(engine, 2, 2), 1, Sampling(), ignore_eos=True) is None
    engine.release(second.handle, retain=False)
    engine.release(first.handle, retain=False)
    admit(engine, prompt(engine, 1, SHORT), capacity - SHORT)
    engine.check_integrity()


def test_admit_returns_none_when_all_places_are_taken(engine: Engine):
    handles = [admit(engine, prompt(engine, seed, 8), 4).handle for seed in range(MAX_LIVE)]
    assert len(set(handles)) == MAX_LIVE
    assert engine.admit(prompt(engine, 9, 8), 4, Sampling(), ignore_eos=True) is None
    engine.release(handles[0], retain=False)
    admit(engine, prompt(engine, 9, 8), 4)
    engine.check_integrity()


def test_handles_are_reused(engine: Engine):
    """An engine that does not would run out of sequences."""
    seen = set()
    for seed in range(12):
        handle, _said = compute(engine, prompt(engine, seed, 8))
        seen.add(handle)
        engine.release(handle, retain=seed % 2 == 0)
    assert len(seen) <= MAX_LIVE + 4
    engine.check_integrity()


def test_release_without_retain_frees_everything(engine: Engine):
    tokens = prompt(engine, 0, SHORT)
    handle, _said = compute(engine, tokens)
    assert engine.stats().used_tokens >= SHORT
    engine.release(handle, retain=False)
    use = engine.stats()
    assert (use.used_tokens, use.retained_tokens, use.reserved_tokens) == (0, 0, 0)
    assert engine.probe(tokens) == 0
    engine.check_integrity()


def test_release_before_anything_was_computed(engine: Engine):
    engine.release(admit(engine, prompt(engine, 0, SHORT)).handle, retain=True)
    use = engine.stats()
    assert (use.used_tokens, use.reserved_tokens) == (0, 0)
    engine.check_integrity()


def test_probe_says_what_admit_reuses(case: EngineCase, engine: Engine):
    trunk = prompt(engine, 0, SHORT)
    handle, _said = compute(engine, trunk)
    related = [trunk, trunk[:1], trunk[:17], (*trunk, 5), branch(engine, trunk, 23, SHORT), prompt(engine, 1, SHORT)]
    live = [engine.probe(tokens) for tokens in related]
    engine.release(handle, retain=True)
    assert live == [engine.probe(tokens) for tokens in related]
    expected = [SHORT - 1, 0, 16, SHORT, 23]
    assert Lack.REUSE in case.lacks or live[:-1] == expected
    for tokens, promised in zip(related, live, strict=True):
        assert promised <= len(tokens) - 1
        admission = admit(engine, tokens, 1)
        assert admission.reused_tokens == promised
        engine.release(admission.handle, retain=False)
    engine.check_integrity()


def test_probe_changes_nothing(case: EngineCase):
    """Not even who gives way next."""
    case.needs(Lack.REUSE)
    engine = case.make(EngineOptions(max_retained=2))
    old, recent, new = (prompt(engine, seed, SHORT) for seed in range(3))
    for tokens in (old, recent):
        engine.release(compute(engine, tokens)[0], retain=True)
    before = engine.stats()
    for _ in range(3):
        assert engine.probe(branch(engine, old, 20, SHORT)) == 20
        assert engine.probe(old) == SHORT - 1
    assert engine.stats() == before
    engine.check_integrity()
    engine.release(compute(engine, new)[0], retain=True)
    assert engine.probe(recent) == SHORT - 1
    assert engine.probe(old) < SHORT - 1, "a probe counted as a use"


def test_a_step_with_requests_in_different_phases(engine: Engine, alone: Alone):
    decoding, finishing, prefilling = (prompt(engine, seed, LENGTH) for seed in range(3))
    first, said = compute_live(engine, decoding)
    second, third = admit(engine, finishing), admit(engine, prefilling)
    engine.step([Slice(second.handle, 25), Slice(third.handle, 9)])
    result = engine.step([Slice(third.handle, 20), Slice(first, 1), Slice(second.handle, LENGTH - 25)])
    assert set(result.tokens) == {first, second.handle}, "a slice that ends before the last known token samples nothing"
    assert [*said, *result.tokens[first]] == list(alone(decoding, NEW).tokens[:2])
    assert list(result.tokens[second.handle]) == list(alone(finishing, NEW).tokens[:1])
    result = engine.step([Slice(second.handle, 1), Slice(third.handle, LENGTH - 29), Slice(first, 1)])
    assert list(result.tokens[third.handle]) == list(alone(prefilling, NEW).tokens[:1])
    assert list(result.tokens[second.handle]) == list(alone(finishing, NEW).tokens[1:2])
    engine.check_integrity()


def compute_live(engine: Engine, tokens: Tokens) -> tuple[int, list[int]]:
    """As `compute`, with room for more."""
    admission = admit(engine, tokens)
    return admission.handle, list(engine.step([Slice(admission.handle, len(tokens))]).tokens[admission.handle])
