"""Fixtures of the conformance suite; the folder's docstring says how it is put together."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from service_kit.requests import Sampling
from tests.integration.engines.bench import Answer, Bench
from tests.integration.engines.cases import CASES, EngineCase, EngineOptions


@pytest.fixture(scope="session", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineCase:
    """Each engine in turn; its model is loaded once."""
    return CASES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture
def bench(case: EngineCase) -> Bench:
    """A fresh engine with room for everything."""
    return Bench(case.make(EngineOptions()))


Alone = Callable[..., Answer]


@pytest.fixture(scope="session")
def alone(case: EngineCase) -> Alone:
    """`alone(tokens, max_new_tokens, ...)`: the answer of a fresh engine that has nothing else to do; computed once."""

    @functools.cache
    def ask(
        tokens: tuple[int, ...],
        max_new_tokens: int = 8,
        *,
        sampling: Sampling | None = None,
        stop: tuple[str, ...] = (),
        ignore_eos: bool = True,
    ) -> Answer:
        bench = Bench(case.make(EngineOptions()))
        return bench.ask(tokens, max_new_tokens, sampling=sampling, stop=stop, ignore_eos=ignore_eos)

    return ask
