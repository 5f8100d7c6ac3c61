"""Nobody's prompt shows in somebody else's answer."""

from __future__ import annotations

import pytest

from tests.integration.engines.bench import Bench
from tests.integration.engines.cases import EngineCase, Lack
from tests.integration.engines.conftest import Alone
from tests.integration.engines.prompts import SECRETS, secret_prompt

NEW = 3


@pytest.fixture(autouse=True)
def understood(case: EngineCase):
    case.needs(Lack.RECALL)


def check(bench: Bench, alone: Alone, names: dict[str, str]) -> None:
    """`names`: request by secret."""
    for secret, name in names.items():
        answer = bench.answer(name)
        assert answer.tokens == alone(secret_prompt(bench.engine, secret), NEW).tokens
        assert [word for word in SECRETS if word in answer.text] == [secret]


def test_the_model_repeats_each_secret_alone(bench: Bench, alone: Alone):
    for secret in SECRETS:
        text = alone(secret_prompt(bench.engine, secret), NEW).text
        assert [word for word in SECRETS if word in text] == [secret]


def test_concurrent_requests_keep_their_secrets(bench: Bench, alone: Alone):
    """The second time, each finds all but the last token of its own prompt in the cache, among those of the others."""
    for _ in range(2):
        names = {secret: bench.submit(secret_prompt(bench.engine, secret), NEW) for secret in SECRETS}
        bench.run()
        check(bench, alone, names)


def test_secrets_do_not_survive_in_reused_handles_and_cells(case: EngineCase, bench: Bench, alone: Alone):
    """One after the other with two at a time, so that each takes over the places of an earlier one."""
    bench = Bench(bench.inner, max_active=2)
    names = {secret: bench.submit(secret_prompt(bench.engine, secret), NEW) for secret in SECRETS}
    bench.run()
    check(bench, alone, names)
