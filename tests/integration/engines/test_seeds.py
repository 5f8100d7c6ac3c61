"""A seeded answer depends on its seed and its prompt only."""

from __future__ import annotations

from itertools import count

import pytest

from service_kit.requests import Sampling
from tests.integration.engines.bench import Bench
from tests.integration.engines.cases import EngineCase, Lack
from tests.integration.engines.conftest import Alone
from tests.integration.engines.prompts import NEW, prompt

LENGTH = 24


def seeded(seed: int | None) -> Sampling:
    return Sampling(temperature=3.0, top_k=100, seed=seed)


@pytest.fixture(autouse=True)
def sampling(case: EngineCase):
    case.needs(Lack.SAMPLING)


def test_the_same_seed_on_two_engines(bench: Bench, alone: Alone):
    tokens = prompt(bench.engine, 0, LENGTH)
    assert bench.ask(tokens, NEW, sampling=seeded(1)).tokens == alone(tokens, NEW, sampling=seeded(1)).tokens


def test_the_same_seed_alone_and_beside_other_seeds(case: EngineCase, bench: Bench, alone: Alone):
    case.needs(Lack.EXACTNESS)
    tokens = prompt(bench.engine, 0, LENGTH)
    names = {seed: bench.submit(tokens, NEW, sampling=seeded(seed)) for seed in (1, 2, 3)}
    greedy = bench.submit(tokens, NEW)
    bench.run()
    for seed, name in names.items():
        assert bench.answer(name).tokens == alone(tokens, NEW, sampling=seeded(seed)).tokens
    assert bench.answer(greedy).tokens == alone(tokens, NEW).tokens


def test_different_seeds_differ(bench: Bench, alone: Alone):
    tokens = prompt(bench.engine, 0, LENGTH)
    assert len({alone(tokens, NEW, sampling=seeded(seed)).tokens for seed in (1, 2, 3)}) == 3


def test_the_same_seed_on_a_warm_prefix(case: EngineCase, bench: Bench, alone: Alone):
    case.needs(Lack.EXACTNESS)
    tokens = prompt(bench.engine, 0, LENGTH)
    bench.ask(tokens, NEW)
    assert bench.ask(tokens, NEW, sampling=seeded(1)).tokens == alone(tokens, NEW, sampling=seeded(1)).tokens


def test_without_a_seed_answers_differ(bench: Bench):
    tokens = prompt(bench.engine, 0, LENGTH)
    names = [bench.submit(tokens, NEW, sampling=seeded(None)) for _ in range(3)]
    bench.run()
    assert len({bench.answer(name).tokens for name in names}) == 3


def test_penalties_change_an_answer_and_nobody_elses(case: EngineCase, bench: Bench, alone: Alone):
    case.needs(Lack.EXACTNESS)
    prompts = (prompt(bench.engine, seed, LENGTH) for seed in count())
    tokens = next(tokens for tokens in prompts if {*alone(tokens, NEW).tokens} & {*tokens})
    penalized = Sampling(repetition_penalty=10.0, presence_penalty=2.0, frequency_penalty=2.0)
    beside = bench.submit(tokens, NEW)
    mine = bench.submit(tokens, NEW, sampling=penalized)
    bench.run()
    assert bench.answer(beside).tokens == alone(tokens, NEW).tokens
    assert bench.answer(mine).tokens == alone(tokens, NEW, sampling=penalized).tokens != alone(tokens, NEW).tokens
