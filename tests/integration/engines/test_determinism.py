"""A greedy answer is the same whatever else the engine does and has done."""

from __future__ import annotations

from backend_service.request import Phase
from tests.integration.engines.bench import Bench
from tests.integration.engines.cases import EngineCase, EngineOptions, Lack
from tests.integration.engines.conftest import Alone
from tests.integration.engines.prompts import LENGTH, NEW, PARTING, branch, prompt


def test_answers_of_different_prompts_differ(bench: Bench, alone: Alone):
    """Otherwise the tests below would show nothing."""
    answers = {alone(prompt(bench.engine, seed, LENGTH), NEW).tokens for seed in range(4)}
    assert len(answers) == 4


def test_batched_with_three_others(bench: Bench, alone: Alone):
    prompts = [prompt(bench.engine, seed, LENGTH) for seed in range(4)]
    names = [bench.submit(tokens, NEW) for tokens in prompts]
    bench.run()
    assert max(len(step) for step in bench.engine.steps) == 4
    for name, tokens in zip(names, prompts, strict=True):
        assert bench.answer(name).tokens == alone(tokens, NEW).tokens


def test_on_a_warm_prefix(bench: Bench, case: EngineCase, alone: Alone):
    first = prompt(bench.engine, 0, LENGTH)
    bench.ask(first, NEW)
    second = branch(bench.engine, first, PARTING, LENGTH)
    warm = bench.ask(second, NEW)
    assert warm.tokens == alone(second, NEW).tokens != alone(first, NEW).tokens
    assert Lack.REUSE in case.lacks or warm.cached_tokens == PARTING


def test_on_a_warm_prefix_that_ends_in_another_answer(bench: Bench, case: EngineCase, alone: Alone):
    """What was generated is reusable like a prompt, as in the next turn of a chat."""
    first = prompt(bench.engine, 0, LENGTH)
    answer = bench.ask(first, NEW)
    second = branch(bench.engine, (*first, *answer.tokens), LENGTH + NEW, LENGTH + NEW + 36)
    warm = bench.ask(second, NEW)
    assert warm.tokens == alone(second, NEW).tokens
    # The last token of an answer is never computed.
    assert Lack.REUSE in case.lacks or warm.cached_tokens == LENGTH + NEW - 1


def test_after_a_neighbours_cancel(bench: Bench, alone: Alone):
    mine = prompt(bench.engine, 0, LENGTH)
    name = bench.submit(mine, NEW)
    victim = bench.submit(branch(bench.engine, mine, 20, LENGTH), 200)
    bench.run(until=lambda: bench.phase(victim) is Phase.DECODE and len(bench.tokens(name)) >= 3)
    bench.cancel(victim)
    bench.run()
    assert bench.answer(name).tokens == alone(mine, NEW).tokens


def test_after_eviction_and_recomputation(case: EngineCase, alone: Alone):
    bench = Bench(case.make(EngineOptions(retained_tokens=0)))
    mine = prompt(bench.engine, 0, LENGTH)
    assert bench.ask(mine, NEW).tokens == alone(mine, NEW).tokens
    assert bench.engine.probe(mine) == 0, "it was not evicted"
    again = bench.ask(mine, NEW)
    assert again.cached_tokens == 0
    assert again.tokens == alone(mine, NEW).tokens
