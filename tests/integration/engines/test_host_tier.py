"""Prefixes that had to leave the device come back from host memory instead of being computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.integration.engines.bench import Bench
from tests.integration.engines.cases import CASES, EngineCase, EngineOptions, Lack, llama_case
from tests.integration.engines.prompts import NEW, Tokens, branch, prompt
from tests.integration.engines.tiny_models import TINY_MODELS

LENGTH = 150
"""More than two blocks of any tier."""
CAPACITY = 256
"""Holds one prompt, not two."""


def packaged(kv_type: str, *, flash_attention: bool) -> Callable[[Path], EngineCase]:
    def build(_folder: Path) -> EngineCase:
        from backend_service.models import locate_model

        path = locate_model("default")
        return llama_case("llama_cpp", path, kv_type=kv_type, flash_attention=flash_attention, slow=True)

    return build


def tiny(kv_type: str, *, flash_attention: bool) -> Callable[[Path], EngineCase]:
    def build(folder: Path) -> EngineCase:
        path = TINY_MODELS["qwen2"](folder / "qwen2.gguf")
        return llama_case("llama_cpp-qwen2", path, kv_type=kv_type, flash_attention=flash_attention)

    return build


TIERED: dict[str, Callable[[Path], EngineCase]] = {
    "simulated": CASES["simulated"],
    "qwen2-f16": tiny("f16", flash_attention=False),
    "qwen2-f16-flash": tiny("f16", flash_attention=True),
    "qwen2-q8_0-flash": tiny("q8_0", flash_attention=True),
    "llama_cpp-f16": packaged("f16", flash_attention=False),
    "llama_cpp-q8_0-flash": packaged("q8_0", flash_attention=True),
}


@pytest.fixture(scope="module", params=TIERED)
def tiered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineCase:
    case = TIERED[request.param](tmp_path_factory.mktemp(request.param))
    case.needs(Lack.HOST_TIER)
    return case


def small(case: EngineCase, **options: int) -> Bench:
    return Bench(case.make(EngineOptions(capacity_tokens=CAPACITY, host_tier=True, **options)))


def cold(case: EngineCase, tokens: Tokens, new: int = NEW) -> tuple[int, ...]:
    """The answer of a fresh engine with the same cache types."""
    return Bench(case.make(EngineOptions(capacity_tokens=CAPACITY))).ask(tokens, new).tokens


def push_out(bench: Bench, seeds: Sequence[int]) -> None:
    """Fill the device with others."""
    for seed in seeds:
        bench.ask(prompt(bench.engine, seed, LENGTH), 1)


def test_an_evicted_prefix_is_promised_and_restored(tiered: EngineCase):
    bench = small(tiered)
    mine = prompt(bench.engine, 0, LENGTH)
    first = bench.ask(mine, NEW)
    push_out(bench, [1])
    use = bench.engine.stats()
    assert use.host_tokens > 0
    assert use.used_tokens < 2 * LENGTH, "nothing had to go"
    promised = bench.engine.probe(mine)
    assert promised >= LENGTH // 2
    assert bench.engine.stats() == use, "a probe moved something"
    computed = bench.engine.computed_tokens
    again = bench.ask(mine, NEW)
    assert again.cached_tokens == promised
    assert bench.engine.computed_tokens - computed == LENGTH - promised + NEW - 1
    assert again.tokens == first.tokens == cold(tiered, mine)


def test_without_the_tier_the_same_prefix_is_lost(tiered: EngineCase):
    bench = Bench(tiered.make(EngineOptions(capacity_tokens=CAPACITY)))
    mine = prompt(bench.engine, 0, LENGTH)
    bench.ask(mine, 1)
    push_out(bench, [1])
    assert bench.engine.probe(mine) < LENGTH // 2 + 50
    assert bench.engine.stats().host_tokens == 0


def test_a_prompt_that_leaves_a_restored_prefix_inside_a_block(tiered: EngineCase):
    """What is restored beyond the common prefix must not be seen."""
    bench = small(tiered)
    mine = prompt(bench.engine, 0, LENGTH)
    bench.ask(mine, 1)
    push_out(bench, [1])
    other = branch(bench.engine, mine, LENGTH - 9, LENGTH + 5)
    promised = bench.engine.probe(other)
    assert 0 < promised <= LENGTH - 9
    answer = bench.ask(other, NEW)
    assert answer.cached_tokens == promised
    assert answer.tokens == cold(tiered, other)


def test_the_whole_prompt_in_host_memory_leaves_one_token_to_compute(tiered: EngineCase):
    bench = small(tiered)
    mine = prompt(bench.engine, 0, LENGTH)
    bench.ask(mine, 1)
    push_out(bench, [1])
    restorable = bench.engine.probe(mine)
    exact = mine[:restorable]
    assert bench.engine.probe(exact) == restorable - 1
    answer = bench.ask(exact, NEW)
    assert answer.cached_tokens == restorable - 1
    assert answer.tokens == cold(tiered, exact)


def test_a_part_on_the_device_and_the_rest_in_host_memory(tiered: EngineCase):
    """Another request keeps the first tokens on the device; those after them are restored."""
    bench = small(tiered)
    mine = prompt(bench.engine, 0, LENGTH)
    bench.ask(mine, 1)
    sibling = bench.submit(branch(bench.engine, mine, 40, 48), CAPACITY - 48 - LENGTH // 2)
    bench.run(until=lambda: len(bench.tokens(sibling)) >= 2)
    assert bench.engine.stats().host_tokens > 0, "the rest was not evicted"
    bench.cancel(sibling)
    promised = bench.engine.probe(mine)
    assert promised > 40
    answer = bench.ask(mine, NEW)
    assert answer.cached_tokens == promised
    assert answer.tokens == cold(tiered, mine)


def test_restored_beside_running_requests_under_pressure(tiered: EngineCase):
    """Prompts go round and round through a cache that holds two of them; every answer is the cold one."""
    bench = small(tiered, max_live=2)
    length = 90
    prompts = [prompt(bench.engine, seed, length) for seed in range(3)]
    expected = [cold(tiered, tokens, 4) for tokens in prompts]
    rounds = 2 if tiered.slow else 6
    names = [bench.submit(tokens, 4) for _ in range(rounds) for tokens in prompts]
    bench.run()
    answers = [bench.answer(name) for name in names]
    assert [answer.tokens for answer in answers] == expected * rounds
    assert sum(answer.cached_tokens for answer in answers) > length // 2, "nothing was restored"
