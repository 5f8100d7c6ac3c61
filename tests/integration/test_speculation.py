"""Answers with guesses are the answers without, whoever guesses: a tiny model.

Equal tokens need equal logits, but cells in another order round them differently, and wrong guesses beside other
requests leave such. In this model, which is not quantised, that changes a logit by less than 0.02, and the texts asked
of it here stay the same when its logits change by 0.02 at random, those of sampled answers by 0.04.
"""

from __future__ import annotations

from collections.abc import Callable

import llama_cpp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_service.engines.base import Admission, Slice
from backend_service.engines.llama_cpp import LlamaCppEngine
from backend_service.engines.llama_draft import LlamaDraft
from backend_service.engines.llama_model import LlamaModel
from backend_service.request import Failed, FinishReason
from backend_service.speculation.adaptive import AdaptiveProposer
from backend_service.speculation.base import Proposer
from backend_service.speculation.prompt_lookup import PromptLookup
from benchmarks.truncated_model import truncate
from service_kit.faults import StartupFailed
from service_kit.requests import Sampling
from tests.integration.engines.tiny_models import END_TOKEN, TINY_MODELS, tiny_qwen2
from tests.integration.speculating import (
    CONFIG,
    GUESSES,
    NEW,
    Plain,
    Script,
    nothing_held,
    plain_answers,
    same,
    speculating,
)

END_PROMPT, END_SAMPLING = tuple(range(104, 110)), Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=20)
"""The tiny model's answer to it has an end token for its 14th."""


def _samplings(seed: int, other_seed: int) -> dict[str, Sampling]:
    return {
        "greedy": Sampling(),
        "seeded": Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=seed),
        "penalized": Sampling(temperature=0.7, seed=other_seed, repetition_penalty=1.3, frequency_penalty=0.3),
    }


