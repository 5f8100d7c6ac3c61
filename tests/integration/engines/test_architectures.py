"""Models that llama.cpp serves in another way than plain attention, and one that it must not serve.

The rest of the suite runs over them too; here is what holds for them alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from backend_service.engines.base import Slice
from backend_service.request import Phase
from service_kit.requests import Sampling, TextPrompt
from tests.integration.engines.bench import Bench
from tests.integration.engines.cases import EngineCase, EngineOptions, llama_cpp_tiny
from tests.integration.engines.prompts import LENGTH, NEW, branch, prompt
from tests.integration.engines.tiny_models import SLIDING_WINDOW_TOKENS, TINY_MODELS

DECODERS = ["qwen2", "gemma2", "mamba"]


@pytest.fixture(scope="module", params=DECODERS)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineCase:
    return llama_cpp_tiny(request.param)(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> EngineCase:
    return llama_cpp_tiny("mamba")(tmp_path_factory.mktemp("mamba"))


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> EngineCase:
    return llama_cpp_tiny("gemma2")(tmp_path_factory.mktemp("gemma2"))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_models_are_small(name: str, tmp_path: Path):
    assert TINY_MODELS[name](tmp_path / "model.gguf").stat().st_size < 2_000_000


def test_text_survives_tokenizer_and_back(decoder: EngineCase):
    engine = decoder.make(EngineOptions())
    ids = engine.prepare(TextPrompt("the cat, naïve 北京"))
    assert b"".join(engine.info.vocabulary.pieces[token] for token in ids).decode() == "the cat, naïve 北京"


@pytest.mark.parametrize("place", [0, 10, 20, 40, LENGTH - 1])
def test_an_answer_depends_on_every_token_of_its_prompt(decoder: EngineCase, place: int):
    """Or these models could not show a wrong cell."""
    tokens = prompt(decoder.make(EngineOptions()), 0, LENGTH)
    changed = (*tokens[:place], tokens[place] + 1, *tokens[place + 1 :])
    answers = {Bench(decoder.make(EngineOptions())).ask(ids, NEW).tokens for ids in (tokens, changed)}
    assert len(answers) == 2


def test_a_recurrent_model_keeps_nothing_and_computes_all_of_a_warm_prompt(mamba: EngineCase):
    bench = Bench(mamba.make(EngineOptions()))
    tokens = prompt(bench.engine, 0, LENGTH)
    cold = bench.ask(tokens, NEW)
    assert bench.engine.probe(tokens) == 0
    assert bench.engine.stats().used_tokens == 0
    computed = bench.engine.computed_tokens
    warm = bench.ask(tokens, NEW)
    assert (warm.tokens, warm.cached_tokens) == (cold.tokens, 0)
    assert bench.engine.computed_tokens == 2 * computed


def test_a_recurrent_model_shares_nothing_with_a_running_request(mamba: EngineCase):
    bench = Bench(mamba.make(EngineOptions()))
    tokens = prompt(bench.engine, 0, LENGTH)
    running = bench.submit(tokens, NEW)
    bench.run(until=lambda: len(bench.tokens(running)) == 3)
    assert bench.engine.probe(tokens) == 0
    again = bench.submit(tokens, NEW)
    bench.run()
    assert bench.answer(again).cached_tokens == 0
    assert bench.answer(again).tokens == bench.answer(running).tokens


def test_nobody_waits_for_a_prefix_that_a_recurrent_model_cannot_share(mamba: EngineCase):
    bench = Bench(mamba.make(EngineOptions()))
    tokens = prompt(bench.engine, 0, LENGTH)
    names = [bench.submit(tokens, NEW) for _ in range(3)]
    bench.tick()
    assert [bench.phase(name) for name in names] == [Phase.PREFILL] * 3


def test_a_prefix_cut_off_beyond_the_sliding_window_is_right_or_not_promised(gemma2: EngineCase):
    """llama.cpp overwrites cells that lie outside the window as seen from the end of their own sequence, even in its
    full-size cache: a prefix that ends before that may have lost the cells that its next token looks at."""
    engine = gemma2.make(EngineOptions(capacity_tokens=256))
    long = prompt(engine, 0, 100)
    short = branch(engine, long, 100 - 3 * SLIDING_WINDOW_TOKENS, LENGTH + 10)
    cold = Bench(gemma2.make(EngineOptions(capacity_tokens=256))).ask(short, NEW)

    # A hole at the start of the cache, the long prompt behind it, and then somebody larger than the hole.
    hole = engine.admit(prompt(engine, 1, 40), 4, Sampling(), ignore_eos=True)
    assert hole is not None
    engine.step([Slice(hole.handle, 40)])
    bench = Bench(engine)
    bench.ask(long, 1)
    engine.release(hole.handle, retain=False)
    bench.ask(prompt(engine, 2, 80), NEW)

    assert bench.ask(short, NEW).tokens == cold.tokens


def test_an_embedding_model_is_refused_and_does_not_end_the_process(tmp_path: Path):
    """In a process of its own, since llama.cpp aborts where it is asked for what a model cannot do."""
    path = TINY_MODELS["bert"](tmp_path / "bert.gguf")
    program = f"""
from pathlib import Path
from backend_service.engines.llama_model import LlamaModel
from service_kit.faults import StartupFailed
try:
    LlamaModel(Path({str(path)!r}))
except StartupFailed as fault:
    print(fault)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "bert" in done.stdout
    assert "not a decoder-only language model" in done.stdout
    assert "choose another" in done.stdout
