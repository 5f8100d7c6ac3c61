"""More prompts than the cache holds: everybody finishes, and says the same as with room for all."""

from __future__ import annotations

from tests.integration.engines.bench import Bench
from tests.integration.engines.cases import EngineCase, EngineOptions, Lack
from tests.integration.engines.conftest import Alone
from tests.integration.engines.prompts import LENGTH, NEW, branch, prompt


def test_distinct_prompts_through_a_small_cache(case: EngineCase, alone: Alone):
    """The bench checks integrity and used + reserved <= capacity after every step."""
    bench = Bench(case.make(EngineOptions(capacity_tokens=256)))
    count = 4 if case.slow else 30
    prompts = [prompt(bench.engine, seed, LENGTH) for seed in range(count)]
    names = [bench.submit(tokens, NEW) for tokens in prompts]
    bench.run()
    assert bench.engine.stats().capacity_tokens < count * (LENGTH + NEW - 1), "they all fit"
    for name, tokens in zip(names, prompts, strict=True):
        assert bench.answer(name).tokens == alone(tokens, NEW).tokens


def test_families_of_prompts_through_a_small_cache(case: EngineCase, alone: Alone):
    """Prefixes are shared, evicted in part and computed again."""
    bench = Bench(case.make(EngineOptions(capacity_tokens=256, retained_tokens=200)))
    trunks = [prompt(bench.engine, seed, LENGTH) for seed in range(1 if case.slow else 4)]
    prompts = [
        branch(bench.engine, trunk, at, LENGTH, seed=61 + at) for at in (26, 38) for trunk in trunks for _ in range(2)
    ]
    answers = [bench.ask(tokens, NEW) for tokens in prompts]
    for tokens, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == alone(tokens, NEW).tokens
    if Lack.REUSE not in case.lacks:
        assert sum(answer.cached_tokens for answer in answers) > 0


def test_a_request_that_fills_the_cache_waits_for_the_others_and_then_runs(case: EngineCase, alone: Alone):
    bench = Bench(case.make(EngineOptions(capacity_tokens=256)))
    capacity = bench.engine.stats().capacity_tokens
    small = [prompt(bench.engine, seed, LENGTH) for seed in range(2)]
    names = [bench.submit(tokens, NEW) for tokens in small]
    giant = bench.submit(prompt(bench.engine, 2, LENGTH), capacity - LENGTH)
    last = bench.submit(prompt(bench.engine, 3, LENGTH), NEW)
    bench.run(until=lambda: all(bench.phase(name) is None for name in names))
    bench.run(until=lambda: len(bench.tokens(giant)) == NEW)
    assert not bench.tokens(last), "somebody overtook it"
    assert bench.tokens(giant) == alone(prompt(bench.engine, 2, LENGTH), NEW).tokens
    bench.cancel(giant)
    bench.run()
    assert bench.answer(last).tokens == alone(prompt(bench.engine, 3, LENGTH), NEW).tokens
    for name, tokens in zip(names, small, strict=True):
        assert bench.answer(name).tokens == alone(tokens, NEW).tokens
