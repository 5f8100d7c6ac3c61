"""Answers with guesses are the answers without: the packaged model.

It is quantised, so that another order of cells changes a logit by more than 1. What is asked of it here is alone, where
the order stays the same and logits are equal to the bit, or a list that repeats itself. A tiny model is asked the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from backend_service.engines.llama_draft import LlamaDraft
from backend_service.engines.llama_model import LlamaModel
from backend_service.models import locate_model
from backend_service.speculation.base import Proposer
from backend_service.speculation.prompt_lookup import PromptLookup
from benchmarks.truncated_model import truncate
from service_kit.requests import Prompt, Sampling, TextPrompt
from tests.integration.speculating import CONFIG, Plain, plain_answers, same, speculating

NEW = 24
LIST = TextPrompt(
    "Monday: open at 9, close at 17, staff 3\nTuesday: open at 9, close at 17, staff 3\nWednesday: open at 9,"
)
TABLE = TextPrompt("| id | city | status |\n|---|---|---|\n| 1 | Oslo | active |\n| 2 | Oslo | active |\n| 3 |")
STORY = TextPrompt("The train was an hour late when Miriam saw the man with the green umbrella again.")


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return LlamaModel(locate_model("default"))


@pytest.fixture(scope="module")
def plain(model: LlamaModel) -> Plain:
    return plain_answers(model)


@pytest.fixture(scope="module")
def truncated(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    """26 of 30 layers guess about half of the tokens right, so that rows of guesses break off at every place."""
    path = tmp_path_factory.mktemp("draft") / "draft.gguf"
    truncate(locate_model("default"), path, range(26))
    return LlamaModel(path)


@pytest.fixture(params=["prompt_lookup", "truncated", "itself"])
def proposer(request: pytest.FixtureRequest, model: LlamaModel, truncated: LlamaModel) -> Proposer:
    """Each in turn."""
    made: dict[str, Callable[[], Proposer]] = {
        "prompt_lookup": lambda: PromptLookup(ngram_tokens=2),
        "truncated": lambda: LlamaDraft(truncated, model, CONFIG),
        "itself": lambda: LlamaDraft(model, model, CONFIG),
    }
    return made[request.param]()


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        pytest.param(LIST, Sampling(), id="repetitive"),
        pytest.param(STORY, Sampling(), id="story"),
        pytest.param(STORY, Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=7), id="seeded"),
        pytest.param(LIST, Sampling(temperature=0.7, seed=11, repetition_penalty=1.3), id="penalized"),
    ],
)
def test_alone(prompt: Prompt, sampling: Sampling, proposer: Proposer, model: LlamaModel, plain: Plain):
    bench = speculating(model, proposer)
    tokens = tuple(bench.engine.prepare(prompt))
    assert same(bench.ask(tokens, NEW, sampling=sampling), plain(tokens, NEW, sampling=sampling))


def test_in_a_batch(proposer: Proposer, model: LlamaModel, plain: Plain):
    bench = speculating(model, proposer)
    prompts = [tuple(bench.engine.prepare(prompt)) for prompt in (LIST, TABLE)]
    names = [bench.submit(tokens, NEW) for tokens in prompts]
    bench.run()
    for name, tokens in zip(names, prompts, strict=True):
        assert same(bench.answer(name), plain(tokens, NEW))
    assert 0 < bench.inner.right <= bench.inner.guessed
