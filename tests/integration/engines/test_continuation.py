"""An answer that another engine began goes on as if it had never been cut, and nothing is shared across cache salts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest

from backend_service.engines.base import Engine, Slice
from backend_service.request import Phase
from service_kit.requests import Sampling, TextPrompt
from tests.integration.engines.bench import Bench
from tests.integration.engines.cases import EngineCase, EngineOptions, Lack
from tests.integration.engines.prompts import LENGTH, NEW, PARTING, branch, prompt

CUTS = (1, 5, NEW - 1)
SEEDED = Sampling(temperature=3.0, top_k=100, seed=7)
NARROW = Sampling(temperature=0.8, top_p=0.9, top_k=40, seed=7)
"""Often leaves one candidate, for which nothing need be drawn, and to a real model that is sure of its answer no other
that rounding could bring in."""
PENALIZED = Sampling(
    temperature=1.5, top_k=50, seed=7, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5
)
WARY = Sampling(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5)
"""Greedy, and yet what was generated before counts."""
SAMPLINGS = pytest.mark.parametrize(
    "sampling",
    [Sampling(), SEEDED, NARROW, PENALIZED, WARY],
    ids=["greedy", "seeded", "narrow", "penalized", "wary"],
)


Whole = Callable[[Sampling], list[int]]


def say(
    engine: Engine,
    tokens: Sequence[int],
    sampling: Sampling,
    *,
    begun: Sequence[int] = (),
    salt: str = "",
    ignore_eos: bool = True,
) -> list[int]:
    """The answer of `NEW` tokens, an end token or not, of which `begun` was generated before."""
    known = [*tokens, *begun]
    admission = engine.admit(
        known, NEW - len(begun), sampling, ignore_eos=ignore_eos, generated=len(begun), cache_salt=salt
    )
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


def need(case: EngineCase, sampling: Sampling) -> None:
    """Skip what the engine cannot do, or cannot do to the last bit."""
    if sampling != Sampling():
        case.needs(Lack.SAMPLING)
    if sampling not in (Sampling(), NARROW):
        case.needs(Lack.EXACTNESS)


@pytest.fixture(scope="module")
def whole(case: EngineCase) -> Whole:
    """The answer to the tests' prompt that nothing cut, from an engine of its own; computed once."""

    @functools.cache
    def ask(sampling: Sampling) -> list[int]:
        engine = case.make(EngineOptions())
        return say(engine, prompt(engine, 0, LENGTH), sampling)

    return ask


@SAMPLINGS
@pytest.mark.parametrize("cut", CUTS)
def test_on_a_fresh_engine(case: EngineCase, engine: Engine, whole: Whole, sampling: Sampling, cut: int):
    need(case, sampling)
    answer = whole(sampling)
    assert say(engine, prompt(engine, 0, LENGTH), sampling, begun=answer[:cut]) == answer


@SAMPLINGS
def test_on_an_engine_that_has_the_prompt_already(case: EngineCase, engine: Engine, whole: Whole, sampling: Sampling):
    """And then the beginning of the answer, too."""
    need(case, sampling)
    tokens, answer = prompt(engine, 0, LENGTH), whole(sampling)
    say(engine, tokens, Sampling())
    for cut in CUTS:
        assert say(engine, tokens, sampling, begun=answer[:cut]) == answer


@SAMPLINGS
def test_beside_others(case: EngineCase, whole: Whole, sampling: Sampling):
    """In the scheduler, in a batch with what it parts from and with strangers."""
    need(case, sampling)
    if case.slow and sampling not in (Sampling(), PENALIZED):
        pytest.skip(f"{case.name} takes long; the same code runs over a tiny model")
    bench = Bench(case.make(EngineOptions()))
    tokens, answer = prompt(bench.engine, 0, LENGTH), whole(sampling)
    bench.submit(prompt(bench.engine, 1, LENGTH), NEW)
    name = bench.submit((*tokens, *answer[:5]), NEW, sampling=sampling, resumed_tokens=5)
    bench.submit(branch(bench.engine, tokens, PARTING, LENGTH), NEW)
    bench.run()
    assert [*answer[:5], *bench.tokens(name)] == answer


