"""Prefixes are computed once, credited up to where prompts part, and never beyond."""

from __future__ import annotations

import pytest

from backend_service.request import Phase
from tests.integration.engines.bench import STEP_TOKENS, Bench
from tests.integration.engines.cases import EngineCase, EngineOptions, Lack
from tests.integration.engines.conftest import Alone
from tests.integration.engines.prompts import LENGTH, LONG, NEW, PARTING, branch, prompt


@pytest.fixture(autouse=True)
def reusing(case: EngineCase):
    case.needs(Lack.REUSE)


def test_the_same_prompt_again_computes_one_token(bench: Bench, alone: Alone):
    tokens = prompt(bench.engine, 0, LENGTH)
    first = bench.ask(tokens, NEW)
    assert bench.engine.computed_tokens == LENGTH + NEW - 1
    again = bench.ask(tokens, NEW)
    assert again.cached_tokens == LENGTH - 1
    assert bench.engine.computed_tokens == LENGTH + NEW - 1 + NEW
    assert first.tokens == again.tokens == alone(tokens, NEW).tokens


def test_a_prefix_is_credited_up_to_where_prompts_part(case: EngineCase, bench: Bench, alone: Alone):
    """Within a chunk, at its border and at the ends."""
    trunk = prompt(bench.engine, 0, LENGTH)
    bench.ask(trunk, 1)
    for at in (PARTING,) if case.slow else (1, STEP_TOKENS, PARTING, LENGTH - 1):
        other = branch(bench.engine, trunk, at, LENGTH)
        assert bench.engine.probe(other) == at
        answer = bench.ask(other, NEW)
        assert answer.cached_tokens == at
        assert answer.tokens == alone(other, NEW).tokens


def test_a_prompt_that_is_a_prefix_of_a_computed_one_computes_its_last_token(bench: Bench, alone: Alone):
    trunk = prompt(bench.engine, 0, LENGTH)
    bench.ask(trunk, 1)
    answer = bench.ask(trunk[:48], NEW)
    assert answer.cached_tokens == 47
    assert answer.tokens == alone(trunk[:48], NEW).tokens


def test_a_prefix_of_a_prompt_still_in_prefill_is_shared(bench: Bench, alone: Alone):
    """The second prompt parts from the first in the middle of the chunk that was computed last."""
    long = prompt(bench.engine, 0, LONG)
    leader = bench.submit(long, NEW)
    bench.run(until=lambda: bench.computed(leader) == 2 * STEP_TOKENS)
    other = branch(bench.engine, long, PARTING, LENGTH)
    follower = bench.submit(other, NEW)
    bench.tick()
    assert bench.phase(leader) is Phase.PREFILL
    assert bench.phase(follower) is not Phase.QUEUED
    bench.run()
    assert bench.answer(follower).cached_tokens == PARTING
    assert bench.answer(follower).tokens == alone(other, NEW).tokens
    assert bench.answer(leader).tokens == alone(long, NEW).tokens


def test_a_prefix_of_a_running_answer_is_shared(bench: Bench, alone: Alone):
    tokens = prompt(bench.engine, 0, LENGTH)
    running = bench.submit(tokens, NEW)
    bench.run(until=lambda: len(bench.tokens(running)) >= 4)
    other = branch(bench.engine, (*tokens, *bench.tokens(running)[:3]), LENGTH + 3, LENGTH + 21)
    follower = bench.submit(other, NEW)
    bench.run()
    assert bench.answer(follower).cached_tokens == LENGTH + 3
    assert bench.answer(follower).tokens == alone(other, NEW).tokens
    assert bench.answer(running).tokens == alone(tokens, NEW).tokens


def test_identical_prompts_that_arrive_together_are_computed_once(bench: Bench, alone: Alone):
    tokens = prompt(bench.engine, 0, LENGTH)
    names = [bench.submit(tokens, NEW) for _ in range(4)]
    bench.run()
    assert bench.engine.computed_tokens == LENGTH + 3 * 1 + 4 * (NEW - 1)
    assert [bench.answer(name).cached_tokens for name in names] == [0, *[LENGTH - 1] * 3]
    assert {bench.answer(name).tokens for name in names} == {alone(tokens, NEW).tokens}


def test_prompts_with_a_long_common_prefix_that_arrive_together_compute_it_once(bench: Bench, alone: Alone):
    trunk = prompt(bench.engine, 0, LENGTH)
    prompts = [trunk, branch(bench.engine, trunk, PARTING, LENGTH), branch(bench.engine, trunk, 44, LENGTH, seed=20)]
    names = [bench.submit(tokens, NEW) for tokens in prompts]
    bench.run()
    assert bench.engine.computed_tokens == LENGTH + (LENGTH - PARTING) + (LENGTH - 44) + 3 * (NEW - 1)
    for name, tokens in zip(names, prompts, strict=True):
        assert bench.answer(name).tokens == alone(tokens, NEW).tokens


def test_shared_cells_are_reserved_once(case: EngineCase):
    """Four requests that share a prefix fit where four strangers would not."""
    case.needs(Lack.SHARED_CELLS)
    bench = Bench(case.make(EngineOptions(capacity_tokens=256)))
    capacity = bench.engine.stats().capacity_tokens
    trunk = prompt(bench.engine, 0, capacity // 2)
    bench.ask(trunk, 1)
    names = [bench.submit(branch(bench.engine, trunk, len(trunk) - 8, len(trunk), seed=seed), 1) for seed in range(4)]
    bench.tick()
    assert all(bench.phase(name) is not Phase.QUEUED for name in names)
    bench.run()