PROMPTS: dict[tuple[int, ...], dict[str, Sampling]] = {
    tuple(range(18, 25)): _samplings(47, 8),
    tuple(range(72, 92)): _samplings(10, 35),
    tuple(range(60, 120)): _samplings(8, 1),
    tuple(range(114, 174)): _samplings(48, 13),
}
"""With the samplings under which rounding decides nothing."""
FIRST, SECOND, THIRD, _ = PROMPTS


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return LlamaModel(tiny_qwen2(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture(scope="module")
def tiny_truncated(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    """One of its two layers: right now and then."""
    folder = tmp_path_factory.mktemp("tiny")
    truncate(tiny_qwen2(folder / "tiny.gguf"), folder / "truncated.gguf", [0])
    return LlamaModel(folder / "truncated.gguf")


@pytest.fixture(scope="module")
def plain(tiny: LlamaModel) -> Plain:
    return plain_answers(tiny)


@pytest.fixture(params=["prompt_lookup", "script", "adaptive", "truncated", "itself"])
def proposer(request: pytest.FixtureRequest, tiny: LlamaModel, tiny_truncated: LlamaModel, plain: Plain) -> Proposer:
    """Each in turn."""
    texts = {tokens: plain(tokens).tokens for tokens in PROMPTS}
    made: dict[str, Callable[[], Proposer]] = {
        "prompt_lookup": lambda: PromptLookup(ngram_tokens=1),
        "script": lambda: Script(texts, wrong=0.3),
        "adaptive": lambda: AdaptiveProposer(Script(texts, wrong=0.2)),
        "truncated": lambda: LlamaDraft(tiny_truncated, tiny, CONFIG),
        "itself": lambda: LlamaDraft(tiny, tiny, CONFIG),
    }
    return made[request.param]()


@pytest.mark.parametrize("kind", ["greedy", "seeded", "penalized"])
def test_alone(kind: str, proposer: Proposer, tiny: LlamaModel, plain: Plain):
    for tokens, samplings in PROMPTS.items():
        bench = speculating(tiny, proposer)
        assert same(bench.ask(tokens, NEW, sampling=samplings[kind]), plain(tokens, sampling=samplings[kind]))
    assert nothing_held(proposer)


@pytest.mark.parametrize("kind", ["greedy", "seeded", "penalized"])
def test_in_a_batch(kind: str, proposer: Proposer, tiny: LlamaModel, plain: Plain):
    bench = speculating(tiny, proposer)
    names = {tokens: bench.submit(tokens, NEW, sampling=samplings[kind]) for tokens, samplings in PROMPTS.items()}
    bench.run()
    for tokens, name in names.items():
        assert same(bench.answer(name), plain(tokens, sampling=PROMPTS[tokens][kind]))
    assert bench.inner.guessed > 0
    assert bench.inner.right <= bench.inner.guessed
    assert nothing_held(proposer)


@pytest.mark.parametrize("cut", [1, 7, NEW - 1])
@pytest.mark.parametrize("kind", ["greedy", "seeded", "penalized"])
def test_an_answer_that_another_engine_began(
    kind: str, cut: int, tiny: LlamaModel, tiny_truncated: LlamaModel, plain: Plain
):
    """Whether it guessed there or does so here."""
    for tokens, samplings in PROMPTS.items():
        whole = plain(tokens, sampling=samplings[kind]).tokens
        known = (*tokens, *whole[:cut])
        script = Script({tokens: whole, known: whole[cut:]}, wrong=0.3)
        for proposer in (script, PromptLookup(ngram_tokens=1), LlamaDraft(tiny_truncated, tiny, CONFIG)):
            bench = speculating(tiny, proposer)
            for _ in ("cold", "warm"):
                name = bench.submit(known, NEW, sampling=samplings[kind], resumed_tokens=cut)
                assert (*whole[:cut], *bench.run().tokens(name)) == whole
            assert same(bench.ask(tokens, NEW, sampling=samplings[kind]), plain(tokens, sampling=samplings[kind]))
            assert nothing_held(proposer)


def test_a_cancel_in_the_middle(proposer: Proposer, tiny: LlamaModel, plain: Plain):
    bench = speculating(tiny, proposer)
    stays, goes = bench.submit(FIRST, NEW), bench.submit(SECOND, NEW)
    bench.run(until=lambda: len(bench.tokens(goes)) > 12)
    bench.cancel(goes)
    said = bench.tokens(goes)
    late = bench.submit(THIRD, NEW)
    bench.run()
    assert said == plain(SECOND).tokens[: len(said)]
    assert same(bench.answer(stays), plain(FIRST))
    assert same(bench.answer(late), plain(THIRD))
    assert nothing_held(proposer)


def test_wrong_guesses_leave_nothing_in_the_cache(tiny: LlamaModel, plain: Plain):
    script = Script({FIRST: plain(FIRST).tokens}, wrong=0.5)
    bench = speculating(tiny, script)
    answer = bench.ask(FIRST, NEW)
    assert bench.inner.right < bench.inner.guessed
    use = bench.engine.stats()
    assert use.used_tokens == len(FIRST) + NEW - 1
    assert use.reserved_tokens == 0
    longer = (*FIRST, *answer.tokens, 1, 2, 3)
    script.texts[longer] = ()
    warm = bench.ask(longer, 1)
    assert warm.cached_tokens == len(FIRST) + NEW - 1
    assert same(warm, plain(longer, 1))


def test_a_failed_step_makes_it_forget(
    proposer: Proposer, tiny: LlamaModel, plain: Plain, monkeypatch: pytest.MonkeyPatch
):
    bench = speculating(tiny, proposer)
    name = bench.submit(FIRST, NEW)
    bench.run(until=lambda: len(bench.tokens(name)) > 4)
    real, context = llama_cpp.llama_decode, bench.inner._context
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_decode", lambda of, batch: -3 if of is context else real(of, batch))
        bench.tick()
    assert isinstance(bench.events[-1], Failed)
    assert nothing_held(proposer)
    assert same(bench.ask(FIRST, NEW), plain(FIRST))


def test_who_is_always_right_saves_all_the_steps_it_can(tiny: LlamaModel, plain: Plain):
    """And a draft model that is the target itself is."""
    bench = speculating(tiny, LlamaDraft(tiny, tiny, CONFIG))
    count = 1 + 6 * (1 + GUESSES)
    assert same(bench.ask(FIRST, count), plain(FIRST, count))
    assert len(bench.engine.steps) == 1 + 6
    assert bench.inner.right == bench.inner.guessed == 6 * GUESSES


@pytest.mark.parametrize("max_new_tokens", range(1, 2 * GUESSES + 3))
def test_the_length_ends_it_within_right_guesses(max_new_tokens: int, tiny: LlamaModel, plain: Plain):
    bench = speculating(tiny, Script({FIRST: plain(FIRST).tokens}))
    answer = bench.ask(FIRST, max_new_tokens)
    assert answer.reason is FinishReason.LENGTH
    assert answer.tokens == plain(FIRST).tokens[:max_new_tokens]
    assert bench.engine.stats().used_tokens == len(FIRST) + max_new_tokens - 1


@pytest.mark.parametrize("guesses", range(1, 8))
def test_the_end_token_ends_it_within_right_guesses(guesses: int, tiny: LlamaModel, plain: Plain):
    text = unending(tiny, END_PROMPT, END_SAMPLING, 22)
    ended = plain(END_PROMPT, len(text), ignore_eos=False, sampling=END_SAMPLING)
    assert ended.reason is FinishReason.EOS
    assert list(ended.tokens) == text[: text.index(END_TOKEN)]
    bench = speculating(tiny, Script({END_PROMPT: text}), guesses)
    assert same(bench.ask(END_PROMPT, len(text), ignore_eos=False, sampling=END_SAMPLING), ended)
    assert bench.inner.right == bench.inner.guessed > 0


@pytest.mark.parametrize("guesses", range(1, 8))
def test_a_stop_string_ends_it_within_right_guesses(guesses: int, tiny: LlamaModel, plain: Plain):
    text = plain(FIRST).tokens
    stop = next(bytes([token]).decode() for place, token in enumerate(text) if place > 8 and 32 < token < 127)
    stopped = plain(FIRST, stop=(stop,))
    assert stopped.reason is FinishReason.STOP
    bench = speculating(tiny, Script({FIRST: text}), guesses)
    assert same(bench.ask(FIRST, NEW, stop=(stop,)), stopped)
    assert bench.inner.right == bench.inner.guessed > 0


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_load_with_any_mixture_of_right_and_wrong_guesses(data: st.DataObject, tiny: LlamaModel, plain: Plain):
    requests = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(list(PROMPTS)),
                st.sampled_from(["greedy", "seeded", "penalized"]),
                st.integers(1, NEW),  # how long it may get
                st.integers(1, 2 * NEW),  # when it is cancelled
            ),
            min_size=1,
            max_size=6,
        )
    )
    wrong = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    script = Script({tokens: plain(tokens).tokens for tokens in PROMPTS}, wrong)  # of greedy ones
    bench = speculating(tiny, script, guesses=data.draw(st.integers(1, 10)))
    names = [bench.submit(tokens, length, sampling=PROMPTS[tokens][kind]) for tokens, kind, length, _ in requests]
    while bench.scheduler.busy:
        bench.tick()  # the books are checked after every step
        for name, (_, _, _, cancelled_at) in zip(names, requests, strict=True):
            if len(bench.tokens(name)) >= cancelled_at:
                bench.cancel(name)
    for name, (tokens, kind, length, cancelled_at) in zip(names, requests, strict=True):
        said = bench.tokens(name)
        assert min(length, cancelled_at) <= len(said) <= length
        assert said == plain(tokens, sampling=PROMPTS[tokens][kind]).tokens[: len(said)]
    assert nothing_held(script)


def unending(model: LlamaModel, tokens: tuple[int, ...], sampling: Sampling, count: int) -> list[int]:
    """What a model says when nobody heeds its end token."""
    engine = LlamaCppEngine(model, CONFIG)
    admission = engine.admit(tokens, count, sampling, ignore_eos=False)
    assert isinstance(admission, Admission)
    text = list(engine.step([Slice(admission.handle, len(tokens))]).tokens[admission.handle])
    while len(text) < count:
        text += engine.step([Slice(admission.handle, 1)]).tokens[admission.handle]
    return text


@pytest.mark.parametrize("architecture", ["mamba", "gemma2"])
def test_a_model_that_could_not_take_back_wrong_guesses_is_refused(architecture, tmp_path):
    model = LlamaModel(TINY_MODELS[architecture](tmp_path / "model.gguf"))
    with pytest.raises(StartupFailed, match="leave out --speculate"):
        LlamaCppEngine(model, CONFIG, PromptLookup())
