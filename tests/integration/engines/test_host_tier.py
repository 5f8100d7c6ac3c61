"""Prefixes that had to leave the device come back from host memory instead of being computed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backend_service.models import locate_model
from tests.integration.engines.bench import Bench
from tests.integration.engines.cases import CASES, EngineCase, EngineOptions, Lack, llama_case
from tests.integration.engines.prompts import NEW, PARTING, Tokens, branch, prompt
from tests.integration.engines.tiny_models import TINY_MODELS

LENGTH = 134
"""More than two blocks of any tier."""
CAPACITY = 256
"""Holds one prompt, not two."""


def packaged(_folder: Path) -> EngineCase:
    return llama_case("llama_cpp-q8_0", locate_model("default"), kv_type="q8_0", slow=True)


def tiny(folder: Path) -> EngineCase:
    return llama_case("llama_cpp-qwen2-q8_0", TINY_MODELS["qwen2"](folder / "qwen2.gguf"), kv_type="q8_0")


TIERED: dict[str, Callable[[Path], EngineCase]] = {
    **CASES,
    "llama_cpp-q8_0": packaged,
    "llama_cpp-qwen2-q8_0": tiny,
}
"""All engines, and llama.cpp with other cells."""


@pytest.fixture(scope="module", params=TIERED)
def tiered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineCase:
    case = TIERED[request.param](tmp_path_factory.mktemp(request.param))
    case.needs(Lack.HOST_TIER)
    return case


@pytest.fixture
def quick(tiered: EngineCase) -> EngineCase:
    if tiered.slow:
        pytest.skip(f"{tiered.name} takes long; the same code runs over a tiny model")
    return tiered


def small(case: EngineCase, **options: int) -> Bench:
    return Bench(case.make(EngineOptions(capacity_tokens=CAPACITY, host_tier=True, **options)))


def cold(case: EngineCase, tokens: Tokens, new: int = NEW) -> tuple[int, ...]:
    """The answer of a fresh engine with the same kind of cells."""
    return Bench(case.make(EngineOptions(capacity_tokens=CAPACITY))).ask(tokens, new).tokens


def push_out(bench: Bench) -> None:
    """Fill the device with somebody else."""
    bench.ask(prompt(bench.engine, 1, bench.engine.stats().capacity_tokens - 1), 1)


def test_a_prefix_evicted_at_its_release_is_promised_and_restored(tiered: EngineCase):
    bench = small(tiered, retained_tokens=0)
    mine = prompt(bench.engine, 0, LENGTH)
    first = bench.ask(mine, NEW)
    use = bench.engine.stats()
    assert (use.used_tokens, use.host_tokens > 0) == (0, True)
    promised = bench.engine.probe(mine)
    assert promised >= LENGTH // 2
    assert bench.engine.stats() == use, "a probe moved something"
    computed = bench.engine.computed_tokens
    again = bench.ask(mine, NEW)
    assert again.cached_tokens == promised
    assert bench.engine.computed_tokens - computed == LENGTH - promised + NEW - 1
    assert again.tokens == first.tokens == cold(tiered, mine)


def test_a_prefix_pushed_out_by_others_is_promised_and_restored(quick: EngineCase):
    bench = small(quick)
    mine = prompt(bench.engine, 0, LENGTH)
    bench.ask(mine, NEW)
    push_out(bench)
    promised = bench.engine.probe(mine)
    assert promised >= LENGTH // 2
    again = bench.ask(mine, NEW)
    assert again.cached_tokens == promised
    assert again.tokens == cold(quick, mine)


def test_without_the_tier_the_same_prefix_is_lost(quick: EngineCase):
    bench = Bench(quick.make(EngineOptions(capacity_tokens=CAPACITY)))
    mine = prompt(bench.engine, 0, LENGTH)
    bench.ask(mine, NEW)
    push_out(bench)
    assert bench.engine.probe(mine) == 0
    assert bench.engine.stats().host_tokens == 0


@pytest.mark.parametrize("at", [70, 110, 128])
def test_a_prompt_that_leaves_a_restored_prefix(quick: EngineCase, at: int):
    """What is restored beyond the common prefix must not be seen."""
    bench = small(quick)
    mine = prompt(bench.engine, 0, LENGTH)
    bench.ask(mine, 1)
    push_out(bench)
    other = branch(bench.engine, mine, at, LENGTH)
    promised = bench.engine.probe(other)
    assert 0 < promised <= at
    answer = bench.ask(other, NEW)
    assert answer.cached_tokens == promised
    assert answer.tokens == cold(quick, other)


def test_the_whole_prompt_in_host_memory_leaves_one_token_to_compute(quick: EngineCase):
    bench = small(quick)
    mine = prompt(bench.engine, 0, LENGTH)
    bench.ask(mine, 1)
    push_out(bench)
    restorable = bench.engine.probe(mine)
    exact = mine[:restorable]
    assert bench.engine.probe(exact) == restorable - 1
    answer = bench.ask(exact, NEW)
    assert answer.cached_tokens == restorable - 1
    assert answer.tokens == cold(quick, exact)


def test_the_first_part_on_the_device_and_the_rest_in_host_memory(quick: EngineCase):
    """A sibling holds the first tokens; those after them are restored behind."""
    bench = small(quick)
    mine = prompt(bench.engine, 0, LENGTH)
    bench.ask(mine, 1)
    push_out(bench)
    sibling = bench.submit(branch(bench.engine, mine, PARTING, 48), 60)
    bench.run(until=lambda: len(bench.tokens(sibling)) >= 2)
    promised = bench.engine.probe(mine)
    assert promised > LENGTH // 2
    name = bench.submit(mine, NEW)
    bench.run()
    assert bench.answer(name).cached_tokens == promised
    assert bench.answer(name).tokens == cold(quick, mine)
    assert bench.answer(sibling).tokens == cold(quick, branch(bench.engine, mine, PARTING, 48), 60)


def test_a_whole_answer_comes_back_for_the_next_turn(quick: EngineCase):
    bench = small(quick, retained_tokens=0)
    mine = prompt(bench.engine, 0, LENGTH)
    answer = bench.ask(mine, 80)
    turn = branch(bench.engine, (*mine, *answer.tokens), LENGTH + 80, LENGTH + 100)
    promised = bench.engine.probe(turn)
    assert promised > LENGTH, "nothing of the answer was kept"
    second = bench.ask(turn, NEW)
    assert second.cached_tokens == promised
    assert second.tokens == cold(quick, turn)


@pytest.mark.parametrize("length", [80, 110])
def test_restored_beside_running_requests_under_pressure(quick: EngineCase, length: int):
    """Prompts go round and round through a cache that holds two of them; every answer is the cold one."""
    bench = small(quick, max_live=2)
    prompts = [prompt(bench.engine, seed, length) for seed in range(4)]
    expected = [cold(quick, tokens, 4) for tokens in prompts]
    names = [bench.submit(tokens, 4) for _ in range(6) for tokens in prompts]
    bench.run()
    answers = [bench.answer(name) for name in names]
    assert [answer.tokens for answer in answers] == expected * 6
    assert sum(answer.cached_tokens for answer in answers) > 6 * length, "hardly anything was restored"
