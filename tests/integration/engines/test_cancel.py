"""A cancel takes effect between two steps, wherever the request is, and hurts nobody else."""

from __future__ import annotations

from backend_service.request import Phase
from tests.integration.engines.bench import STEP_TOKENS, Bench
from tests.integration.engines.cases import EngineCase, EngineOptions, Lack
from tests.integration.engines.conftest import Alone
from tests.integration.engines.prompts import LENGTH, LONG, NEW, prompt


def pair(case: EngineCase) -> Bench:
    """Two places, so that a freed one shows."""
    return Bench(case.make(EngineOptions(max_live=2)), max_active=2)


def test_while_queued(case: EngineCase, alone: Alone):
    bench = pair(case)
    prompts = [prompt(bench.engine, seed, LENGTH) for seed in range(4)]
    first, second, victim, last = (bench.submit(tokens, NEW) for tokens in prompts)
    bench.tick()
    assert bench.phase(victim) is Phase.QUEUED
    bench.cancel(victim)
    assert bench.phase(victim) is None
    bench.run()
    for name, tokens in ((first, prompts[0]), (second, prompts[1]), (last, prompts[3])):
        assert bench.answer(name).tokens == alone(tokens, NEW).tokens
    assert not bench.tokens(victim)
    assert bench.engine.computed_tokens == 3 * (LENGTH + NEW - 1), "something was computed for it"


def test_while_prefilling(case: EngineCase, alone: Alone):
    bench = pair(case)
    long = prompt(bench.engine, 0, LONG)
    mine, waiting = prompt(bench.engine, 1, LENGTH), prompt(bench.engine, 2, LENGTH)
    name = bench.submit(mine, NEW)
    victim = bench.submit(long, NEW)
    next_in_line = bench.submit(waiting, NEW)
    bench.run(until=lambda: bench.phase(name) is Phase.DECODE and bench.computed(victim) > STEP_TOKENS)
    assert bench.phase(victim) is Phase.PREFILL
    computed = bench.computed(victim)
    bench.cancel(victim)
    assert_the_place_is_free(bench, victim, next_in_line)
    assert_what_was_computed_is_reusable(case, bench, long, computed)
    bench.run()
    assert bench.answer(name).tokens == alone(mine, NEW).tokens
    assert bench.answer(next_in_line).tokens == alone(waiting, NEW).tokens
    assert bench.ask(long, NEW).tokens == alone(long, NEW).tokens


def test_while_decoding(case: EngineCase, alone: Alone):
    bench = pair(case)
    mine, other, waiting = (prompt(bench.engine, seed, LENGTH) for seed in range(3))
    name = bench.submit(mine, NEW)
    victim = bench.submit(other, NEW)
    next_in_line = bench.submit(waiting, NEW)
    bench.run(until=lambda: len(bench.tokens(victim)) == 5)
    said = bench.tokens(victim)
    bench.cancel(victim)
    assert_the_place_is_free(bench, victim, next_in_line)
    assert_what_was_computed_is_reusable(case, bench, (*other, *said), LENGTH + 4)
    bench.run()
    assert bench.tokens(victim) == said, "it went on"
    assert said == alone(other, NEW).tokens[:5]
    assert bench.answer(name).tokens == alone(mine, NEW).tokens
    assert bench.answer(next_in_line).tokens == alone(waiting, NEW).tokens
    assert bench.ask(other, NEW).tokens == alone(other, NEW).tokens


def test_of_everything_leaves_nothing_reserved(case: EngineCase):
    bench = pair(case)
    names = [bench.submit(prompt(bench.engine, seed, LENGTH), NEW) for seed in range(3)]
    bench.tick()
    for name in names:
        bench.cancel(name)
    assert not bench.scheduler.busy
    use = bench.engine.stats()
    assert (use.reserved_tokens, use.used_tokens) == (0, use.retained_tokens)
    bench.engine.check()


def assert_the_place_is_free(bench: Bench, victim: str, next_in_line: str) -> None:
    assert bench.phase(next_in_line) is Phase.QUEUED
    bench.tick()
    assert bench.phase(victim) is None
    assert bench.phase(next_in_line) is not Phase.QUEUED


def assert_what_was_computed_is_reusable(case: EngineCase, bench: Bench, tokens: tuple[int, ...], count: int) -> None:
    assert Lack.REUSE in case.lacks or bench.engine.probe(tokens) == count