def test_cut_twice(case: EngineCase, whole: Whole):
    need(case, NARROW)
    answer = begun = whole(NARROW)
    for kept in (3, 8):
        begun = answer[:kept]
        engine = case.make(EngineOptions())
        begun = say(engine, prompt(engine, 0, LENGTH), NARROW, begun=begun)
    assert begun == answer


def test_the_end_comes_at_the_same_token(case: EngineCase, engine: Engine):
    given = [engine.prepare(case.ending_prompt)] if case.ending_prompt else []
    for tokens in given or [prompt(engine, seed, LENGTH) for seed in range(80)]:
        answer = say(engine, tokens, Sampling(), ignore_eos=False)
        if engine.info.vocabulary.eos & {*answer[1:-1]}:
            break
    else:
        pytest.skip(f"{case.name} ends none of its answers early")
    assert say(case.make(EngineOptions()), tokens, Sampling(), begun=answer[:1], ignore_eos=False) == answer


def test_salts_share_nothing_and_one_salt_shares(case: EngineCase, engine: Engine, whole: Whole):
    tokens, answer = prompt(engine, 0, LENGTH), whole(Sampling())
    used_tokens = 0
    for salt in ("mine", "yours", ""):
        assert engine.probe(tokens, salt) == 0
        assert say(engine, tokens, Sampling(), salt=salt) == answer
        use = engine.stats()
        assert Lack.REUSE in case.lacks or use.used_tokens == used_tokens + LENGTH + NEW - 1
        used_tokens = use.used_tokens
    if Lack.REUSE in case.lacks or case.slow:
        return
    for salt in ("mine", "yours", ""):
        assert engine.probe(tokens, salt) == LENGTH - 1
        assert say(engine, tokens, Sampling(), salt=salt) == answer


def test_live_sequences_of_two_salts_share_nothing(case: EngineCase):
    """Not even where one is computing what the other waits to compute."""
    case.needs(Lack.REUSE)
    bench = Bench(case.make(EngineOptions()))
    tokens = prompt(bench.engine, 0, LENGTH)
    names = {name: bench.submit(tokens, 2, cache_salt=name[0]) for name in ("a", "b", "a again", "b again")}
    bench.tick()
    assert bench.phase(names["b"]) is bench.phase(names["a"]) is Phase.PREFILL
    assert bench.phase(names["b again"]) is bench.phase(names["a again"]) is Phase.QUEUED
    bench.run()
    found = {name: bench.answer(request).cached_tokens for name, request in names.items()}
    assert found == {"a": 0, "b": 0, "a again": LENGTH - 1, "b again": LENGTH - 1}
    assert len({bench.answer(request).tokens for request in names.values()}) == 1


def test_tokenized_prompts_are_remembered_by_salt(engine: Engine):
    """Else the time that a prompt takes would tell who has sent it before."""
    remembered = getattr(engine, "_tokenize", None)
    if remembered is None:
        pytest.skip(f"{engine.info.name} remembers none")
    text = TextPrompt("the cat")
    ids = engine.prepare(text, "mine")
    hits = remembered.cache_info().hits
    assert engine.prepare(text, "yours") == engine.prepare(text) == ids
    assert remembered.cache_info().hits == hits
    assert engine.prepare(text, "mine") == ids
    assert remembered.cache_info().hits == hits + 1


def test_another_salt_finds_nothing_in_host_memory(case: EngineCase):
    case.needs(Lack.HOST_TIER)
    engine = case.make(EngineOptions(retained_tokens=0, host_tier=True))
    tokens = prompt(engine, 0, LENGTH)
    say(engine, tokens, Sampling(), salt="mine")
    assert engine.probe(tokens, "mine") > 0
    assert engine.probe(tokens, "yours") == engine.probe(tokens) == 0
    admission = engine.admit(tokens, NEW, Sampling(), ignore_eos=True, cache_salt="yours")
    assert admission is not None
    assert admission.reused_tokens == 0
