"""Anything may arrive and be cancelled at any time."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.integration.engines.bench import Bench
from tests.integration.engines.cases import EngineCase, EngineOptions, Lack
from tests.integration.engines.conftest import Alone
from tests.integration.engines.prompts import LENGTH, NEW, PARTING, branch, prompt


@dataclass(frozen=True)
class Arrival:
    """One request of a load."""

    trunk: int
    part_at: int
    """Where it leaves the trunk of its family."""
    length: int
    max_new_tokens: int
    ticks_before: int
    """Steps since the arrival before it."""
    cancel_after: int | None
    """Steps until its cancel."""


def arrivals() -> st.SearchStrategy[Arrival]:
    return st.builds(
        Arrival,
        trunk=st.integers(0, 1),
        part_at=st.sampled_from([1, 17, 32, PARTING, LENGTH]),
        length=st.sampled_from([2, 33, LENGTH]),
        max_new_tokens=st.integers(1, NEW),
        ticks_before=st.integers(0, 5),
        cancel_after=st.none() | st.integers(0, 8),
    )


def run(case: EngineCase, alone: Alone, load: list[Arrival], options: EngineOptions) -> None:
    """Integrity is checked after each step, answers against those of a fresh engine, cancelled ones too."""
    bench = Bench(case.make(options), max_active=options.max_live)
    prompts: dict[str, tuple[int, ...]] = {}
    cancels: dict[str, int] = {}
    for arrival in load:
        step(bench, arrival.ticks_before, cancels)
        trunk = prompt(bench.engine, arrival.trunk, LENGTH)
        tokens = branch(bench.engine, trunk, min(arrival.part_at, arrival.length), arrival.length)
        name = bench.submit(tokens, arrival.max_new_tokens)
        prompts[name] = tokens
        if arrival.cancel_after is not None:
            cancels[name] = bench.ticks + arrival.cancel_after
    while bench.scheduler.busy:
        step(bench, 1, cancels)
    bench.engine.check()
    use = bench.engine.stats()
    assert (use.reserved_tokens, use.used_tokens) == (0, use.retained_tokens)
    for (name, tokens), arrival in zip(prompts.items(), load, strict=True):
        said = bench.tokens(name)
        assert said == alone(tokens, NEW).tokens[: len(said)]
        assert len(said) == arrival.max_new_tokens or name in cancels


def step(bench: Bench, ticks: int, cancels: dict[str, int]) -> None:
    for _ in range(ticks):
        bench.tick()
        for name, due in cancels.items():
            if due == bench.ticks:
                bench.cancel(name)


def test_a_seeded_load(case: EngineCase, alone: Alone):
    chance = random.Random(5)
    load = [
        Arrival(
            trunk=chance.randrange(2),
            part_at=chance.choice([1, PARTING, LENGTH]),
            length=LENGTH,
            max_new_tokens=chance.randrange(1, NEW),
            ticks_before=chance.randrange(4),
            cancel_after=chance.choice([None, None, 3]),
        )
        for _ in range(5 if case.slow else 40)
    ]
    run(case, alone, load, EngineOptions(capacity_tokens=256, max_live=3, retained_tokens=150))


# Not shrunk: that takes minutes, and a load is short enough to be read as it is.
@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    load=st.lists(arrivals(), max_size=12),
    max_live=st.integers(1, 4),
    retained_tokens=st.sampled_from([0, 70, 1024]),
    host_tier=st.booleans(),
)
def test_any_load(
    case: EngineCase, alone: Alone, load: list[Arrival], max_live: int, retained_tokens: int, host_tier: bool
):
    if case.slow:
        pytest.skip("too many requests for a slow engine; test_a_seeded_load has some")
    options = EngineOptions(
        capacity_tokens=256,
        max_live=max_live,
        retained_tokens=retained_tokens,
        host_tier=host_tier and Lack.HOST_TIER not in case.lacks,
    )
    run(case, alone, load, options)
